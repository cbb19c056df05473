"""From TOML files and command-line overrides to a ``RunConfig``.

The installed defaults come first. Files compose left to right: tables merge key by key, lists are
replaced whole. ``--dotted.key value`` comes last; a number in the path
(``--orchestrator.train.env.0.group_size 4``) names an entry of a list. A table may be JSON, a list
several words, and ``--ckpt`` or ``--no-ckpt`` switches a table on or off.
"""

from __future__ import annotations

import datetime
import difflib
import itertools
import json
import math
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from prime_rl.config.explain import TAGS, TEXT_TYPES, explain, is_scalar
from prime_rl.config.removed import REMOVED
from prime_rl.config.run import RunConfig
from prime_rl.entries import entries, leaving_out, load_entry
from prime_rl.errors import ConfigError, RunError
from prime_rl.registry.manager import GROUPS, load_plugins
from prime_rl.registry.offers import KINDS, bringer, collect
from prime_rl.rundir.rows import read_table, unique_keys
from prime_rl_app import sft
from prime_rl_app.foreign import may_be_list, our_keys
from prime_rl_app.open_files import fit as fit_open_files

DEFAULTS = "prime_rl_app.plugin"
"""Entry-point group of the TOML file with the defaults: ``package:file.toml``."""

HERE = "prime_rl.machine_defaults"
FITS = "prime_rl.fits"
"""Entry-point groups of functions: that return a table of defaults for this machine; that return a
config with what it leaves open decided for this machine, and notices of that."""

REPLACED = {
    "inference.base_url": "inference.engine",
    **{key: removed.moved_to for key, removed in REMOVED.items() if removed.moved_to is not None},
}
"""Keys, and what each of them replaces: a run with the first one refuses or loses the second, so
the default of that is dropped."""


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
    """Keep an override as the text that the user typed, where its key takes a text. A name such as
    ``7``, ``1e5``, ``nan`` or ``true`` would otherwise be read as another TOML value."""
    typed = {tuple(path): text for path, text in split_overrides(overrides)}
    try:
        RunConfig.model_validate(without_replaced(merge(installed_defaults(), table)))
    except ValidationError as error:
        _write_typed(table, typed, error, ())

    if isinstance(table.get(sft.TABLE), dict):
        try:
            sft.SftConfig.model_validate(table[sft.TABLE])
        except ValidationError as error:
            _write_typed(table, typed, error, (sft.TABLE,))

    ours = our_keys()
    of_plugins = [
        path for path in typed if ".".join(p for p in path if not p.isdecimal()) not in ours
    ]
    if any(_has_scalar(value_at(table, path)) for path in of_plugins):
        _keep_texts_of_plugins(table, typed, of_plugins)


def _write_typed(
    table: dict[str, Any],
    typed: Mapping[tuple[str, ...], Typed],
    error: ValidationError,
    place: tuple[str, ...],
) -> None:
    """Put the typed words where the error, of the table at a ``place``, asks for a text."""
    for problem in error.errors():
        path = (*place, *(str(part) for part in problem["loc"] if part not in TAGS))
        text = typed.get(path)
        is_text = problem["type"] in TEXT_TYPES and is_scalar(problem["input"])
        if is_text and isinstance(text, str):
            set_at(table, path, text)
        words = typed.get(path[:-1])
        if is_text and isinstance(words, list) and path[-1].isdecimal():
            set_at(table, path, words[int(path[-1])])


def _has_scalar(value: Any) -> bool:
    return is_scalar(value) or (isinstance(value, list) and any(map(is_scalar, value)))


