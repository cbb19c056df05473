"""From a check, a function that raises, to its outcome."""

from __future__ import annotations

from collections.abc import Callable

from prime_rl.testing import Outcome


class Broken(AssertionError):
    """A check fails; says what was found, what was expected and what to do."""


class NotApplicable(Exception):
    """A check has nothing to look at; says why."""


def promise_of(check: Callable[..., object]) -> str:
    """The first paragraph of a check's docstring, on one line."""
    return " ".join((check.__doc__ or "").partition("\n\n")[0].split()).replace("``", "`")


def run(check: Callable[..., object], *subject: object, name: str = "", said: str = "") -> Outcome:
    """Run one check. An unexpected exception fails it, and ``said`` introduces that one."""
    name = name or check.__name__
    promise = promise_of(check)
    try:
        check(*subject)
    except NotApplicable as reason:
        return Outcome(name, promise, "skipped", str(reason))
    except Broken as error:
        return Outcome(name, promise, "failed", str(error), error)
    except Exception as error:
        return Outcome(name, promise, "failed", f"{said}{type(error).__name__}: {error}", error)

    return Outcome(name, promise, "passed")
