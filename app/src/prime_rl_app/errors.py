"""Config errors for the user who wrote the file: where the key stands, and what it is called here.

orchestrator.bach_size: unknown key ...   ->   my.toml:12: orchestrator.bach_size: unknown key ...
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from prime_rl.config.explain import TAGS, UNKNOWN
from prime_rl.config.run import RunConfig
from prime_rl.errors import PrimeRLError
from prime_rl_app.config import (
    fitted,
    installed_defaults,
    merge,
    override,
    read_toml,
    without_replaced,
)
from prime_rl_app.foreign import Match, advice

NOT_GIVEN = "required, and nothing was given"
NOT_OFFERED = "no installed plugin offers"
COMMAND_LINE = "command line"
_LINE = re.compile(r"^(?P<key>[A-Za-z_][\w.-]*): (?P<problem>.*)$", re.DOTALL)
_OF_PLUGIN = re.compile(r" \(\w+ '[^']*'\)(?=[.:])")
"""``trainer.loss (loss 'default').adv_tau``: whose key it is."""
_OF_ENV = re.compile(r"^env '(?P<label>[^']*)': (?P<rest>.*)$", re.DOTALL)
_TABLE = re.compile(r"^\s*(\[\[?)\s*([^\]]+?)\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(r"""^\s*((?:[\w-]+|"[^"]*")(?:\s*\.\s*(?:[\w-]+|"[^"]*"))*)\s*=""")


def explained(message: str, arguments: Sequence[str]) -> str:
    """The message of an error; each line about a key gets the file and line that set it, or says
    that the command line did. ``arguments``: the command line, which names the files."""
    source = Source.of(arguments)
    lines = message.split("\n")
    if arguments[:1] == ["run"] and (left := _left(arguments[1:], lines)):
        lines += ["With these keys left out:", *left]
    if source.places and all(f"{key}: {NOT_GIVEN}" in lines for key in ("model", "max_steps")):
        lines += ["A file with a part of a config goes after one with the rest: A.toml B.toml."]
    return "\n".join(each for line in lines for each in _explained(line, source))


@dataclass(frozen=True)
class Source:
    """Where the keys of a run were set."""

    places: dict[str, str]
    """``FILE:LINE`` of each key of the files, and of ``env LABEL``; numbers of list entries are
    part of a key."""
    overridden: frozenset[str]
    """Dotted keys of the command line."""
    values: dict[str, Any]
    """What files and command line set, by the dotted key; of keys that are no table."""

    @classmethod
    def of(cls, arguments: Sequence[str]) -> Source:
        """What a command line names."""
        places: dict[str, str] = {}
        table: dict[str, Any] = {}
        for word in arguments:
            if word.endswith(".toml") and Path(word).is_file():
                text = Path(word).read_text(errors="replace")
                places |= {key: f"{word}:{number}" for key, number in lines_of_keys(text)}
                labels = {f"env {label}": key for label, key in _labels(text)}
                places |= {label: places[key] for label, key in labels.items() if key in places}
                with suppress(PrimeRLError):
                    table = merge(table, read_toml(Path(word)))

        overridden = set()
        for word in arguments:
            if word.startswith("--"):
                key = word[2:].partition("=")[0].replace("-", "_")
                overridden |= {key, key.removeprefix("no_")}
        with suppress(PrimeRLError):
            first = next((n for n, word in enumerate(arguments) if word.startswith("--")), None)
            override(table, [] if first is None else arguments[first:])

        return cls(places, frozenset(overridden), dict(leaves(table)))

    def place(self, key: str) -> str | None:
        """Where a key was set; None: nowhere that is known."""
        if self.is_overridden(key):
            return COMMAND_LINE
        file_place = self.places.get(key) or self._place_in_a_list(key)
        in_command_line = any(each.startswith(f"{key}.") for each in self.overridden)
        in_file = any(each.startswith(f"{key}.") for each in self.places)
        if in_command_line and not in_file:
            return COMMAND_LINE
        return file_place

    def is_overridden(self, key: str) -> bool:
        """Whether the command line set the key, or a table that it is in."""
        return any(key == each or key.startswith(f"{each}.") for each in self.overridden)

    def _place_in_a_list(self, key: str) -> str | None:
        """The place of a key whose message leaves out the number of its list entry."""
        places = [place for each, place in self.places.items() if without_numbers(each) == key]
        return places[0] if len(places) == 1 else None


def leaves(table: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of each value of a table that is no table itself, or an empty one."""
    is_list = isinstance(table, list) and any(isinstance(each, dict) for each in table)
    if place and (table in ({}, []) or not (isinstance(table, dict) or is_list)):
        yield place, table
        return
    for key, value in enumerate(table) if isinstance(table, list) else table.items():
        yield from leaves(value, f"{place}.{key}".lstrip("."))


def without_numbers(key: str) -> str:
    """A dotted key without the numbers of list entries."""
    return ".".join(part for part in key.split(".") if not part.isdecimal())


def _left(arguments: Sequence[str], known: Sequence[str]) -> list[str]:
    """What the installed plugins refuse in a config of which the schema refuses some keys: those
    are left out. Nothing if one of them is required."""
    from prime_rl_app.cli.run import split_arguments
    from prime_rl_app.resolve import check

    try:
        files, overrides = split_arguments(list(arguments))
        table: dict[str, Any] = {}
        for file in files:
            table = merge(table, read_toml(Path(file)))
        override(table, overrides)
        config, refused = _without_refused(without_replaced(merge(installed_defaults(), table)))
        if config is not None and any(line.startswith(refused) for line in known):
            check(fitted(config)[0])
    except PrimeRLError as error:
        return [line for line in str(error).split("\n") if line not in known]

    return []


