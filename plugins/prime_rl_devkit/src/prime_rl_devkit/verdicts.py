"""From checks, functions that raise, to their outcomes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from traceback import walk_tb

from prime_rl.errors import line_in, text_of
from prime_rl.testing import Outcome

OF_CHECKS = frozenset({"prime_rl", "prime_rl_devkit", "pluggy"}) | sys.stdlib_module_names
"""Packages whose frames lie between a check and the code that it checks."""


class Broken(AssertionError):
    """A check fails; says what was found, what was expected and what to do."""


class NotApplicable(Exception):
    """A check has nothing to look at; says why."""


def promise_of(check: Callable[..., object]) -> str:
    """The first paragraph of a check's docstring, on one line."""
    return " ".join((check.__doc__ or "").partition("\n\n")[0].split()).replace("``", "`")


def raised(error: BaseException) -> str:
    """``KeyError: 'answer' (line 12 of /x.py)``: an error of the checked code, and its line."""
    modules = (
        str(frame.f_globals.get("__name__", "")) for frame, _ in walk_tb(error.__traceback__)
    )
    packages = (module.partition(".")[0] for module in modules)
    checked = next((package for package in packages if package not in OF_CHECKS), "")
    return f"{type(error).__name__}: {text_of(error)}{line_in(error, checked)}"


def run(
    check: Callable[..., str | None],
    *subject: object,
    name: str = "",
    unexpected: Callable[[Exception], str] = raised,
) -> Outcome:
    """Run one check, which may return a measurement as text. Any exception fails it; ``unexpected``
    tells of one that is not the check's own."""
    name = name or check.__name__
    promise = promise_of(check)
    try:
        measured = check(*subject)
    except NotApplicable as reason:
        return Outcome(name, promise, status="skipped", message=str(reason))
    except Broken as error:
        return Outcome(name, promise, status="failed", message=str(error), error=error)
    except SystemExit as error:
        said = f"it raised SystemExit({error.code!r}), which would end a run. Raise what is wrong"
        return Outcome(name, promise, status="failed", message=said, error=error)
    except Exception as error:
        return Outcome(name, promise, status="failed", message=unexpected(error), error=error)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # CancelledError and GeneratorExit pass every `except Exception`
        said = (
            f"it raised {type(error).__name__}, which is no Exception: a run would take it for the "
            "end of one of its own tasks. Catch it in the hook, and raise what is wrong"
        )
        return Outcome(name, promise, status="failed", message=said, error=error)

    return Outcome(name, promise, status="passed", message=measured or "")


def run_all(
    checks: Mapping[str, Callable[..., str | None]],
    run_check: Callable[[str], Outcome],
    first: Collection[str],
) -> tuple[Outcome, ...]:
    """The outcomes of all checks, in order. After one of ``first`` has failed the others are
    skipped: they would all fail for its reason."""
    outcomes: list[Outcome] = []
    lost: Outcome | None = None
    for name, check in checks.items():
        if lost is not None:
            outcomes.append(
                Outcome(name, promise_of(check), status="skipped", message=f"{lost.check} failed")
            )
            continue
        outcome = run_check(name)
        outcomes.append(outcome)
        if name in first and outcome.status == "failed":
            lost = outcome

    return tuple(outcomes)
