"""``docs/api.md``: fields and methods of the classes that plugins read and subclass."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from tools.docs.markdown import GENERATED, one_line, plain, table

import prime_rl
from prime_rl import Host, Rollout, Sample
from prime_rl.plugins.base import Offer

FIRST = (Rollout, Sample, Host)
"""What most plugins read, at the top of the page."""
APART = ("Run",)
"""Classes of the application: docs/python.md has them."""


def public_classes() -> list[type[Any]]:
    """Every class that ``prime_rl`` exports, apart from exceptions and the application's."""
    members = (getattr(prime_rl, name) for name in prime_rl._MODULES if name not in APART)
    # ``LossComponent`` is a text: an alias of a class that is not ours.
    classes = {m for m in members if isinstance(m, type) and m.__module__.startswith("prime_rl")}
    plain_classes = [each for each in classes if not issubclass(each, BaseException)]
    rest = sorted({*plain_classes, Offer} - {*FIRST}, key=lambda cls: cls.__name__)
    return [*FIRST, *rest]


def exceptions() -> list[type[BaseException]]:
    """Every exception and warning that ``prime_rl`` exports, by name."""
    members = (getattr(prime_rl, name) for name in prime_rl._MODULES if name not in APART)
    classes = (each for each in members if isinstance(each, type))
    errors = [each for each in classes if issubclass(each, BaseException)]
    return sorted(errors, key=lambda cls: cls.__name__)


def api_page() -> str:
    """The whole page."""
    parts = [
        "# Classes",
        GENERATED.format(source="prime_rl"),
        "Every public class: what a plugin gets from core, or overrides. T: tokens of a sample, C: "
        "trainable tokens of a rollout, N: all its tokens; other letters are explained where they "
        "are used. [Hooks](hooks.md) lists the hooks, and [Writing a plugin](plugins.md) explains "
        "both.",
    ]
    for cls in public_classes():
        parts += [f"## `{cls.__name__}`", plain(inspect.getdoc(cls))]
        bases = [base.__name__ for base in cls.__bases__ if base in public_classes()]
        if bases:
            links = ", ".join(f"[`{base}`](#{base.lower()})" for base in bases)
            parts.append(f"It has what {links} has, too.")
        rows = [*fields(cls)]
        if rows:
            parts.append(table(("field", "type", "default", "what"), rows))
        rows_of_methods = [*methods(cls)]
        if rows_of_methods:
            parts.append(table(("method", "", "what"), rows_of_methods))

    parts += ["## Exceptions", "An import of `prime_rl` each."]
    rows_of_errors = [
        (f"`{cls.__name__}`", f"`{cls.__bases__[0].__name__}`", one_line(inspect.getdoc(cls) or ""))
        for cls in exceptions()
    ]
    parts.append(table(("exception", "is a", "what"), rows_of_errors))
    return "\n\n".join(parts) + "\n"


def fields(cls: type[Any]) -> Iterator[tuple[str, str, str, str]]:
    """Name, type, default and docstring of every public attribute: the string below it."""
    body = _body(cls)
    for statement, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            name = statement.target.id
            if not name.startswith("_"):
                kind = _unparsed(statement.annotation)
                bare = re.fullmatch(r"ClassVar\[(.*)\]", kind)
                yield (
                    f"`{name}`",
                    f"`{bare[1] if bare else kind}`",
                    _default(statement.value),
                    _text(after),
                )


def methods(cls: type[Any]) -> Iterator[tuple[str, str, str]]:
    """Name, signature and docstring of every public method and property."""
    for each in _body(cls):
        is_function = isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_function and (each.name[0] != "_" or each.name == "__call__"):
            decorators = [_unparsed(one) for one in each.decorator_list]
            gives = f" -> {_unparsed(each.returns)}" if each.returns else ""
            arguments = _unparsed(each.args).removeprefix("self").removeprefix(", ")
            is_property = "property" in decorators
            waits = "await " if isinstance(each, ast.AsyncFunctionDef) else ""
            call = "" if is_property else f"({arguments})"
            doc = one_line(ast.get_docstring(each) or "")
            yield f"`{each.name}`", f"`{waits}{call}{gives}`".replace("` ->", "`->"), doc


def _default(value: ast.expr | None) -> str:
    """The default of a field as code; empty if it has to be given, or is not simple."""
    if value is None:
        return ""
    if isinstance(value, ast.Call) and _unparsed(value.func) in ("field", "Field"):
        keywords = {each.arg: each.value for each in value.keywords}
        if "default" in keywords:
            value = keywords["default"]
        elif "default_factory" in keywords:
            made = _unparsed(keywords["default_factory"])
            return f"`{ {'dict': '{}', 'list': '[]', 'set': 'set()'}.get(made, f'{made}()') }`"
        elif value.args:
            value = value.args[0]
        else:
            return ""
    text = ast.unparse(value).replace("|", "\\|")
    return f"`{text}`" if len(text) <= 40 and not text.startswith("lambda") else "see the source"


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