def _keep_texts_of_plugins(
    table: dict[str, Any],
    typed: Mapping[tuple[str, ...], Typed],
    paths: Sequence[tuple[str, ...]],
) -> None:
    """Which keys are texts in the table of a plugin, only its class knows."""
    whole = merge(installed_defaults(), table)
    disabled = value_at(whole, ("plugins", "disabled"))
    is_list = isinstance(disabled, list)
    groups = [load_plugins(each, disabled=disabled if is_list else ()) for each in GROUPS]

    places = dict.fromkeys(path[:depth] for path in paths for depth in range(1, len(path)))
    for place in places:
        settings = value_at(whole, place)
        if not isinstance(settings, dict):
            continue
        for hooks, kind in itertools.product(groups, KINDS):
            name = kind.selected_at(place, settings)
            component = collect(hooks, kind).get(name or "")
            if component is None:
                continue
            try:
                component.cls.config_class.model_validate(settings)
            except ValidationError as error:
                _write_typed(table, typed, error, place)


def value_at(table: Any, path: Sequence[str]) -> Any:
    """The value at a dotted path; None if there is none."""
    for part in path:
        if isinstance(table, dict):
            table = table.get(part)
        elif isinstance(table, list) and part.isdecimal() and int(part) < len(table):
            table = table[int(part)]
        else:
            return None
    return table


def build_config(table: Mapping[str, Any]) -> RunConfig:
    """One table over the installed defaults, validated. Raises ``ConfigError``."""
    of_sft, rest = sft.expanded(table)
    whole = without_replaced(merge(merge(installed_defaults(), of_sft), rest))
    _check_written(whole, ())
    try:
        return RunConfig.model_validate(whole)
    except ValidationError as error:
        raise ConfigError(explain(error, RunConfig)) from error


def without_replaced(table: Mapping[str, Any]) -> dict[str, Any]:
    """A config, or that of an older run, without the installed defaults that it replaces."""
    whole = dict(table)
    defaults = installed_defaults()
    for given, replaced in REPLACED.items():
        path = replaced.split(".")
        default = value_at(defaults, path)
        is_default = default is not None and value_at(whole, path) == default
        if is_default and value_at(whole, given.split(".")) is not None:
            whole = _without(whole, path)
    return whole


def _without(table: Mapping[str, Any], path: Sequence[str]) -> dict[str, Any]:
    """A copy without the value at a path."""
    name, *rest = path
    if rest:
        return {**table, name: _without(table[name], rest)}
    return {key: value for key, value in table.items() if key != name}


def _check_written(value: Any, path: tuple[str, ...]) -> None:
    """Processes read the config as JSON in UTF-8, which has no infinity and no half characters: a
    command line in another encoding has those, and so has JSON (``\\ud800``)."""
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            _check_written(str(key), path)
            _check_written(part, (*path, str(key)))
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{'.'.join(path)}: expected a finite number, got {value}")
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"{'.'.join(path) or 'configuration'}: expected a text in UTF-8, got {value[:80]!a}"
            ) from error


def fitted(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """The config as plugins fit it to this machine, and notices of that and of a learning-rate
    schedule that the trainer will shorten. They report no error: ``resolve.check`` does."""
    steps = config.max_steps
    notices: list[str] = []
    scheduler = config.trainer.scheduler
    shortened = scheduler.fitted(steps)
    if shortened != scheduler:
        # The config keeps what was asked for: resumed with more steps, the run has it all.
        shorter = f"max_steps {steps} shortens warmup_steps to {shortened.warmup_steps}"
        notices.append(f"trainer.scheduler: {shorter}, until the run is resumed with more steps")

    config, more = fit_open_files(config)
    notices += more
    with leaving_out(config.plugins.disabled):
        for entry in entries(FITS):
            config, more = load_entry(entry)(config)
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
        tables = [merge(each, load_entry(entry)()) for each in tables]
    return tables[0] if tables else {}


def read_toml(file: Path) -> dict[str, Any]:
    """One file as a table: TOML, or the JSON of a run's resolved config. Raises ``ConfigError``."""
    kind = "JSON" if file.suffix == ".json" else "TOML"
    try:
        if kind == "JSON":
            table: dict[str, Any] = read_table(file)
            json.loads(file.read_text("utf-8-sig"), object_pairs_hook=unique_keys)
            return table
        # A file of a Windows editor begins with a byte-order mark and ends its lines with CR LF.
        return tomllib.loads(file.read_text("utf-8-sig"))
    except RunError as error:
        raise ConfigError(f"{file}: not a JSON file: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{file}: not a {kind} file: it is nested too deeply") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{file}, line {line}: not a {kind} file: expected UTF-8, found the byte "
            f"0x{error.object[error.start]:02x}. Save it as UTF-8."
        ) from error
    except FileNotFoundError:
        key, equals, _ = str(file).partition("=")
        is_override = equals and re.fullmatch(r"[\w.-]+", key)
        way_out = f"A key is set by --{file}" if is_override else "Give the path of a TOML config"
        near = None if is_override else _file_near(file)
        if near is not None:
            raise ConfigError(f"{file}: no such file. Did you mean {near}?") from None
        raise ConfigError(f"{file}: no such file. {way_out}.") from None
    except IsADirectoryError:
        raise ConfigError(f"{file}: a folder. Give the path of a TOML config in it.") from None
    except ValueError as error:
        reason = str(error).replace("Cannot overwrite a value", "the key stands twice")
        raise ConfigError(f"{file}: not a {kind} file: {reason}{_line_of(file, reason)}") from error
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error


