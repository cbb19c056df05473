"""Results of conformance checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["passed", "failed", "skipped"]


class Broken(AssertionError):
    """A check fails; says what was found, what was expected and what to do."""


class NotApplicable(Exception):
    """A check has nothing to look at; says why."""


def promise_of(check: Callable[..., object]) -> str:
    """The first paragraph of a check's docstring, on one line."""
    return " ".join((check.__doc__ or "").partition("\n\n")[0].split()).replace("``", "`")


@dataclass(frozen=True)
class Outcome:
    """One check of one thing."""

    check: str
    promise: str
    """What the check verifies, as a sentence."""
    status: Status
    message: str = ""
    """What is wrong, or why it was skipped."""
    error: BaseException | None = field(default=None, compare=False)


def run(check: Callable[..., object], *subject: object, name: str = "", said: str = "") -> Outcome:
    """Run one check. An unexpected exception fails it, and ``said`` introduces that one."""
    name, promise = name or check.__name__, promise_of(check)
    try:
        check(*subject)
    except NotApplicable as reason:
        return Outcome(name, promise, "skipped", str(reason))
    except Broken as error:
        return Outcome(name, promise, "failed", str(error), error)
    except Exception as error:
        return Outcome(name, promise, "failed", f"{said}{type(error).__name__}: {error}", error)
    return Outcome(name, promise, "passed")


@dataclass(frozen=True)
class Report:
    """All checks of one thing a plugin offers, in order. As text: one line per check, with the
    reason where it did not pass."""

    kind: str
    """``algorithm``, ``filter``, ...; ``plugin``: the package as a whole."""
    name: str
    outcomes: tuple[Outcome, ...]

    @property
    def failed(self) -> tuple[Outcome, ...]:
        return self._with("failed")

    @property
    def passed(self) -> tuple[Outcome, ...]:
        return self._with("passed")

    @property
    def skipped(self) -> tuple[Outcome, ...]:
        return self._with("skipped")

    @property
    def ok(self) -> bool:
        """Nothing failed."""
        return not self.failed

    def _with(self, status: Status) -> tuple[Outcome, ...]:
        return tuple(outcome for outcome in self.outcomes if outcome.status == status)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        keys = ("check", "promise", "status", "message")
        rows = [{key: getattr(outcome, key) for key in keys} for outcome in self.outcomes]
        return {"kind": self.kind, "name": self.name, "ok": self.ok, "checks": rows}

    def __str__(self) -> str:
        lines = [f"{self.kind} {self.name!r}: {self.summary()}"]
        for each in self.outcomes:
            reason = f": {each.message}" if each.message else ""
            lines.append(f"  {each.status:8}{each.check}{reason}")
        return "\n".join(lines)

    def summary(self) -> str:
        """``14 passed, 1 failed, 1 skipped``, without zero counts."""
        counts = [(self.passed, "passed"), (self.failed, "failed"), (self.skipped, "skipped")]
        return ", ".join(f"{len(found)} {name}" for found, name in counts if found)
