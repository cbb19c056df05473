"""Config errors for the user who wrote the file: where the key stands, and what it is called here.

orchestrator.bach_size: unknown key ...   ->   my.toml:12: orchestrator.bach_size: unknown key ...
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from prime_rl.config.explain import NOT_GIVEN, TAGS, UNKNOWN, fields_at, fits
from prime_rl.config.run import RunConfig
from prime_rl.errors import PrimeRLError
from prime_rl.registry.offers import bringer
from prime_rl_app.config import (
    fitted,
    installed_defaults,
    merge,
    override,
    read_toml,
    split_overrides,
    value_at,
    without_replaced,
)
from prime_rl_app.foreign import KINDS, Match, advice

NOT_OFFERED = "no installed plugin offers"
COMMAND_LINE = "command line"
NO_FILE = "No config was given. Write: prime-rl run CONFIG.toml"
_LINE = re.compile(r"^(?P<key>[A-Za-z_][\w.-]*): (?P<problem>.*)$", re.DOTALL)
_OF_PLUGIN = re.compile(r" \(\w+ '(?P<plugin>[^']*)'\)(?=[.:])")
"""``trainer.loss (loss 'default').adv_tau``: whose key it is."""
_OF_ENV = re.compile(r"^env '(?P<label>[^']*)': (?P<rest>.*)$", re.DOTALL)
_COMMAND = re.compile(r"^#.*?(?P<command>prime-rl run .*\.toml)\s*$", re.MULTILINE)
_KNOWN = re.compile(r"known here: (?P<keys>[\w, ]+)$")
_AS_IN_A_FILE = re.compile(r'Write (?P<key>[\w.]+) = "(?P<value>[\w./-]+)"$')
_TABLES_IN_A_FILE = re.compile(r"Write \[\[(?P<key>[\w.]+)\]\] with (?P<entry>\w+ = .*)$")
_TABLE = re.compile(r"^\s*(\[\[?)\s*([^\]]+?)\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(r"""^\s*((?:[\w-]+|"[^"]*")(?:\s*\.\s*(?:[\w-]+|"[^"]*"))*)\s*=""")


OF_SFT = {
    "orchestrator.train.env.0.args: data: ": "sft.data: ",
    "orchestrator.train.env.0.args: split: ": "sft.split: ",
    "orchestrator.train.env.0.args: subset: ": "sft.subset: ",
    "orchestrator.train.env.1.args: data: ": "sft.validation: ",
    "orchestrator.train.env.1.args: split: ": "sft.validation_split: ",
}
"""Keys that ``[sft]`` has set, and the key that the user has written."""


def explained(message: str, arguments: Sequence[str]) -> str:
    """The message of an error; each line about a key gets the file and line that set it, or says
    that the command line did. ``arguments``: the command line, which names the files."""
    source = KeySource.of(arguments)
    written = (*source.places, *source.overridden)
    if any(place.startswith("sft.") for place in written):
        # Rows that are held out of ``sft.data`` are an env of their own.
        holds_out = not any(place.startswith("sft.validation") for place in written)
        for name, key in OF_SFT.items():
            message = message.replace(name, key.replace("validation", "data") if holds_out else key)
    lines = [*dict.fromkeys(message.split("\n"))]
    said = [each for line in lines for each in _explained(line, source)]

    left = _left(arguments[1:], lines) if arguments[:1] == ["run"] else []
    # A key that is missing because it is misspelt has been reported already.
    missing = re.compile(r"did you mean '([\w.]+?)(?:\.id)?'").findall("\n".join(said))
    left = [line for line in left if line.partition(":")[0] not in missing]
    if left:
        said += ["With these keys left out:"]
        said += [each for line in left for each in _explained(line, source)]

    if all(f"{key}: {NOT_GIVEN}" in lines for key in ("model", "max_steps")):
        said += [_composed(source.files) if source.files else NO_FILE]
    return "\n".join(said)


def _composed(files: Sequence[str]) -> str:
    """``files`` are parts of a config. The command that lays them over a whole one: from a comment
    of the last file, else its general form."""
    last = files[-1]
    command = _COMMAND.search(Path(last).read_text("utf-8-sig", errors="replace"))
    example = command["command"] if command else f"prime-rl run WHOLE.toml {' '.join(files)}"
    return f"{last} is a part of a config, to be laid over a whole one. Write: {example}"


@dataclass(frozen=True)
class KeySource:
    """Where the keys of a run were set."""

    files: tuple[str, ...]
    """The TOML files of the command line, in its order."""
    places: dict[str, str]
    """``FILE:LINE`` of each key of the files, and of ``env LABEL``; numbers of list entries are
    part of a key."""
    overridden: frozenset[str]
    """Dotted keys of the command line."""
    values: dict[str, Any]
    """The values that files and the command line set, by dotted key, without tables."""
    bare: frozenset[str] = frozenset()
    """Dotted keys of the command line that came without a value."""

    @classmethod
    def of(cls, arguments: Sequence[str]) -> KeySource:
        """What a command line names."""
        files: list[str] = []
        places: dict[str, str] = {}
        table: dict[str, Any] = {}
        for word in arguments:
            if word.endswith(".toml") and Path(word).is_file():
                files.append(word)
                text = Path(word).read_text("utf-8-sig", errors="replace")
                with suppress(PrimeRLError):
                    above = read_toml(Path(word))
                    places = _without_replaced(places, above)
                    table = merge(table, above)
                places |= {key: f"{word}:{number}" for key, number in lines_of_keys(text)}
                labels = {f"env {label}": key for label, key in _labels(text)}
                places |= {label: places[key] for label, key in labels.items() if key in places}

        overridden = set()
        bare = set()
        first = next((n for n, word in enumerate(arguments) if word.startswith("--")), None)
        overrides = [] if first is None else arguments[first:]
        for word in arguments:
            if word.startswith("--"):
                key = word[2:].partition("=")[0].replace("-", "_")
                overridden |= {key, key.removeprefix("no_")}
        with suppress(PrimeRLError):
            bare = {".".join(path) for path, typed in split_overrides(overrides) if typed is None}
        with suppress(PrimeRLError):
            override(table, overrides)

        return cls(
            tuple(files), places, frozenset(overridden), dict(leaves(table)), frozenset(bare)
        )

    def place(self, key: str, problem: str = "") -> str | None:
        """Where a key was set, or what a message says about it; None: nowhere that is known. For a
        missing key, the line where its table begins."""
        if self.is_overridden(key) or self._is_about_the_command_line(key, problem):
            return COMMAND_LINE
        if problem.startswith(NOT_GIVEN) and key not in self.places:
            return self._place_of_table(key.rpartition(".")[0])
        file_place = (
            self.places.get(key) or self.places.get(f"{key}.0") or self._place_in_a_list(key)
        )
        in_command_line = any(each.startswith(f"{key}.") for each in self.overridden)
        in_file = any(each.startswith(f"{key}.") for each in self.places)
        if in_command_line and not in_file:
            return COMMAND_LINE
        if file_place is None and (key in self.values or self._is_in_a_value(key)):
            outer = key  # an inline table or a list
            while outer and file_place is None:
                outer = outer.rpartition(".")[0]
                file_place = self.places.get(outer)
        return file_place

    def is_overridden(self, key: str) -> bool:
        """Whether the command line set the key, or a table that it is in."""
        return any(key == each or key.startswith(f"{each}.") for each in self.overridden)

    def _is_in_a_value(self, key: str) -> bool:
        """Whether a key is an entry of a list that has no tables."""
        parts = key.split(".")
        return any(".".join(parts[:depth]) in self.values for depth in range(1, len(parts)))

    def _place_of_table(self, table: str) -> str | None:
        """Where a table begins, or the first of the dotted keys that make it."""
        inside = [each for each in self.places if table and f"{each}.".startswith(f"{table}.")]
        return self.places[inside[0]] if inside else None

    def _is_about_the_command_line(self, key: str, problem: str) -> bool:
        """Whether a message about a table has a value that the command line set in it."""
        inside = [each for each in self.overridden if each.startswith(f"{key}.")]
        values = [self.values.get(each) for each in inside]
        return any(value is not None and repr(value) in problem for value in values)

    def _place_in_a_list(self, key: str) -> str | None:
        """The place of a key whose message leaves out the number of its list entry."""
        places = [place for each, place in self.places.items() if without_numbers(each) == key]
        return places[0] if len(places) == 1 else None


def _without_replaced(places: Mapping[str, str], above: Mapping[str, Any]) -> dict[str, str]:
    """The places of keys without those in lists and values that a file ``above`` replaces whole."""
    replaced = [key for key, value in _values(above) if not isinstance(value, dict)]
    gone = [
        key for key in places if any(key == each or key.startswith(f"{each}.") for each in replaced)
    ]
    of_gone = {places[key] for key in gone}
    return {
        key: place
        for key, place in places.items()
        if key not in gone and not (key.startswith("env ") and place in of_gone)
    }


def _values(table: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything in a table, except what is in lists."""
    for key, value in table.items():
        dotted = f"{place}.{key}".lstrip(".")
        yield dotted, value
        if isinstance(value, dict):
            yield from _values(value, dotted)


