"""Imports of renderers and verifiers that wait for their first use.

Both import the clients of OpenAI and Anthropic, an MCP server and sympy, whether a run needs them
or not: two thirds of verifiers' import. ``install`` makes two sorts of packages late:

- one that only names what other modules define (``openai.types``): each name is imported when it is
  asked for. One whose ``__init__`` does more is imported as always;
- one of ``PACKAGES``: its ``__init__`` runs when a name is asked for that is not a submodule.

A name gives the same object as a direct import. Only the time of the import differs, and with it
the time of an ``ImportError``.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec
from threading import RLock
from types import ModuleType
from typing import Any

NAMES = ("openai.types", "anthropic.types", "verifiers.v1.tasksets")
"""Packages whose ``__init__`` names what their modules define, with the packages inside them."""
PACKAGES = ("anthropic", "math_verify", "prime_sandboxes", "renderers")
"""Packages of which some process needs a module only, or nothing."""
FUNCTIONS = {"math_verify": ("parse", "verify")}
"""Functions of a late package that others import by name when they are imported."""


def install() -> None:
    """Make these packages late, where they are not imported yet."""
    if LateFinder not in sys.meta_path:
        sys.meta_path.insert(0, LateFinder)


class LateFinder:
    """Finds the packages named above, and leaves all others to the import system."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        loader = _LateNames if name in NAMES or name.startswith(WITHIN) else None
        if loader is None and name not in PACKAGES:
            return None
        spec = PathFinder.find_spec(name, path, target)
        is_package = spec is not None and spec.submodule_search_locations is not None
        if spec is None or not is_package or not isinstance(spec.loader, SourceFileLoader):
            return spec
        spec.loader = (loader or _LatePackage)(spec.loader.name, spec.loader.path)
        return spec


WITHIN = tuple(f"{name}." for name in NAMES)


class _LateNames(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        places = _places(self.get_data(self.path), module.__name__)
        if places is None:
            return super().exec_module(module)

        def get(name: str) -> Any:
            if name not in places:
                return _submodule(module, name)
            where, known_as = places[name]
            vars(module)[name] = found = getattr(importlib.import_module(where), known_as)
            return found

        vars(module).update(__getattr__=get, __all__=[*places])
        vars(module)["__dir__"] = lambda: sorted({*vars(module), *places})
        return None


def _places(source: bytes, package: str) -> dict[str, tuple[str, str]] | None:
    """The module and the name there of each name that a package imports; None if it does more."""
    places = {}
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.ImportFrom) and statement.module == "__future__":
            continue
        if isinstance(statement, ast.ImportFrom) and statement.module:
            above = package.split(".")[: len(package.split(".")) + 1 - statement.level]
            where = ".".join([*(above if statement.level else ()), statement.module])
            for each in statement.names:
                places[each.asname or each.name] = where, each.name
        elif not ast.unparse(statement).startswith(("__all__ = ", "'", '"')):
            return None

    return None if "*" in places else places


class _LatePackage(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        run = super().exec_module
        lock = RLock()
        begun: list[str] = []

        def get(name: str) -> Any:
            with lock:  # another thread waits until all names are there
                if not begun:
                    if name in FUNCTIONS.get(module.__name__, ()):
                        return _later(name, get)
                    with suppress(AttributeError):
                        return _submodule(module, name)
                    begun.append(name)
                    try:
                        run(module)
                    except BaseException:
                        begun.clear()  # the next use raises it too
                        raise

                return vars(module)[name] if name in vars(module) else _submodule(module, name)

        vars(module)["__getattr__"] = get


def _submodule(package: ModuleType, name: str) -> ModuleType:
    """Raises ``AttributeError`` if there is none of this name."""
    whole = f"{package.__name__}.{name}"
    if name.startswith("__") or find_spec(whole) is None:
        raise AttributeError(f"module {package.__name__!r} has no attribute {name!r}")
    return importlib.import_module(whole)


def _later(name: str, get: Callable[[str], Any]) -> Callable[..., Any]:
    """The function, found when it is called."""

    def call(*arguments: Any, **named: Any) -> Any:
        get("__all__")  # runs the package
        return get(name)(*arguments, **named)

    return call
