"""The list of checks, and functions that run them. Core finds this module by the entry-point group
``prime_rl.checks``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

from prime_rl import Algorithm, ConfigError, Host
from prime_rl.testing.conformance import Outcome, Report
from prime_rl.testing.scoring import MakeGroup
from prime_rl_devkit.algorithms import behavior, memory, streams
from prime_rl_devkit.algorithms.gradient import gradient
from prime_rl_devkit.algorithms.subject import MIXED, Subject
from prime_rl_devkit.verdicts import raised, run, run_all


def short_run(*arguments: Any, **options: Any) -> Any:
    """``prime_rl.testing.run``: core finds this module, and imports of a run wait for the call."""
    from prime_rl_devkit.short_run import short_run as start

    return start(*arguments, **options)


Check: TypeAlias = Callable[[Subject], None]

FIRST = "streams_align"
"""While this check fails, the others are skipped."""

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
    "group_relative": memory.group_relative,
    "siblings": memory.siblings,
    "state_resumes": memory.state_resumes,
    "prepares": behavior.prepares,
    "sizes": behavior.sizes,
    "gradient": gradient,
}
"""Every check by name, in the order they run."""


def conformance(
    algorithm: Algorithm, make_group: MakeGroup, make_host: Callable[[], Host]
) -> Report:
    """Run every check. Raises ``ConfigError`` if the algorithm refuses to score the rollouts."""
    subject = Subject(type(algorithm), algorithm.config, make_group=make_group, make_host=make_host)
    try:
        subject.scored(MIXED)
    except ConfigError:
        raise  # settings that cannot work with the kit's rollouts: not a fault of the algorithm
    except KeyboardInterrupt:
        raise
    except BaseException:
        pass  # the first check meets it again, and reports it

    outcomes = run_all(CHECKS, partial(run_check, subject), first=(FIRST,))
    return Report("algorithm", subject.cls.name, outcomes)


def run_check(subject: Subject, name: str) -> Outcome:
    """One check; whatever the algorithm raises in it is a failure."""
    return run(
        CHECKS[name],
        subject,
        name=name,
        unexpected=lambda error: f"scoring raised {raised(error)}",
    )
