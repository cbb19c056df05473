"""``docs/hooks.md``: every hookspec, in the order and with the docstrings of its module."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tools.docs.markdown import GENERATED, one_line, plain, table

from prime_rl.plugins import hookspecs
from prime_rl.plugins.hookspecs import PROJECT, TRAINER_GROUP
from prime_rl.plugins.observer import Observer
from prime_rl.registry.checks import ASYNC_HOOKS, SHARED_HOOKS, SPECS, TRAINER_HOOKS
from prime_rl.registry.offers import KINDS

IMPLEMENTERS = {
    "registration": "a module or object that an entry point names",
    "sampling": "the env's own algorithm; any installed plugin, for every env",
    "scoring": "the env's own algorithm; any installed plugin, for every env",
    "filtering": "a filter of the slot; any installed plugin, for every slot",
    "deprecated": "any installed plugin; not an algorithm or a filter",
}
"""Who may implement the hooks of a section, by the section's name in ``hookspecs``."""


@dataclass(frozen=True)
class Section:
    """A ``# -- name: called when ---`` comment of the module, and the hooks below it."""

    name: str
    comment: str
    hooks: list[str]


def hooks_page() -> str:
    """The whole page."""
    source = hookspecs.__name__
    parts = ["# Hooks", GENERATED.format(source=source), introduction(hookspecs.__doc__)]
    for section in sections(inspect.getsource(hookspecs)):
        parts.append(f"## {section.name.capitalize()}: {section.comment}")
        parts += [hook(name, section) for name in section.hooks]
    parts += ["## Classes that plugins register", _kinds()]
    parts += ["## Events of an `Observer`", _events()]
    return "\n\n".join(parts) + "\n"


def sections(source: str) -> Iterator[Section]:
    """The module's sections in order. Raises ``ValueError`` if ``IMPLEMENTERS`` lacks one."""
    chunks = re.split(r"^# -- (\w+): (.+?) -+$", source, flags=re.MULTILINE)[1:]
    for name, comment, body in zip(chunks[::3], chunks[1::3], chunks[2::3], strict=True):
        if name not in IMPLEMENTERS:
            raise ValueError(f"hookspecs: new section {name!r}: add it to {__name__}.IMPLEMENTERS")
        defined = re.findall(r"^(?:async )?def (\w+)\(", body, flags=re.MULTILINE)
        yield Section(name, comment, [each for each in defined if each in SPECS])


def introduction(docstring: str | None) -> str:
    """The module's docstring: a title, a diagram of the flow, the rules."""
    title, flow, rules = (docstring or "").strip().split("\n\n", maxsplit=2)
    return f"{plain(title)}\n\n```text\n{textwrap.dedent(flow)}\n```\n\n{plain(rules)}"


def hook(name: str, section: Section) -> str:
    """One hook: signature, docstring, and facts about its calls."""
    spec = SPECS[name]
    groups = f"group `{TRAINER_GROUP if name in TRAINER_HOOKS else PROJECT}`"
    if name in SHARED_HOOKS:
        groups = f"groups `{PROJECT}` and `{TRAINER_GROUP}`"
    either = "`def` or `async def`; the caller awaits"
    facts = {
        "Implement as": either if name in ASYNC_HOOKS else "`def`; `async def` is refused",
        "Called": section.comment.removeprefix("called ").partition(";")[0],
        "Results": _results(spec),
        "Implemented by": f"{IMPLEMENTERS[section.name]} (entry-point {groups})",
    }
    lines = "\n".join(f"- {fact}: {text}" for fact, text in facts.items())
    code = f"```python\n{signature(spec)}\n```"
    return "\n\n".join([f"### `{name}`", code, plain(spec.__doc__), lines])


def signature(spec: Callable[..., Any]) -> str:
    """``async def score_group(group: Group) -> None``"""
    keyword = "async def" if inspect.iscoroutinefunction(spec) else "def"
    text = str(inspect.signature(spec)).replace("'", "")
    return f"{keyword} {spec.__name__}{text}"


def _results(spec: Callable[..., Any]) -> str:
    annotation = str(inspect.signature(spec).return_annotation)
    if annotation == "None":
        return "none; all implementations run, one after the other"
    if annotation.startswith("Iterable[type["):
        return "all are collected; two classes with the same name stop the run"
    return "all implementations are called; the results combine as described above"


def _events() -> str:
    """The methods of ``Observer`` that the loop calls, in the order of the class."""
    others = {"__init__", "check"}
    methods = {
        name: each
        for name, each in vars(Observer).items()
        if inspect.isfunction(each) and name not in others
    }
    rows = [
        (f"`{signature(each)}`", one_line((each.__doc__ or "").partition("\n\n")[0]))
        for each in methods.values()
    ]
    return table(("method", "when"), rows)


def _kinds() -> str:
    rows = [
        (
            f"`{kind.hook}`",
            f"`{kind.base.__name__}`",
            f"`{kind.key}`",
            one_line((kind.base.__doc__ or "").partition("\n\n")[0]),
        )
        for kind in KINDS
    ]
    return table(("hook", "returns subclasses of", "selected by", "description"), rows)
