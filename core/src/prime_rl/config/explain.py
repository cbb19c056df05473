"""What pydantic refuses, in the words of the user's TOML."""

from __future__ import annotations

import datetime
import difflib
from typing import Annotated, Any, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

TAGS = ("policy", "frozen", "plugin")
"""Union tags that pydantic puts into a path."""

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

    return "\n".join(_line(each, model, where) for each in problems if not follows(each))


def _line(problem: Any, model: type[BaseModel], where: str) -> str:
    location = tuple(part for part in problem["loc"] if part not in TAGS)
    place = ".".join(map(str, (where, *location) if where else location)) or "configuration"
    known = _fields_at(model, location[:-1])
    is_value = problem["type"] == "dict_type"  # where unknown keys must be tables of plugins
    if problem["type"] == "extra_forbidden" or (is_value and known and location[-1] not in known):
        close = difflib.get_close_matches(str(location[-1]), known, n=1)
        if close and fits(known[close[0]], problem["input"]):
            return f"{place}: unknown key; did you mean {close[0]!r}?"
        here = f"known here: {', '.join(sorted(known)) or 'none'}"
        return f"{place}: unknown key; {here}{', tables of plugins' if is_value else ''}"

    if problem["type"] == "missing":
        return f"{place}: required, and nothing was given"
    said = EXPECTED.get(problem["type"]) or problem["msg"].removeprefix("Value error, ")
    found = f" (got {problem['input']!r})"
    if problem["type"] in TEXT_TYPES and is_scalar(problem["input"]):
        found += (
            f""". Write it in quotes: "{problem["input"]}", and '"{problem["input"]}"' in a shell"""
        )

    if isinstance(problem["input"], dict):
        is_list = said == EXPECTED["list_type"] and _fields_at(model, location)
        found = f", got a table. Write [[{place}]]" if is_list else ""

    return f"{place}: {said}{found}"


def is_scalar(value: Any) -> bool:
    """Whether it is a TOML value other than a text, a list and a table."""
    return isinstance(value, bool | int | float | datetime.date | datetime.time)


UNKNOWN = object()
"""A value that is not at hand."""


def fits(info: FieldInfo, value: Any) -> bool:
    """Whether a field may take a value: else a similar name is no hint. Of a table, only that it is
    one."""
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


def _fields_at(model: type[BaseModel], location: tuple[Any, ...]) -> dict[str, FieldInfo]:
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
    return next((found for arg in get_args(annotation) if (found := _model_in(arg))), None)
