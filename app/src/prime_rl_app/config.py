"""From TOML files and command-line overrides to a ``RunConfig``.

The installed defaults come first. Files compose left to right: tables merge key by key, lists are
replaced whole. ``--dotted.key value`` comes last; a number in the path
(``--orchestrator.train.env.0.group_size 4``) names an entry of a list. A table may be JSON, a list
several words, and ``--ckpt`` or ``--no-ckpt`` switches a table on or off.
"""

from __future__ import annotations

import datetime
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from prime_rl.config.explain import TAGS, TEXT_TYPES, explain, is_scalar
from prime_rl.config.run import RunConfig
from prime_rl.entries import entries, leaving_out
from prime_rl.errors import ConfigError
from prime_rl.registry.offers import bringer
from prime_rl_app.foreign import may_be_list, our_keys
from prime_rl_app.open_files import fit as fit_open_files

DEFAULTS = "prime_rl_app.plugin"
"""Entry-point group of the TOML file with the defaults: ``package:file.toml``."""

HERE = "prime_rl.machine_defaults"
FITS = "prime_rl.fits"
"""Entry-point groups of functions: that return a table of defaults for this machine; that return a
config with what it leaves open decided for this machine, and notices of that."""

REPLACED = (("inference", "base_url", "engine"), ("orchestrator", "buffer", "sampler"))
"""Table, a key of it, and a second key that the first replaces: a run with the first one refuses
the second, so the default of that is dropped."""


def load_config(files: Sequence[Path], overrides: Sequence[str] = ()) -> RunConfig:
    """Read, compose, override and validate. Raises ``ConfigError`` that names the file or key."""
    table: dict[str, Any] = {}
    for file in files:
        table = merge(table, read_toml(file))
    override(table, overrides)
    return build_config(table)


def override(table: dict[str, Any], overrides: Sequence[str]) -> None:
    """Write what the command line sets into a table. Raises ``ConfigError``."""
    for path, value in parse_overrides(overrides):
        set_at(table, path, value)
    keep_texts(table, overrides)


def keep_texts(table: dict[str, Any], overrides: Sequence[str]) -> None:
    """Write what the user typed where an override is for a text and reads as another TOML value: a
    name such as ``7``, ``1e5``, ``nan`` or ``true``."""
    texts = {tuple(path): text for path, text in _split_overrides(overrides)}
    try:
        RunConfig.model_validate(without_replaced(merge(installed_defaults(), table)))
    except ValidationError as error:
        for problem in error.errors():
            path = tuple(str(part) for part in problem["loc"] if part not in TAGS)
            text = texts.get(path)
            is_text = problem["type"] in TEXT_TYPES and is_scalar(problem["input"])
            if is_text and isinstance(text, str):
                set_at(table, path, text)
            words = texts.get(path[:-1])
            if is_text and isinstance(words, list) and path[-1].isdecimal():
                set_at(table, path, words[int(path[-1])])


def build_config(table: Mapping[str, Any]) -> RunConfig:
    """One table over the installed defaults, validated. Raises ``ConfigError``."""
    whole = without_replaced(merge(installed_defaults(), table))
    _check_finite(whole, ())
    try:
        return RunConfig.model_validate(whole)
    except ValidationError as error:
        raise ConfigError(explain(error, RunConfig)) from error


def without_replaced(table: Mapping[str, Any]) -> dict[str, Any]:
    """A config, or that of an older run, without the installed defaults that it replaces."""
    whole = dict(table)
    defaults = installed_defaults()
    for place, given, key in REPLACED:
        part = whole.get(place)
        default = defaults.get(place, {}).get(key)
        if isinstance(part, dict) and part.get(given) is not None and part.get(key) == default:
            whole[place] = {name: value for name, value in part.items() if name != key}
    return whole


def _check_finite(value: Any, path: tuple[str, ...]) -> None:
    """Processes read the config as JSON, which has no infinity."""
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            _check_finite(part, (*path, str(key)))
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{'.'.join(path)}: expected a finite number, got {value}")


