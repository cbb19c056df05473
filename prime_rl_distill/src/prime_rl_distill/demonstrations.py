"""Find the demonstration of a rollout's example, and check the template that shows it."""

from __future__ import annotations

from prime_rl import ConfigError, Rollout

TEMPLATE = """\
Here is an example of an expert response:
<demonstration>
{demonstration}
</demonstration>"""


def check_template(template: str) -> str:
    """Returns the template. Raises ``ValueError`` unless its only field is ``{demonstration}``."""
    try:
        shows = "\0" in template.format(demonstration="\0")
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise ValueError(
            f"its only field may be {{demonstration}}, but formatting it gives "
            f"{type(error).__name__}: {error}. Write all other braces twice"
        ) from error

    if not shows:
        raise ValueError(
            "it has no {demonstration}: the reference would see no example. Put the field where "
            "the expert's response belongs"
        )

    return template


def demonstration_of(rollout: Rollout, key: str) -> str:
    """The rollout's ``info[key]``, else its example's field ``key``. Raises ``ConfigError`` if
    there is neither, or it is not a text."""
    where = f"env {rollout.env!r}, example {rollout.example_id}"
    if key not in rollout.info and key not in rollout.task:
        raise ConfigError(
            f"{where}: no demonstration: neither info nor the example has {key!r} (info has: "
            f"{_keys(rollout.info)}; the example has: {_keys(rollout.task)}). Set algo.demo_key to "
            "the field with the expert's response, or change the environment to provide one."
        )

    value = rollout.info.get(key, rollout.task.get(key))
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(
            f"{where}: {key!r} is {value!r}, expected the text of an expert's response. Set "
            "algo.demo_key to another field, or fix the example."
        )

    return value


def _keys(table: dict[str, object]) -> str:
    return ", ".join(map(repr, table)) or "none"
