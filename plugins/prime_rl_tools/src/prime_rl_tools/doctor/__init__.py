"""What is wrong with a run, read from its files: ``diagnose(run)`` gives verdicts with evidence.

``history`` reads a run, and ``measures`` measures its windows. The checks with their thresholds:
``checks`` compares the last window of steps with the first one, ``updates`` judges the size of the
updates and what waits for what, ``bounds`` holds what is wrong from the first step on. A verdict is
an indication: it names what to look at, and proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from prime_rl_app.api import Run
from prime_rl_tools.doctor.bounds import (
    entropy_rise,
    failures,
    flat_reward,
    gradient_norm,
    held_out_falls,
    length_pays,
    mismatch_high,
    not_finite,
    stale_data,
    temperature,
)
from prime_rl_tools.doctor.checks import (
    clip_share,
    dead_groups,
    dominant_term,
    duplicates,
    entropy_collapse,
    length_drift,
    mismatch_growth,
    silent_env,
    staleness_bias,
    truncation,
)
from prime_rl_tools.doctor.history import MIN_STEPS, History
from prime_rl_tools.doctor.measures import Verdict
from prime_rl_tools.doctor.updates import (
    held_by_tail,
    pace_line,
    rate_too_high,
    rate_too_low,
    starved,
)

__all__ = ["CHECKS", "EVERY", "MIN_STEPS", "History", "Verdict", "diagnose", "pace_line"]

EVERY = 10
"""Steps between two readings of a run in progress."""

CHECKS: tuple[Callable[[History], Iterable[Verdict]], ...] = (
    *(entropy_collapse, mismatch_growth, length_drift, dominant_term, silent_env, truncation),
    *(dead_groups, clip_share, staleness_bias, duplicates, rate_too_high, rate_too_low, starved),
    *(held_by_tail, mismatch_high, gradient_norm, stale_data, failures, not_finite, entropy_rise),
    *(held_out_falls, length_pays, temperature),
)


def diagnose(
    run: Run | str | Path | History, *, first: int = 1, last: int | None = None
) -> list[Verdict]:
    """The verdicts on a run, or on its steps ``first`` to ``last``; none for fewer than
    ``MIN_STEPS`` steps. ``run``: a ``prime_rl.Run``, a path, a name in ``outputs``, ``latest`` or a
    ``History``. Raises ``ConfigError`` if there is no such run, ``RunError`` if a file is damaged.
    """
    if not isinstance(run, History):
        run = History((run if isinstance(run, Run) else Run(run)).path, first, last)
    if len(run.steps) < MIN_STEPS:
        return []
    verdicts = [verdict for check in CHECKS for verdict in check(run)]
    # A flat reward is a symptom: it is worth a line only where no check names a cause.
    return verdicts or [*flat_reward(run)]