def leaves(table: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of each value in a table, tables inside it included. An empty table is a
    value."""
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
    """What the installed plugins refuse in the rest of a config, without the keys that its schema
    refuses. Nothing if one of these keys is required."""
    from prime_rl_app.cli.run import split_arguments
    from prime_rl_app.resolve import check

    refused: tuple[str, ...] = ()
    try:
        files, overrides = split_arguments(list(arguments))
        table: dict[str, Any] = {}
        for file in files:
            table = merge(table, read_toml(Path(file)))
        override(table, overrides)
        config, refused = _without_refused(table)
        if config is not None and any(line.startswith(refused) for line in known):
            check(fitted(config)[0])
    except PrimeRLError as error:
        # What is missing in a table because that was left out is no further problem.
        inside = tuple(f"{each.removesuffix(': ')}." for each in refused)
        return [
            line
            for line in str(error).split("\n")
            if line not in known and not line.startswith((*refused, *inside))
        ]

    return []


def _without_refused(table: dict[str, Any]) -> tuple[RunConfig | None, tuple[str, ...]]:
    """The config of a ``table`` over the installed defaults, without the keys that the schema
    refuses, and these keys; None if one of them is required."""
    refused: list[str] = []
    while True:
        try:
            whole = without_replaced(merge(installed_defaults(), table))
            return RunConfig.model_validate(whole), tuple(refused)
        except ValidationError as error:
            for each in error.errors():
                path = [part for part in each["loc"] if part not in TAGS]
                inner = value_at(table, [str(part) for part in path[:-1]])
                if not isinstance(inner, dict) or path[-1] not in inner:
                    return None, ()
                is_unknown = each["type"] == "extra_forbidden"
                if isinstance(inner[path[-1]], dict) and not is_unknown:
                    return None, ()  # keys that do not go together: without all, others are missing
                del inner[path[-1]]
                refused.append(f"{'.'.join(map(str, path))}: ")


def _explained(line: str, source: KeySource) -> Iterator[str]:
    """A line of a message with the place that it speaks of. For a table of keys that other
    frameworks have: a line for each of them."""
    of_env = _OF_ENV.match(line)
    if of_env is not None:
        label, rest = of_env.groups()
        plain = _OF_PLUGIN.sub("", rest)
        place = _place_of_env(label, rest, source)
        key = plain.partition(":")[0]
        line = _with_keys_beside(line, f"orchestrator.train.env.{key}", UNKNOWN)
        yield f"{place}: {line}" if place else line
        return

    parsed = _LINE.match(_OF_PLUGIN.sub("", line))
    if parsed is None:
        yield line
        return

    key = parsed["key"]
    told = {}
    if parsed["problem"].startswith("unknown key") and _is_table_of_a_plugin(key):
        value = source.values.get(key, UNKNOWN)
        shown = "" if value is UNKNOWN else f" (got {value!r})"
        line = f"{key}: expected a table of keys{shown}. Write [{key}], or --{key}.KEY VALUE"
    elif parsed["problem"].startswith("unknown key"):
        told = _advice(key, source)
        line = _with_keys_beside(line, key, source.values.get(key, UNKNOWN))
    elif parsed["problem"].startswith(NOT_OFFERED) and not _names_a_plugin(key, source):
        # A table that no plugin has. Where the key has a value, the value is what is missing.
        told = {each: match for each, match in _advice(key, source).items() if match is not None}
    if key in source.bare and "(got 'true')" in parsed["problem"]:
        line = f"{key}: expected a value after --{key}, found none"
    for each, match in (told or {key: None}).items():
        if match is None and each == key:
            said = line
        elif match is not None and each == key and _is_of_another_plugin(match, line):
            # The keys of the plugin that was chosen come first.
            said = f"{line}; elsewhere it is {match.ours!r} ({match.note})"
        else:
            said = f"{each}: {in_words(match)}"
        place = source.place(each, parsed["problem"])
        if place == COMMAND_LINE:
            said = _AS_IN_A_FILE.sub(r"Write --\g<key> \g<value>", said)
            said = _TABLES_IN_A_FILE.sub(r"Write --\g<key> '[{\g<entry>}]'", said)
        yield said if place is None else f"{place}: {said}"


def _is_table_of_a_plugin(key: str) -> bool:
    """Whether a plugin that prime-rl knows has a table of that name: ``trainer.lora``."""
    table, _, name = key.rpartition(".")
    return any(bringer(kind, name) for kind in KINDS.get(table, ()))


def _is_of_another_plugin(match: Match, line: str) -> bool:
    """Whether a hint is about a key of another plugin than the one whose keys the line lists."""
    chosen = _OF_PLUGIN.search(line)
    is_of_a_plugin = match.note.startswith("of ")
    return chosen is not None and is_of_a_plugin and chosen["plugin"] not in match.note


def _names_a_plugin(key: str, source: KeySource) -> bool:
    """Whether the value of the key, or of ``type`` or ``name`` in its table, is a plugin's name."""
    return any(source.values.get(each) for each in (key, f"{key}.type", f"{key}.name"))


def _with_keys_beside(line: str, key: str, value: Any) -> str:
    """The line about an unknown key of a plugin, with the keys that core has in the same table:
    to the user ``lr`` of ``[trainer.optim]`` is as good a key as the optimizer's own."""
    known = _KNOWN.search(line)
    if known is None or _OF_PLUGIN.search(line) is None:
        return line

    *table, name = key.split(".")
    fields = fields_at(RunConfig, table)
    close = difflib.get_close_matches(name, fields, n=1)
    if close and fits(fields[close[0]], value):
        return f"{line[: known.start()]}did you mean {close[0]!r}?"

    names = {*fields, *known["keys"].split(", ")} - {"none"}
    return f"{line[: known.start()]}known here: {', '.join(sorted(names))}"


def _advice(key: str, source: KeySource) -> dict[str, Match | None]:
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


def _place_of_env(label: str, rest: str, source: KeySource) -> str | None:
    """Where the key at the start of an env's message is set: in the env's own table, in the shared
    one, or on the command line, if that set a key or value that the message has. If it is not set,
    where the env's table begins."""
    key = (re.match(r"[\w.]+", _OF_PLUGIN.sub("", rest)) or [""])[0]
    places = source.places
    table = places.get(f"env {label}", "")
    table_key = next((k for k, place in places.items() if place == table and k[-1:].isdigit()), "")
    tables = [each for each in (table_key, "orchestrator") if each]
    overridden = [
        each for each in source.overridden if any(each.startswith(f"{one}.") for one in tables)
    ]
    if any(_is_named(each, rest, source.values.get(each)) for each in overridden):
        return COMMAND_LINE
    for each in (
        f"{table_key}.{key}",
        f"{table_key}.{key.partition('.')[0]}",
        f"orchestrator.{key}",
    ):
        if key and source.is_overridden(each):
            return COMMAND_LINE
        if each in places:
            return places[each]
    return table or None


def _is_named(key: str, message: str, value: Any) -> bool:
    """Whether a message speaks of a key, by its last part or by a text that is its value."""
    name = key.rpartition(".")[2]
    has_value = isinstance(value, str) and repr(value) in message
    return has_value or re.search(rf"\b{re.escape(name)}\b", message) is not None


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