def _without_refused(table: dict[str, Any]) -> tuple[RunConfig | None, tuple[str, ...]]:
    """The config without the keys that the schema refuses, and these keys; None if one of them is
    required."""
    refused: list[str] = []
    while True:
        try:
            return RunConfig.model_validate(table), tuple(refused)
        except ValidationError as error:
            for each in error.errors():
                path = [part for part in each["loc"] if part not in TAGS]
                inner: Any = table
                for part in path[:-1]:
                    inner = inner[part]
                if not isinstance(inner, dict) or path[-1] not in inner:
                    return None, ()
                if isinstance(inner[path[-1]], dict):
                    return None, ()  # keys that do not go together: without all, others are missing
                del inner[path[-1]]
                refused.append(f"{'.'.join(map(str, path))}: ")


def _explained(line: str, source: Source) -> Iterator[str]:
    """A line of a message with the place that it speaks of. For a table of keys that other
    frameworks have: a line for each of them."""
    of_env = _OF_ENV.match(line)
    if of_env is not None:
        label, rest = of_env.groups()
        place = _place_of_env(label, _OF_PLUGIN.sub("", rest), source)
        yield f"{place}: {line}" if place else line
        return

    parsed = _LINE.match(_OF_PLUGIN.sub("", line))
    if parsed is None:
        yield line
        return

    key = parsed["key"]
    told = {}
    if parsed["problem"].startswith("unknown key"):
        told = _advice(key, source)
    elif parsed["problem"].startswith(NOT_OFFERED) and not source.values.get(key):
        # A table that no plugin has. Where the key has a value, the value is what is missing.
        told = {each: match for each, match in _advice(key, source).items() if match is not None}
    for each, match in (told or {key: None}).items():
        said = line if match is None and each == key else f"{each}: {in_words(match)}"
        place = source.place(each)
        yield said if place is None else f"{place}: {said}"


def _advice(key: str, source: Source) -> dict[str, Match | None]:
    """What is known about a key that is unknown here; about each key in it, if it is a table of
    another framework. Empty: nothing."""
    inner = [each for each in source.values if each.startswith(f"{key}.")]
    by_key = {each: advice(each, source.values[each]) for each in inner}
    if any(by_key.values()):
        return by_key
    match = advice(key, source.values.get(key, UNKNOWN))
    return {} if match is None else {key: match}


def in_words(match: Match | None) -> str:
    """``unknown key; did you mean 'trainer.lora.rank' (of prime-rl-lora)?``"""
    if match is None:
        return "unknown key"
    if match.ours is None:
        return f"unknown key, with no counterpart here: {match.note}"
    note = f" ({match.note})" if match.note else ""
    return f"unknown key; did you mean {match.ours!r}{note}?"


def _place_of_env(label: str, rest: str, source: Source) -> str | None:
    """Where the key is set that an env's message begins with (its own table or the shared one);
    else where the env's table begins."""
    key = (re.match(r"[\w.]+", rest) or [""])[0]
    places = source.places
    table = places.get(f"env {label}", "")
    own = next((k for k, place in places.items() if place == table and k[-1:].isdigit()), "")
    for each in (f"{own}.{key}", f"{own}.{key.partition('.')[0]}", f"orchestrator.{key}"):
        if key and source.is_overridden(each):
            return COMMAND_LINE
        if each in places:
            return places[each]
    return table or None


def _labels(text: str) -> Iterator[tuple[str, str]]:
    """Label and table of each env of a TOML file; those of training last, because their label
    may be that of a held-out one too."""
    try:
        orchestrator = tomllib.loads(text).get("orchestrator", {})
        for part in ("eval", "train"):
            for number, env in enumerate(orchestrator.get(part, {}).get("env", [])):
                yield env.get("name") or env["id"], f"orchestrator.{part}.env.{number}"
    except (tomllib.TOMLDecodeError, AttributeError, KeyError, TypeError):
        return


def lines_of_keys(text: str) -> Iterator[tuple[str, int]]:
    """``(dotted key, line number)`` of each table and key of a TOML file; entries of an array of
    tables are numbered: ``orchestrator.train.env.0.id``. Inline tables count as one key."""
    table = ""
    entries = dict[str, int]()
    closing = ""
    for number, line in enumerate(text.split("\n"), 1):
        if closing:  # inside a text of several lines
            closing = "" if line.count(closing) % 2 else closing
            continue

        closing = next((mark for mark in ('"""', "'''") if line.count(mark) % 2), "")
        header = _TABLE.match(line)
        if header:
            table = _numbered(_plain(header[2]), entries)
            if header[1] == "[[":
                entries[table] = entries.get(table, -1) + 1
                table = f"{table}.{entries[table]}"
            yield table, number
        elif key := _KEY.match(line):
            yield f"{table}.{_plain(key[1])}".lstrip("."), number


def _plain(key: str) -> str:
    return re.sub(r"\s*\.\s*", ".", key).replace('"', "")


def _numbered(table: str, entries: dict[str, int]) -> str:
    """A table inside the newest entry of an array of tables."""
    path = ""
    for part in table.split("."):
        path = f"{path}.{part}".lstrip(".")
        if path in entries and path != table:
            path = f"{path}.{entries[path]}"
    return path
