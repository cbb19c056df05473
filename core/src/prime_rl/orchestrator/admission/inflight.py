"""How many rollouts may be sampled at once, and why so many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

QUEUE = 0.25
"""Share of the engines' capacity that may wait, so that a place that becomes free is taken at once,
and rollouts that are busy in their environment do not leave it empty."""


@dataclass(frozen=True)
class Demand:
    """The number of rollouts that an env needs in flight, by Little's law: throughput times
    duration."""

    rate: float
    """Rollouts that the trainer takes per second."""
    seconds: float
    """Mean duration of a group, no longer than the lead allows."""

    @property
    def number(self) -> float:
        return self.rate * self.seconds


@dataclass(frozen=True)
class InflightLimit:
    """Rollouts that may be sampled at once, and why so many."""

    number: int
    reason: str
    follows_lead: bool = False
    """The number comes from the lead, and does not limit it."""


def inflight_limit(
    configured: int | None,
    capacities: Sequence[int | None],
    *,
    synchronous: int | None,
    batch_size: int,
    demands: Mapping[str, Demand],
) -> InflightLimit:
    """The limit of a run.

    ``configured``: the user's. ``capacities``: what each engine that serves can run at once, None
    if it does not say. ``synchronous``: what a run with ``max_off_policy_steps = 0`` needs; None
    for other runs. ``demands``: measured, for each env; empty at the start. They are met on
    average, and the batch that opens at a new version comes on top."""
    if configured is not None:
        return InflightLimit(configured, "orchestrator.max_inflight_rollouts")
    if synchronous is not None:
        return InflightLimit(synchronous, "one batch, since max_off_policy_steps = 0")

    reported = [capacity for capacity in capacities if capacity is not None]
    # The sum is known only if every engine tells its capacity.
    if reported and len(reported) == len(capacities):
        total = sum(reported)
        engines = "1 engine runs" if len(reported) == 1 else f"{len(reported)} engines run"
        why = f"{engines} {total} at once, and {QUEUE:.0%} wait"
        return InflightLimit(ceil(total * (1 + QUEUE)), why)

    number = ceil(batch_size + (1 + QUEUE) * sum(each.number for each in demands.values()))
    if number <= 2 * batch_size:
        return InflightLimit(2 * batch_size, "two batches", follows_lead=True)

    terms = [
        f"{env} {each.rate:.3g}/s x {each.seconds:.3g} s"
        for env, each in sorted(demands.items(), key=lambda pair: -pair[1].number)
    ]
    why = f"a batch, {' + '.join(terms)}, and {QUEUE:.0%} wait"
    return InflightLimit(number, why, follows_lead=True)
