"""The conformance checks of an algorithm, whatever its signal.

    streams    long enough, finite, on the mask, of the component it declared
               for groups of one, tied, failed, with huge and tiny rewards, with a reward of nan
    behavior   same input same credit, whatever the order and whatever runs at the same time
    gradient   a step on the credit moves the policy the way the credit points

``check_algorithm`` raises; ``conformance`` reports; ``prime-rl plugins check`` prints; ``pytest
--prime-rl NAME`` runs each as a test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import TypeAlias

from prime_rl.errors import ConfigError
from prime_rl.plugins.algorithm import Algorithm, Host
from prime_rl.testing import behavior, streams
from prime_rl.testing.host import conformance_host
from prime_rl.testing.report import NotApplicable, Outcome, Report, promise_of, run
from prime_rl.testing.rollouts import conformance_group
from prime_rl.testing.scoring import MIXED, MakeGroup, Subject

Check: TypeAlias = Callable[[Subject], None]

FIRST = "streams_align"
"""While this check fails, the others are skipped."""


def gradient(subject: Subject) -> None:
    """A step of SGD moves the policy towards the tokens with higher credit, by the gradient that
    the declared component has in closed form."""
    found = entry_points(group="prime_rl.checks", name="gradient")
    if not found:
        raise NotApplicable("no installed distribution brings it; pip install prime-rl, which does")
    next(iter(found)).load()(subject)


CHECKS: Mapping[str, Check] = {
    FIRST: streams.streams_align,
    "credit_on_mask": streams.credit_on_mask,
    "declared_component": streams.declared_component,
    "group_of_one": streams.group_of_one,
    "tied_group": streams.tied_group,
    "failed_group": streams.failed_group,
    "extreme_rewards": streams.extreme_rewards,
    "nan_reward": streams.nan_reward,
    "permutation": behavior.permutation,
    "inputs_kept": behavior.inputs_kept,
    "deterministic": behavior.deterministic,
    "concurrent_groups": behavior.concurrent_groups,
    "neighbours": behavior.neighbors,
    "round_trip": behavior.round_trip,
    "reference_aligned": streams.reference_aligned,
    "gradient": gradient,
}
"""Every check by name, in the order they run."""


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
    """Run every check. Raises ``ConfigError`` if the algorithm refuses to score the rollouts."""
    subject = Subject(type(algorithm), algorithm.config, make_group, make_host)
    try:
        subject.scored(MIXED)
    except ConfigError:
        raise  # settings that cannot work with the kit's rollouts: not a fault of the algorithm
    except Exception:
        pass  # the first check meets it again, and reports it
    outcomes = [run_check(subject, FIRST)]
    for name, check in list(CHECKS.items())[1:]:
        unseen = Outcome(name, promise_of(check), "skipped", f"{FIRST} failed")
        outcomes.append(unseen if outcomes[0].status == "failed" else run_check(subject, name))
    return Report("algorithm", subject.cls.name, tuple(outcomes))


def run_check(subject: Subject, name: str) -> Outcome:
    """One check; whatever the algorithm raises in it is a failure."""
    return run(CHECKS[name], subject, name=name, said="scoring raised ")
