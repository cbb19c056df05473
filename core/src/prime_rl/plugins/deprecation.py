"""Deprecation: a part of the contract warns for one contract version before it is removed.

Above ``@hookspec`` in the module of the hooks, or above a method of a base class:

    @deprecated("score_group", gone_in=2)                        the hook as a whole
    @deprecated("rollout.env", gone_in=2, argument="env")        one argument of it

pluggy's own ``warn_on_impl`` takes a fixed text; ours names the plugin and its distribution, since
its reader is the user of a plugin, not its author.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])

_MARK = "prime_rl_deprecations"


@dataclass(frozen=True)
class Deprecation:
    """A deprecated hook or method, or an argument of it."""

    instead: str
    """The replacement, as a user reads it after "use"."""
    gone_in: int
    """The first contract version without it."""
    argument: str | None = None


def deprecated(
    instead: str, *, gone_in: int, argument: str | None = None
) -> Callable[[AnyFunction], AnyFunction]:
    """Mark a hookspec, or a method of a base class."""

    def mark(function: AnyFunction) -> AnyFunction:
        found = (*deprecations(function), Deprecation(instead, gone_in, argument))
        setattr(function, _MARK, found)
        return function

    return mark


def deprecations(function: object) -> Sequence[Deprecation]:
    """The deprecations of a function of the contract."""
    found: Sequence[Deprecation] = getattr(function, _MARK, ())
    return found


def warn_of_deprecated(
    name: str, contract: object, implementation: Callable[..., Any], where: str
) -> None:
    """Warn if ``implementation`` of the plugin ``where`` uses a deprecated part of ``contract``."""
    for each in deprecations(contract):
        taken = inspect.signature(implementation).parameters
        if each.argument is None or each.argument in taken:
            what = f"{name!r}" if each.argument is None else f"{each.argument!r} of {name!r}"
            code = inspect.unwrap(implementation).__code__
            warnings.warn_explicit(
                f"plugin {where}: {what} goes with contract version {each.gone_in}; use "
                f"{each.instead}. Upgrade the plugin, or report it to its author.",
                FutureWarning,
                code.co_filename,
                code.co_firstlineno,
            )
