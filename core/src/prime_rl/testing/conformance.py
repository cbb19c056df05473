"""The promises every algorithm keeps, whatever its signal: one small check each.

    streams    long enough, finite, on the mask, of the component it declared
    groups     of one, tied, all failed, with huge and tiny rewards, with a reward that is no number
    behaviour  same input same credit, whatever the order, the neighbours or what else is going on
    training   a step on the credit moves the policy the way the credit points

``check_algorithm`` raises; ``conformance`` reports; ``prime-rl plugins check`` prints; ``pytest
--prime-rl NAME`` runs each as a test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from prime_rl.errors import ConfigError
from prime_rl.plugins.algorithm import Algorithm, Host
from prime_rl.testing import behaviour, gradient, groups, shape
from prime_rl.testing.host import conformance_host
from prime_rl.testing.report import Broken, NotApplicable, Outcome, Report, promise_of
from prime_rl.testing.rollouts import conformance_group
from prime_rl.testing.scoring import MIXED, MakeGroup, Subject

Check: TypeAlias = Callable[[Subject], None]

FIRST = "streams_align"
"""Nothing else can be looked at while this one fails."""

CHECKS: Mapping[str, Check] = {
    FIRST: shape.streams_align,
    "credit_on_mask": shape.credit_on_mask,
    "declared_component": shape.declared_component,
    "group_of_one": groups.group_of_one,
    "tied_group": groups.tied_group,
    "failed_group": groups.failed_group,
    "extreme_rewards": groups.extreme_rewards,
    "nan_reward": groups.nan_reward,
    "permutation": behaviour.permutation,
    "inputs_kept": behaviour.inputs_kept,
    "deterministic": behaviour.deterministic,
    "concurrent_groups": behaviour.concurrent_groups,
    "neighbours": behaviour.neighbours,
    "round_trip": behaviour.round_trip,
    "reference_aligned": gradient.reference_aligned,
    "gradient": gradient.gradient,
}
"""Every check by name, in the order they run."""


def check_algorithm(
    algorithm: Algorithm,
    *,
    make_group: MakeGroup = conformance_group,
    make_host: Callable[[], Host] = conformance_host,
) -> Report:
    """Raise ``AssertionError`` with everything the algorithm does not keep; give the report else.

    ``algorithm`` lends its class and its settings: every check builds a fresh instance. Where the
    kit's rollouts lack what it reads (an agent, a key of ``info``), pass ``make_group``: it takes
    rewards and gives sibling rollouts.
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
    _probe(subject)
    first = run_check(subject, FIRST)
    rest = [name for name in CHECKS if name != FIRST]
    if first.status == "failed":
        outcomes = [_unseen(name) for name in rest]
    else:
        outcomes = [run_check(subject, name) for name in rest]
    return Report("algorithm", subject.cls.name, (first, *outcomes))


def _probe(subject: Subject) -> None:
    """A setting that cannot work with the kit's rollouts says nothing about the algorithm."""
    try:
        subject.scored(MIXED)
    except ConfigError:
        raise
    except Exception:
        return  # the first check meets it again, and reports it


def run_check(subject: Subject, name: str) -> Outcome:
    """One check; whatever the algorithm raises under it is a failure."""
    check = CHECKS[name]
    promise = promise_of(check)
    try:
        check(subject)
    except NotApplicable as reason:
        return Outcome(name, promise, "skipped", str(reason))
    except Broken as error:
        return Outcome(name, promise, "failed", str(error), error)
    except Exception as error:
        said = f"scoring raised {type(error).__name__}: {error}"
        return Outcome(name, promise, "failed", said, error)
    return Outcome(name, promise, "passed")


def _unseen(name: str) -> Outcome:
    promise = promise_of(CHECKS[name])
    return Outcome(name, promise, "skipped", f"{FIRST} failed")