def _line_of(file: Path, reason: str) -> str:
    """The line that the TOML reader stopped at, and what often makes it one."""
    number = re.search(r"at line (\d+), column", reason)
    if number is None:
        return ""

    line = file.read_text("utf-8-sig").split("\n")[int(number[1]) - 1].strip()
    way_out = ""
    if line.count('"') % 2:
        way_out = ". A text ends with a quotation mark"
    elif re.fullmatch(r"[\w.-]+\s*:.*", line):
        way_out = ". TOML sets a key by KEY = VALUE"
    elif reason.startswith("Invalid value") or re.fullmatch(r"[\w.-]+\s*=\s*[^\W\d].*", line):
        way_out = ". A text stands in quotation marks"
    return f": `{line[:80]}`{way_out}"


def _file_near(file: Path) -> Path | None:
    """The config that a path without a file was perhaps meant for: the same path with ``.toml``,
    or with one folder or the file's own name spelled differently."""
    with_suffix = file.with_name(f"{file.name}.toml")
    if with_suffix.is_file():
        return with_suffix

    for depth in range(len(file.parts)):
        parent = Path(*file.parts[:depth])
        rest = file.parts[depth + 1 :]
        names = list[str]()
        with suppress(OSError):  # a folder that we may pass through, and not list
            names = os.listdir(parent)
        # Without the suffix, which would make any two short names alike.
        stems = {name.removesuffix(".toml"): name for name in names}
        part = file.parts[depth].removesuffix(".toml")
        for stem in difflib.get_close_matches(part, stems, n=3):
            near = Path(parent, stems[stem], *rest)
            if near.is_file():
                return near

    return None


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
    for path, text in split_overrides(arguments):
        key = ".".join(path)
        if isinstance(text, list):
            result.append((path, [parse_value(each, key) for each in text]))
        elif text is not None:
            result.append((path, parse_value(text, key)))
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
"""The words that the user typed after a key: a value, several words, or none."""


def split_overrides(arguments: Sequence[str]) -> list[tuple[list[str], Typed]]:
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


def parse_value(text: str, key: str = "value") -> Any:
    """A TOML value (number, bool, list, inline table), a table or list of JSON, ``None``, or else a
    string. A date is a string: no key takes one. Raises ``ConfigError`` for JSON that has a key
    twice; ``key``: what is set, for that error."""
    if text == "None":
        return None
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return _json(text, key)
    return text if isinstance(value, datetime.date | datetime.time) else value


def _json(text: str, key: str) -> Any:
    """A table or list of JSON; any other text as it is."""
    if not text.startswith(("{", "[")):
        return text
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    except (ValueError, RecursionError):
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
