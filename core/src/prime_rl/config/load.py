"""From TOML files and command-line overrides to a ``RunConfig``.

The installed defaults come first. Files compose left to right: tables merge key by key, lists are
replaced whole. ``--dotted.key value`` comes last; a number in the path
(``--orchestrator.train.env.0.group_size 4``) names an entry of a list.
"""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files as resources
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from prime_rl.config.run import RunConfig
from prime_rl.entries import entries, leaving_out
from prime_rl.errors import ConfigError

DEFAULTS = "prime_rl.defaults"
"""Entry-point group of the TOML file with the defaults: ``package:file.toml``."""

HERE, FITS = "prime_rl.machine_defaults", "prime_rl.fits"
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
    for path, value in parse_overrides(overrides):
        set_at(table, path, value)
    return build_config(table)


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
    whole, defaults = dict(table), installed_defaults()
    for place, given, key in REPLACED:
        part, default = whole.get(place), defaults.get(place, {}).get(key)
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
    """The config with its learning-rate schedule shortened to ``max_steps``, then as plugins fit it
    to this machine, and notices of that. They report no error: ``resolve.check`` does."""
    steps, notices = config.max_steps, list[str]()
    if (after := config.trainer.scheduler.fitted(steps)) != config.trainer.scheduler:
        trainer = config.trainer.model_copy(update={"scheduler": after})
        config = config.model_copy(update={"trainer": trainer})
        shorter = f"max_steps {steps} shortens warmup_steps to {after.warmup_steps}"
        notices.append(f"trainer.scheduler: {shorter}")
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
        table: dict[str, Any] = loads(file.read_text())
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
    rest = list(arguments)
    while rest:
        name = rest.pop(0)
        if not name.startswith("--") or len(name) == 2:
            raise ConfigError(
                f"{name!r}: expected --dotted.key value. Config files come before the overrides."
            )
        name, equals, inline = name[2:].partition("=")
        if equals:
            value: Any = parse_value(inline)
        elif rest and not rest[0].startswith("--"):
            value = parse_value(rest.pop(0))
        else:
            # As text: only a switch takes it, so that a forgotten value is no silent 1.
            value = "false" if name.startswith("no-") else "true"
            name = name.removeprefix("no-")
        result.append((name.replace("-", "_").split("."), value))
    return result


def parse_value(text: str) -> Any:
    """A TOML value (number, bool, list, inline table), ``None``, or else a string."""
    if text == "None":
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
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
            current[key] = value
        else:
            current = current[key] if isinstance(current, list) else current.setdefault(key, {})


TAGS = ("policy", "frozen", "plugin")
"""Union tags that pydantic puts into a path."""

EXPECTED = dict.fromkeys(("tuple_type", "list_type"), "expected a list")
EXPECTED |= dict.fromkeys(("dict_type", "model_type"), "expected a table of keys")
"""In the words of TOML instead of Python."""


def explain(error: ValidationError, model: type[BaseModel], where: str = "") -> str:
    """One line per problem: ``orchestrator.bach_size: unknown key; did you mean 'batch_size'?``"""
    problems = error.errors()

    def follows(problem: Any) -> bool:
        """pydantic also calls a list too short if it refused its entries."""
        place = problem["loc"]
        deeper = [p for p in problems if p["loc"][: len(place)] == place != p["loc"]]
        return problem["type"] == "too_short" and bool(deeper)

    return "\n".join(_line(each, model, where) for each in problems if not follows(each))


def _line(problem: Any, model: type[BaseModel], where: str) -> str:
    location = tuple(part for part in problem["loc"] if part not in TAGS)
    place = ".".join(map(str, (where, *location) if where else location)) or "configuration"
    known = sorted(_fields_at(model, location[:-1]))
    is_value = problem["type"] == "dict_type"  # where unknown keys must be tables of plugins
    if problem["type"] == "extra_forbidden" or (is_value and known and location[-1] not in known):
        close = difflib.get_close_matches(str(location[-1]), known, n=1)
        here = f"known here: {', '.join(known) or 'none'}{', tables of plugins' * is_value}"
        return f"{place}: unknown key; " + (f"did you mean {close[0]!r}?" if close else here)
    if problem["type"] == "missing":
        return f"{place}: required, and nothing was given"
    said = EXPECTED.get(problem["type"]) or problem["msg"].removeprefix("Value error, ")
    found = f" (got {problem['input']!r})"
    if isinstance(problem["input"], dict):
        is_list = said == EXPECTED["list_type"] and _fields_at(model, location)
        found = f", got a table. Write [[{place}]]" if is_list else ""
    return f"{place}: {said}{found}"


def _fields_at(model: type[BaseModel], location: tuple[Any, ...]) -> set[str]:
    current: type[BaseModel] | None = model
    for part in location:
        if isinstance(part, int):
            continue
        info = current.model_fields.get(part) if current else None
        current = _model_in(info.annotation) if info else None
    return set(current.model_fields) if current else set()


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for arg in get_args(annotation) if (found := _model_in(arg))), None)
