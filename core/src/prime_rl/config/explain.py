"""Turn pydantic's findings into lines a person can act on: where, what was found, what was
expected."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

TAGS = ("policy", "frozen", "plugin")
"""What pydantic puts into a path to say which member of a union it tried."""


EXPECTED = {
    "tuple_type": "expected a list",
    "list_type": "expected a list",
    "dict_type": "expected a table of keys",
    "model_type": "expected a table of keys",
}
"""In TOML's words, not Python's."""


def explain(error: ValidationError, model: type[BaseModel], where: str = "") -> str:
    """One line a problem: ``orchestrator.bach_size: unknown key; did you mean 'batch_size'?``"""
    problems = error.errors()
    own = [problem for problem in problems if not _follows_from_another(problem, problems)]
    return "\n".join(_line(problem, model, where) for problem in own)


def _follows_from_another(problem: Any, problems: Sequence[Any]) -> bool:
    """A list whose entries were refused counts as too short besides."""
    place, size = problem["loc"], len(problem["loc"])
    deeper = any(len(p["loc"]) > size and p["loc"][:size] == place for p in problems)
    return problem["type"] == "too_short" and deeper


def _line(problem: Any, model: type[BaseModel], where: str) -> str:
    location = tuple(part for part in problem["loc"] if part not in TAGS)
    place = (
        ".".join(str(part) for part in ((where,) if where else ()) + location) or "configuration"
    )
    if problem["type"] == "extra_forbidden":
        known = sorted(_fields_at(model, location[:-1]))
        close = difflib.get_close_matches(str(location[-1]), known, n=1)
        hint = (
            f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known) or 'none'}"
        )
        return f"{place}: unknown key; {hint}"
    if problem["type"] == "missing":
        return f"{place}: required, and nothing was given"
    found = f" (got {problem['input']!r})" if not isinstance(problem["input"], dict) else ""
    said = EXPECTED.get(problem["type"]) or problem["msg"].removeprefix("Value error, ")
    return f"{place}: {said}{found}"


def _fields_at(model: type[BaseModel], location: tuple[Any, ...]) -> set[str]:
    """The field names of the table at ``location``, following nested models and tuples of
    models."""
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
