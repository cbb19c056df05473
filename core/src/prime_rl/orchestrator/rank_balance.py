"""Assigns rows to the trainer's ranks: equally many rows and about equal work for each.

Ranks wait for one another at every block of every row, so their totals should be equal, and so
should the rows that they compute at the same time.

Longest-processing-time-first (Graham 1969): the costliest sample goes to the rank with the least
work that has room, and there to a row. If that does not fit or does not balance, samples go to rows
of any rank, or stay in the fewest rows, and rows go to ranks: costliest first, in rounds of one per
rank, in each of which the costliest goes to the rank with the least work.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prime_rl.orchestrator.balance import Floats, Rows, spread

TOLERANCE = 0.05
"""By how much the busiest rank may exceed the mean before the other plans are tried."""


def plan_ranks(
    tight: Rows, lengths: Sequence[int], capacity: int, num_ranks: int, costs: Floats
) -> list[Rows]:
    """The rows of each rank, costliest first; an empty row has nothing to train.

    ``tight``: the samples in the fewest rows found. Each rank gets as few rows as that takes.
    ``costs``: the work of each sample (``sample_costs``). A sample may be a bundle of several.
    """
    num_rows = -(-len(tight) // num_ranks)  # rounded up
    even = _even_ranks(costs, lengths, capacity=capacity, num_ranks=num_ranks, num_rows=num_rows)
    if even is not None and imbalance(even, costs) <= TOLERANCE:
        return even

    plans = [] if even is None else [even]
    total_rows = num_rows * num_ranks
    # `loose` spreads the samples over the rows of all ranks at once.
    loose = spread(range(len(lengths)), costs, lengths=lengths, room=[capacity] * total_rows)
    if loose is not None:
        plans.append(_deal(loose, costs, num_ranks))

    # `padded` is the fewest rows, filled up with empty ones so that each rank gets equally many.
    num_empty = total_rows - len(tight)
    padded = [*tight, *([] for _ in range(num_empty))]
    plans.append(_deal(padded, costs, num_ranks))
    return min(plans, key=lambda ranks: imbalance(ranks, costs))


def imbalance(ranks: Sequence[Rows], costs: Floats) -> float:
    """The share of the mean by which the busiest rank exceeds it."""
    totals = np.array([sum(costs[i] for row in rows for i in row) for rows in ranks])
    if not totals.any():
        return 0.0
    return float(totals.max() / totals.mean() - 1)


def _even_ranks(
    costs: Floats, lengths: Sequence[int], capacity: int, num_ranks: int, num_rows: int
) -> list[Rows] | None:
    """Samples to ranks, then each rank's samples to its rows; None if they do not fit."""
    room = [capacity * num_rows] * num_ranks
    samples_of = spread(range(len(lengths)), costs, lengths=lengths, room=room)
    if samples_of is None:
        return None

    ranks = []
    for samples in samples_of:
        rows = spread(samples, costs, lengths=lengths, room=[capacity] * num_rows)
        if rows is None:
            return None

        ranks.append(sorted(rows, key=lambda row: -sum(costs[i] for i in row)))

    return ranks


def _deal(rows: Rows, costs: Floats, num_ranks: int) -> list[Rows]:
    """Rows to ranks, one per rank in each round."""
    work = [float(sum(costs[i] for i in row)) for row in rows]
    order = sorted(range(len(rows)), key=lambda row: -work[row])
    ranks: list[Rows] = [[] for _ in range(num_ranks)]
    totals = [0.0] * num_ranks
    # Ranks compute the rows of one round together, so a round takes rows of similar cost.
    for start in range(0, len(rows), num_ranks):
        least_first = sorted(range(num_ranks), key=totals.__getitem__)
        for rank, row in zip(least_first, order[start : start + num_ranks], strict=True):
            ranks[rank].append(rows[row])
            totals[rank] += work[row]

    return ranks
