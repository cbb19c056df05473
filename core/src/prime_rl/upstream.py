"""Modules of upstream prime-rl that its documentation imports: their names, where they are here."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from importlib import import_module


def moved(module: str, names: Mapping[str, str], hint: str = "") -> Callable[[str], object]:
    """The ``__getattr__`` of a module that is not there: each name comes from the module that has
    it, with a warning that names the right import. Raises ``ImportError`` for any other name."""

    def find(name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        if name not in names:
            imports = ", ".join(f"from prime_rl import {each}" for each in names)
            way_out = hint or f"Of its names, these are here: {imports}"
            raise ImportError(
                f"{module} is a module of upstream prime-rl, without {name!r} here. {way_out}"
            )

        # A FutureWarning, because Python hides a DeprecationWarning of a module.
        warnings.warn(
            f"{module} is a module of upstream prime-rl. Write: from prime_rl import {name}",
            FutureWarning,
            stacklevel=2,
        )
        return getattr(import_module(names[name]), name)

    return find


def missing(module: str, hint: str) -> ModuleNotFoundError:
    """The error of a module of upstream without a counterpart. The module raises it when it is
    imported, because the import of a module below it runs nothing else."""
    return ModuleNotFoundError(
        f"{module} is a module of upstream prime-rl, and is not here. {hint}", name=module
    )
