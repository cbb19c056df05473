"""What pydantic refuses, in the words of the user's TOML."""

from __future__ import annotations

import datetime
import difflib
import json
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

TAGS = ("policy", "frozen", "plugin", "<number>", "<points>")
"""Union tags that pydantic puts into a path."""

NOT_GIVEN = "required, and nothing was given"

TEXT_TYPES = ("string_type", "path_type")
"""Errors of pydantic for a value that is no text."""

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

    refused = {each["loc"] for each in problems}
    lines = [
        _line(each, model, where=where, refused=refused) for each in problems if not follows(each)
    ]
    return "\n".join(lines)


def _line(problem: Any, model: type[BaseModel], where: str, refused: Collection[Any]) -> str:
    location = tuple(part for part in problem["loc"] if part not in TAGS)
    if location[-1:] == ("[key]",):  # the key itself is wrong, and is shown as the value
        location = location[:-2]
    names = [where, *location] if where else location
    place = ".".join(str(name) for name in names) or "configuration"
    known = fields_at(model, location[:-1])
    is_value = problem["type"] == "dict_type"  # where unknown keys must be tables of plugins
    is_unknown = is_value and known and location[-1] not in known

    if problem["type"] == "extra_forbidden" or is_unknown:
        close = difflib.get_close_matches(str(location[-1]), known, n=1)
        if close and fits(known[close[0]], problem["input"]):
            return f"{place}: unknown key; did you mean {close[0]!r}?"
        here = ", ".join(sorted(known)) or "none"
        if is_value:
            here += ", tables of plugins"
        return f"{place}: unknown key; known here: {here}"

    if problem["type"] == "missing":
        return f"{place}: {NOT_GIVEN}{_way_out_of_missing(problem, known, refused)}"

    value = problem["input"]
    reason = EXPECTED.get(problem["type"]) or problem["msg"].removeprefix("Value error, ")
    if isinstance(value, dict):
        is_list_of_tables = reason == EXPECTED["list_type"] and fields_at(model, location)
        way_out = f", got a table. Write [[{place}]]" if is_list_of_tables else ""
        return f"{place}: {reason}{way_out}"

    way_out = ""
    if problem["type"] in TEXT_TYPES and is_scalar(value):
        way_out = f""". Write it in quotes: "{value}", and '"{value}"' in a shell"""
    elif reason == EXPECTED["list_type"] and is_scalar(value) and not isinstance(value, str):
        way_out = f". Write it in brackets: [{value}]"
    elif reason in EXPECTED.values() and isinstance(value, str) and value[:1] in ("{", "["):
        way_out = _way_out_of_text(value)
    elif reason in EXPECTED.values():
        fields = fields_at(model, location)
        way_out = _way_out_of_no_table(value, place, kind=problem["type"], fields=fields)
        if is_value and location and _has_tables(known.get(location[-1])):
            way_out = _way_out_of_names(value, place)

    actual = "" if f"got {value!r}" in reason else f" (got {value!r})"
    return f"{place}: {reason}{actual}{way_out}"


def _way_out_of_no_table(value: Any, place: str, kind: str, fields: Collection[str]) -> str:
    """What to write for a table, or a list of tables, that was given as something else. ``kind``:
    pydantic's name of the error; ``fields``: those of the table."""
    name = next((key for key in ("id", "type", "name") if key in fields), None)
    if isinstance(value, str) and name and kind != "dict_type":
        text = json.dumps(value, ensure_ascii=False)
        table, _, number = place.rpartition(".")
        if number.isdecimal():
            return f". Write [[{table}]] with {name} = {text}"
        if EXPECTED[kind] == EXPECTED["list_type"]:
            return f". Write [[{place}]] with {name} = {text}"
        return f". Write {place}.{name} = {text}"

    is_table = EXPECTED[kind] == EXPECTED["model_type"]
    if isinstance(value, list) and value and is_table and all(isinstance(v, dict) for v in value):
        return f". Write [{place}], in single brackets"
    return ""


def _has_tables(info: FieldInfo | None) -> bool:
    """Whether a field has tables by name: ``[monitors.wandb]``."""
    arguments = get_args(info.annotation) if info else ()
    return len(arguments) == 2 and (
        get_origin(arguments[1]) is dict or _model_in(arguments[1]) is not None
    )


def _way_out_of_names(value: Any, place: str) -> str:
    """What to write for tables by name that were given as a name or a list of names."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
        return ""
    return f". Write {', '.join(f'[{place}.{each}]' for each in names)}" if names else ""


def _way_out_of_text(text: str) -> str:
    """What is wrong with the text of a table or list, which a command line gives as one."""
    is_json = re.search(r'"\s*:', text) is not None
    try:
        json.loads(text) if is_json else tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError) as error:
        reason = str(error).partition(" (at ")[0].partition(": line ")[0]
        return f". It is no {'JSON' if is_json else 'TOML'}: {reason}"
    return ". Write it without quotes around it"


def _way_out_of_missing(
    problem: Any, known: Mapping[str, FieldInfo], refused: Collection[Any]
) -> str:
    """What to write for a required key: the key that was perhaps meant by it, unless that has a
    line of its own, or how to give a table whose class says so (``how_to_give``)."""
    *table, name = problem["loc"]
    keys = problem["input"] if isinstance(problem["input"], dict) else {}
    others = [key for key in keys if key not in known and (*table, key) not in refused]
    close = difflib.get_close_matches(str(name), others, n=1)
    if close:
        return f"; {close[0]!r} is no key here, did you mean {name!r}?"

    model = _model_in(known[name].annotation) if name in known else None
    how = getattr(model, "how_to_give", "")
    return f". {how.replace('a table: ', f'a table: {name} = ')}" if how else ""


def is_scalar(value: Any) -> bool:
    """Whether it is a TOML value other than a text, a list and a table."""
    return isinstance(value, bool | int | float | datetime.date | datetime.time)


UNKNOWN = object()
"""A value that is not at hand."""


def fits(info: FieldInfo, value: Any) -> bool:
    """Whether a field may take a value: else a similar name is no hint. For a table, any table
    counts as a match."""
    if value is UNKNOWN:
        return True
    if isinstance(value, dict):
        return _model_in(info.annotation) is not None or "dict" in str(info.annotation)

    bounds = info.metadata or [None]
    bounded: Any = Annotated[info.annotation, *bounds]
    try:
        TypeAdapter(bounded).validate_python(value)
    except ValidationError:
        return False
    return True


def fields_at(model: type[BaseModel], location: Sequence[Any]) -> dict[str, FieldInfo]:
    """The fields of the table at ``location``, a path of keys and of numbers of list entries;
    none, if no table of the schema is there."""
    current: type[BaseModel] | None = model
    for part in location:
        if isinstance(part, int):
            continue
        info = current.model_fields.get(part) if current else None
        current = _model_in(info.annotation) if info else None
    return dict(current.model_fields) if current else {}


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in get_args(annotation):
        model = _model_in(argument)
        if model is not None:
            return model
    return None