def fitted(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """The config as plugins fit it to this machine, and notices of that and of a learning-rate
    schedule that the trainer will shorten. They report no error: ``resolve.check`` does."""
    steps = config.max_steps
    notices: list[str] = []
    given = config.trainer.scheduler
    shortened = given.fitted(steps)
    if shortened != given:
        # The config keeps what was asked for: resumed with more steps, the run has it all.
        shorter = f"max_steps {steps} shortens warmup_steps to {shortened.warmup_steps}"
        notices.append(f"trainer.scheduler: {shorter}, until the run is resumed with more steps")

    config, more = fit_open_files(config)
    notices += more
    with leaving_out(config.plugins.disabled):
        for entry in entries(FITS):
            config, more = entry.load()(config)
            notices += more

    return config, notices


def installed_defaults() -> dict[str, Any]:
    """The defaults of an installed distribution; empty if there are none. Over them lies what
    plugins offer for this machine. Raises ``ConfigError`` if there are several."""
    offered = entries(DEFAULTS)
    if len(offered) > 1:
        names = ", ".join(sorted(e.dist.name if e.dist else e.name for e in offered))
        raise ConfigError(
            f"{len(offered)} installed distributions offer defaults ({names}), expected one. "
            "Uninstall the others."
        )

    tables = [read_toml(Path(str(resources(each.module) / each.attr))) for each in offered]
    for entry in entries(HERE):
        tables = [merge(each, entry.load()()) for each in tables]
    return tables[0] if tables else {}


def read_toml(file: Path) -> dict[str, Any]:
    """One file as a table: TOML, or the JSON of a run's resolved config."""
    try:
        loads = json.loads if file.suffix == ".json" else tomllib.loads
        # A file of a Windows editor begins with a byte-order mark and ends its lines with CR LF.
        table: dict[str, Any] = loads(file.read_text("utf-8-sig"))
        return table
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such file. Give the path of a TOML config.") from None
    except (ValueError, IsADirectoryError) as error:
        raise ConfigError(f"{file}: not a TOML file: {error}") from error
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """``above`` laid over ``below``."""
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        result[key] = merge(old, value) if both else value  # type: ignore[arg-type]
    return result


def parse_overrides(arguments: Sequence[str]) -> list[tuple[list[str], Any]]:
    """``["--a.b-c", "3", "--flag", "--no-other"]`` -> ``[(["a", "b_c"], 3),
    (["flag"], "true"), (["other"], "false")]``."""
    result: list[tuple[list[str], Any]] = []
    for path, text in _split_overrides(arguments):
        if isinstance(text, list):
            result.append((path, [parse_value(each) for each in text]))
        elif text is not None:
            result.append((path, parse_value(text)))
        elif path[0].startswith("no_"):
            path = [path[0].removeprefix("no_"), *path[1:]]
            result.append((path, _switched(path, on=False)))
        else:
            result.append((path, _switched(path, on=True)))

    return result


def _switched(path: list[str], on: bool) -> Any:
    """What a key without a value sets: a switch, or a table that has one or is one. The table that
    is there stays."""
    if ".".join([*path, "enabled"]) in our_keys():
        return SwitchedOn(enabled=on)
    is_tuning = path[:-1] == ["trainer"] and bringer("tuning", path[-1]) is not None
    is_part = path[:-1] in (["monitors"], ["trainer", "heads"]) or is_tuning
    if on and is_part:
        return SwitchedOn()
    # As text: only a switch takes it, so that a forgotten value is no silent 1.
    return "true" if on else "false"


class SwitchedOn(dict[str, Any]):
    """A table that is laid over the one that is there; any other table replaces it."""


Typed = str | list[str] | None
"""What the user typed after a key: a value, several words, or nothing."""


def _split_overrides(arguments: Sequence[str]) -> list[tuple[list[str], Typed]]:
    """Dotted keys and what the user typed as their values."""
    result: list[tuple[list[str], Typed]] = []
    rest = list(arguments)
    while rest:
        name = rest.pop(0)
        if not name.startswith("--") or len(name) == 2:
            raise ConfigError(
                f"{name!r}: expected --dotted.key value. Config files come before the overrides."
            )

        name, equals, text = name[2:].partition("=")
        path = name.replace("-", "_").split(".")
        value: Typed = text if equals else None
        if not equals and rest and not rest[0].startswith("--"):
            value = rest.pop(0)
            # Several words are a list, where one may be.
            words = [value]
            while rest and _is_word(rest[0]) and may_be_list(path):
                words.append(rest.pop(0))
            value = words if len(words) > 1 else value
        result.append((path, value))

    return result


def _is_word(text: str) -> bool:
    """Whether it may be an element of a list: no option, and no file."""
    is_number = text[1:2].isdigit() or text[1:2] == "."
    return text != "@" and not text.endswith(".toml") and (text[:1] != "-" or is_number)


def parse_value(text: str) -> Any:
    """A TOML value (number, bool, list, inline table), a table or list of JSON, ``None``, or else a
    string. A date is a string: no key takes one."""
    if text == "None":
        return None
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return _json(text)
    return text if isinstance(value, datetime.date | datetime.time) else value


def _json(text: str) -> Any:
    """A table or list of JSON; any other text as it is."""
    if not text.startswith(("{", "[")):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def set_at(table: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Write ``value`` at a dotted path. Raises ``ConfigError`` if it leads through a value."""
    current: Any = table
    for depth, part in enumerate(path, start=1):
        if not isinstance(current, dict | list):
            raise ConfigError(f"--{'.'.join(path)}: {'.'.join(path[: depth - 1])} is not a table")
        key: Any = part
        if isinstance(current, list):
            if not part.isdecimal() or int(part) >= len(current):
                raise ConfigError(
                    f"--{'.'.join(path[:depth])}: expected the number of an entry, 0 to "
                    f"{len(current) - 1}, got {part!r}"
                )
            key = int(part)

        if depth == len(path):
            old = current.get(key) if isinstance(current, dict) else None
            if isinstance(value, SwitchedOn) and isinstance(old, dict):
                current[key] = merge(old, value)
            else:
                current[key] = value
        else:
            current = current[key] if isinstance(current, list) else current.setdefault(key, {})
