"""What a conformance run found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["passed", "failed", "skipped"]


class Broken(AssertionError):
    """A promise is not kept; says what was found, what was expected and what to do."""


def promise_of(check: Callable[..., object]) -> str:
    """The first paragraph of a check's docstring, on one line."""
    return " ".join((check.__doc__ or "").partition("\n\n")[0].split()).replace("``", "`")


class NotApplicable(Exception):
    """A check has nothing to look at; says why."""


@dataclass(frozen=True)
class Outcome:
    """One check of one thing."""

    check: str
    promise: str
    """What the check holds it to, as a sentence."""
    status: Status
    message: str = ""
    """What is wrong, or why it was skipped."""
    error: BaseException | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Report:
    """All checks of one thing a plugin offers, in order. As text: one line a check, with the reason
    where it did not pass."""

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
        lines += [f"  {o.status:8}{o.check}{_reason(o)}" for o in self.outcomes]
        return "\n".join(lines)

    def summary(self) -> str:
        """``14 passed, 1 failed, 1 skipped``; what there is none of is left out."""
        counts = [(self.passed, "passed"), (self.failed, "failed"), (self.skipped, "skipped")]
        return ", ".join(f"{len(found)} {name}" for found, name in counts if found)


def _reason(outcome: Outcome) -> str:
    return f": {outcome.message}" if outcome.message else ""
