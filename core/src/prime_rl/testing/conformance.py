"""The conformance checks of an algorithm, whatever its signal.

Core has what a check needs and reports; the checks are a distribution's, which names its module
under the entry-point group ``prime_rl.checks``. ``check_algorithm`` raises; ``conformance``
reports; ``prime-rl plugins check`` prints; ``pytest --prime-rl NAME`` runs each as a test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from prime_rl.entries import entries, load_entry
from prime_rl.errors import ConfigError
from prime_rl.plugins.algorithm import Algorithm, Host
from prime_rl.testing.host import conformance_host
from prime_rl.testing.scoring import MakeGroup, conformance_group

CheckStatus = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True)
class Outcome:
    """One check of one thing."""

    check: str
    promise: str
    """What the check verifies, as a sentence."""
    status: CheckStatus
    message: str = ""
    """What is wrong, or why it was skipped."""
    error: BaseException | None = field(default=None, compare=False)


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

    def _with(self, status: CheckStatus) -> tuple[Outcome, ...]:
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
        return ", ".join(f"{len(listed)} {name}" for listed, name in counts if listed)


Check: TypeAlias = Callable[[Any], None]


def installed_suite() -> Any:
    """Its ``CHECKS`` by name, and its ``conformance``. Raises ``ConfigError`` if there is none."""
    for entry in entries("prime_rl.checks", name="algorithm"):
        return load_entry(entry)
    raise ConfigError(
        "the conformance checks of algorithms are not installed. pip install prime-rl, which "
        "brings them."
    )


class Checks(Mapping[str, Check]):
    """The installed checks, loaded at first use: they import this package."""

    def __getitem__(self, name: str) -> Check:
        check: Check = installed_suite().CHECKS[name]
        return check

    def __iter__(self) -> Iterator[str]:
        return iter(installed_suite().CHECKS)

    def __len__(self) -> int:
        return len(installed_suite().CHECKS)


CHECKS: Mapping[str, Check] = Checks()
"""Every check by name, in the order they run."""


def prove(algorithm: Algorithm, **options: Any) -> Any:
    """The exact expected update of an algorithm: a ``Proof``. ``options`` as those of the command
    ``plugins prove``, which prime-rl-devkit brings. Raises ``ConfigError`` without it."""
    for entry in entries("prime_rl.checks", name="prove"):
        return load_entry(entry)(algorithm, **options)
    raise ConfigError("the estimator lab is not installed. pip install 'prime-rl-devkit[lab]'")


def run(
    config: str | Path | Mapping[str, Any] | None = None,
    steps: int = 2,
    *,
    folder: Path | None = None,
    **overrides: Any,
) -> Any:
    """A real run of a few steps: the ``prime_rl.Run`` of ``prime_rl.train``, at its end.

    ``config``: a TOML file, such as the package's ``train.toml``, or its tables as a dict; what it
    leaves out is small: a tiny policy that is made here, words to reverse, groups of 4, two groups
    a batch. Evaluations, checkpoints, schedules and monitors of the config are left out.
    ``folder``: where the run directory is; None: a temporary one, which lasts as long as this
    process. ``overrides`` lie over all of it, as in ``prime_rl.train``.

        run = prime_rl.testing.run({"orchestrator": {"algo": {"type": "my_algo"}}}, steps=2)
        assert run.step == 2

    The orchestrator, the trainer and the engine are processes of their own, so the plugin has to be
    installed (``pip install -e .``). Raises ``ConfigError`` before anything starts, ``RunError``
    with plugin, hook and group if the run fails.
    """
    return installed_suite().short_run(config, steps, folder=folder, **overrides)


def check_algorithm(
    algorithm: Algorithm,
    *,
    make_group: MakeGroup = conformance_group,
    make_host: Callable[[], Host] = conformance_host,
) -> Report:
    """Run every check; raise ``AssertionError`` with all that fail, else return the report.

    Every check builds a fresh instance from the class and settings of ``algorithm``. Where the
    kit's rollouts lack what it reads (an agent, a key of ``info``), pass ``make_group``: it takes
    rewards and returns sibling rollouts.
    """
    report = conformance(algorithm, make_group=make_group, make_host=make_host)
    if not report.ok:
        raise AssertionError(str(report)) from report.failed[0].error
    return report


def conformance(
    algorithm: Algorithm,
    *,
    make_group: MakeGroup = conformance_group,
    make_host: Callable[[], Host] = conformance_host,
) -> Report:
    """Run every check. Raises ``ConfigError`` if the algorithm refuses to score the rollouts, or no
    checks are installed."""
    report: Report = installed_suite().conformance(algorithm, make_group, make_host)
    return report
