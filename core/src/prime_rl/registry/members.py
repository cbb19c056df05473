"""Members of an offered class that nothing would read, or that core could not use: misspelt
attributes and methods, missing methods, methods of the wrong sort.

Everything here is looked up once, when plugins are loaded.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from prime_rl.plugins.base import Offer

LIKE = 0.8
"""Names of the same sort that are at least so similar (``difflib``) count as one, misspelt. Of all
shipped classes, no member is above 0.7."""


def problem_of(cls: type[Any], base: Any, hooks: Iterable[str]) -> str:
    """The first member of an offered class that would not work, in words; empty if there is none.
    ``hooks``: those that are called on its instances."""
    problems = (
        *_misspelt(cls, base, hooks=hooks),
        *_not_async(cls, base),
        *_not_callable(cls, base, hooks=hooks),
        *_no_names(cls, base),
        *_not_declared(cls, base),
    )
    return next(iter(problems), "")


def misspelt_attribute(instance: Offer, base: Any) -> str:
    """An attribute that ``__init__`` sets, and that looks like one of the base class."""
    attributes = _attributes(base)
    names = (name for name in vars(instance) if name not in attributes and not name.startswith("_"))
    # What ``__init__`` sets may have any name: only a declaration of the contract is taken.
    declared = sorted(name for name in attributes if name not in ("config", "name"))
    for name in names:
        close = difflib.get_close_matches(name, declared, n=1, cutoff=0.85)
        if close:
            return _said(f"self.{name}", base, close[0])

    return ""


def _misspelt(cls: type[Any], base: Any, hooks: Iterable[str]) -> Iterator[str]:
    attributes = _attributes(base)
    methods = _methods(base) | set(hooks)
    for name, member in _own_members(cls, base):
        is_method = inspect.isroutine(getattr(member, "__func__", member))
        if name in attributes or name in methods:
            continue

        candidates = sorted(methods if is_method else attributes)
        close = difflib.get_close_matches(name, candidates, n=1, cutoff=LIKE)
        if close:
            yield _said(f"{cls.__qualname__}.{name}", base, close[0])


def _said(name: str, base: Any, close: str) -> str:
    return (
        f"{name} is read by nothing; did you mean {close!r}? If it is meant for the class itself, "
        f"choose a name that is less like that of {base.__name__}, or begin it with '_'."
    )


def missing(cls: type[Any], base: Any) -> str:
    """A method that core calls and only the base class has, in words; empty if there is none."""
    for name in _required(base):
        if inspect.getattr_static(cls, name) is inspect.getattr_static(base, name):
            return (
                f"{cls.__qualname__} has no {name}, which core calls on every {base.__name__}. "
                f"Implement it: {_signature(base, name)}."
            )
    return ""


def _not_async(cls: type[Any], base: Any) -> Iterator[str]:
    """Methods that core awaits."""
    for name in _methods(base):
        method = inspect.getattr_static(cls, name)
        is_awaited = inspect.iscoroutinefunction(inspect.getattr_static(base, name))
        is_plain = inspect.isfunction(method) and not inspect.iscoroutinefunction(
            inspect.unwrap(method)
        )
        if is_awaited and is_plain:
            yield (
                f"{cls.__qualname__}.{name} is a plain 'def' and core awaits it. Make it an "
                f"'async def' without 'yield'."
            )


def _not_callable(cls: type[Any], base: Any, hooks: Iterable[str]) -> Iterator[str]:
    """Methods that cannot take what core calls them with. Hooks may name fewer arguments."""
    for name in sorted(_methods(base) - {*hooks}):
        if inspect.getattr_static(cls, name) is inspect.getattr_static(base, name):
            continue
        called = _callable(base, name)
        taken = _callable(cls, name)
        if called is None or taken is None:
            continue

        parameters = inspect.signature(called).parameters.values()
        needed = [each for each in parameters if each.default is each.empty]
        named = {each.name: None for each in needed if each.kind is each.KEYWORD_ONLY}
        placed = [each for each in needed if each.kind is each.POSITIONAL_OR_KEYWORD]
        try:
            inspect.signature(taken).bind(*placed, **named)
        except TypeError as error:
            yield (
                f"{cls.__qualname__}.{name} does not take what core calls it with ({error}). Write "
                f"it as {_signature(base, name)}."
            )


def _callable(cls: type[Any], name: str) -> Any:
    """A method as it is called on an instance; None for what is no function of Python, whose
    parameters tell nothing."""
    member = inspect.getattr_static(cls, name)
    if isinstance(member, classmethod | staticmethod):
        return getattr(cls, name) if inspect.isfunction(member.__func__) else None
    if not inspect.isfunction(member) or hasattr(member, "__wrapped__"):
        return None
    return partial(member, None)  # in the place of `self`


def _no_names(cls: type[Any], base: Any) -> Iterator[str]:
    """No tuple where a tuple of names is declared. A text is read letter by letter."""
    for name in _attributes(base):
        value = inspect.getattr_static(cls, name, None)
        if not isinstance(getattr(base, name, None), tuple | frozenset) or _is_computed(value):
            continue

        problem = f"{cls.__qualname__}.{name} is {value!r}, expected a tuple of names."
        if isinstance(value, str):
            yield f"{problem} Write ({value!r},) with a comma."
        elif not isinstance(value, Iterable):
            yield problem


def _is_computed(value: Any) -> bool:
    """Of an attribute: its value is another one for each instance."""
    return hasattr(type(value), "__get__")


def _not_declared(cls: type[Any], base: Any) -> Iterator[str]:
    """A word that is none of those that an attribute may have, a text where a number or True and
    False belong, and anything else where a text belongs."""
    for name, allowed in _declared(base).items():
        value = inspect.getattr_static(cls, name)
        if _is_computed(value):
            continue

        words = [word for word in allowed if isinstance(word, str)]
        if words and isinstance(value, str) and value not in words:
            close = difflib.get_close_matches(value, words, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            expected = ", ".join(map(repr, words))
            yield f"{cls.__qualname__}.{name} is {value!r}, expected one of {expected}{hint}"
        elif allowed == (str,):
            if not isinstance(value, str):
                yield f"{cls.__qualname__}.{name} is {value!r}, expected a text."
        elif isinstance(value, str) and not words:
            expected = " or ".join(
                "None" if each is type(None) else each.__name__ for each in allowed
            )
            yield f"{cls.__qualname__}.{name} is the text {value!r}, expected {expected}."


@cache
def _declared(base: Any) -> Mapping[str, tuple[Any, ...]]:
    """Of each attribute that is declared as words, as a text, as bool or as a number: the words or
    types."""
    declared: dict[str, tuple[Any, ...]] = {}
    for each in reversed(base.__mro__):
        for name, annotation in vars(each).get("__annotations__", {}).items():
            # One at a time: a name that is imported for types only hides no other.
            alone = {"__annotations__": {name: annotation}, "__module__": each.__module__}
            try:
                kind = get_type_hints(type(each.__name__, (), alone))[name]
            except NameError:
                continue

            if get_origin(kind) is ClassVar:
                (kind,) = get_args(kind)
            if get_origin(kind) is Literal:
                declared[name] = get_args(kind)
            elif kind in (bool, str) or (
                get_origin(kind) is UnionType and {*get_args(kind)} <= {bool, int, float, NoneType}
            ):
                declared[name] = get_args(kind) or (kind,)

    return {name: allowed for name, allowed in declared.items() if hasattr(base, name)}


def _own_members(cls: type[Any], base: Any) -> Iterator[tuple[str, Any]]:
    """Public members of the class and of its bases below ``base``."""
    for each in cls.__mro__:
        # `base` itself and its bases are not the plugin's own.
        if issubclass(base, each):
            continue
        for name, member in vars(each).items():
            if not name.startswith("_"):
                yield name, member


@cache
def _attributes(base: Any) -> frozenset[str]:
    """Declared attributes of a base class, properties included."""
    names = {name for each in base.__mro__ for name in vars(each).get("__annotations__", {})}
    names |= {name for name in dir(base) if not _is_routine(base, name)}
    return frozenset(name for name in names if not name.startswith("_")) | {"config"}


@cache
def _methods(base: Any) -> frozenset[str]:
    return frozenset(
        name for name in dir(base) if not name.startswith("__") and _is_routine(base, name)
    )


def _is_routine(base: Any, name: str) -> bool:
    member = inspect.getattr_static(base, name, None)
    return inspect.isroutine(getattr(member, "__func__", member))


@cache
def _required(base: Any) -> tuple[str, ...]:
    """Methods and properties of a base class that only raise ``NotImplementedError``."""
    names = []
    for name in dir(base):
        member = inspect.getattr_static(base, name)
        code = getattr(getattr(member, "fget", member), "__code__", None)
        is_public = not name.startswith("__") or name == "__call__"
        # A method whose code only raises this error is declared, not implemented.
        if is_public and "NotImplementedError" in getattr(code, "co_names", ()):
            names.append(name)
    return tuple(names)


def _signature(base: Any, name: str) -> str:
    member = inspect.getattr_static(base, name)
    if isinstance(member, property):
        return f"@property def {name}(self)"
    is_async = "async " if inspect.iscoroutinefunction(member) else ""
    taken = ", ".join(inspect.signature(member).parameters)
    return f"{is_async}def {name}({taken})"
