"""Where an expert's response to a rollout's example is found, and how it is shown."""

from __future__ import annotations

from prime_rl import ConfigError, Rollout

TEMPLATE = """\
Here is an example of an expert response:
<demonstration>
{demonstration}
</demonstration>"""


def check_template(template: str) -> str:
    """The template itself. Raises ``ValueError`` unless ``{demonstration}`` is its one field."""
    try:
        shows = "\0" in template.format(demonstration="\0")
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise ValueError(
            f"its only field may be {{demonstration}}, and formatting it gives "
            f"{type(error).__name__}: {error}. Write any other brace twice"
        ) from error
    if not shows:
        raise ValueError(
            "it has no {demonstration}: the reference would see no example. Put the field where "
            "the expert's response belongs"
        )
    return template


def demonstration_of(rollout: Rollout, key: str) -> str:
    """The rollout's ``info[key]``, else its example's field of that name. Raises ``ConfigError`` if
    neither is there, or it is no text."""
    where = f"env {rollout.env!r}, example {rollout.example_id}"
    if key not in rollout.info and key not in rollout.task:
        raise ConfigError(
            f"{where}: no demonstration: neither info nor the example has {key!r} (info has: "
            f"{_keys(rollout.info)}; the example has: {_keys(rollout.task)}). Set algo.demo_key to "
            "the field that holds the expert's response, or have the environment give one."
        )
    found = rollout.info.get(key, rollout.task.get(key))
    if not isinstance(found, str) or not found.strip():
        raise ConfigError(
            f"{where}: {key!r} is {found!r}, expected the text of an expert's response. Set "
            "algo.demo_key to another field, or mend the example."
        )
    return found


def _keys(table: dict[str, object]) -> str:
    return ", ".join(map(repr, table)) or "none"
