"""``docs/api.md``: fields and methods of the classes that plugins read and subclass."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

from tools.docs.markdown import GENERATED, one_line, plain, table

from prime_rl import Host, LossInputs, LossOutputs, Monitor, Rollout, Sample, Sampler, Source
from prime_rl.plugins.algorithm import ReferenceModel

CLASSES: tuple[type[Any], ...] = (
    *(Rollout, Sample, Host, ReferenceModel),
    *(LossInputs, LossOutputs, Monitor, Sampler, Source),
)


def api_page() -> str:
    """The whole page."""
    parts = [
        "# Classes",
        GENERATED.format(source="prime_rl"),
        "What a plugin gets from core, or overrides. T: tokens. [Hooks](hooks.md) lists the "
        "hooks, and [Writing a plugin](plugins.md) explains both.",
    ]
    for cls in CLASSES:
        parts += [f"## `{cls.__name__}`", plain(inspect.getdoc(cls))]
        for title, rows in (("field", [*fields(cls)]), ("method", [*methods(cls)])):
            if rows:
                parts.append(table((title, "", "what"), rows))
    return "\n\n".join(parts) + "\n"


def fields(cls: type[Any]) -> Iterator[tuple[str, str, str]]:
    """Name, type and docstring of every public attribute: the string below it."""
    body = _body(cls)
    for statement, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            name = statement.target.id
            if not name.startswith("_"):
                yield f"`{name}`", f"`{_unparsed(statement.annotation)}`", _text(after)


def methods(cls: type[Any]) -> Iterator[tuple[str, str, str]]:
    """Name, signature and docstring of every public method and property."""
    for each in _body(cls):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.name[0] != "_":
            decorators = [_unparsed(one) for one in each.decorator_list]
            gives = f" -> {_unparsed(each.returns)}" if each.returns else ""
            arguments = _unparsed(each.args).removeprefix("self").removeprefix(", ")
            is_property = "property" in decorators
            waits = "await " if isinstance(each, ast.AsyncFunctionDef) else ""
            call = "" if is_property else f"({arguments})"
            doc = one_line(ast.get_docstring(each) or "")
            yield f"`{each.name}`", f"`{waits}{call}{gives}`".replace("` ->", "`->"), doc


def _body(cls: type[Any]) -> list[ast.stmt]:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    return definition.body


def _unparsed(node: ast.AST) -> str:
    return ast.unparse(node).replace("'", "").replace("|", "\\|")


def _text(statement: ast.stmt | None) -> str:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return one_line(inspect.cleandoc(str(statement.value.value)))
    return ""
