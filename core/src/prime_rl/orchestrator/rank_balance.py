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
    num_rows = -(-len(tight) // num_ranks)
    even = _even_ranks(costs, lengths, capacity, num_ranks, num_rows)
    if even is not None and imbalance(even, costs) <= TOLERANCE:
        return even
    everything = range(len(lengths))
    loose = spread(everything, costs, lengths, [capacity] * (num_rows * num_ranks))
    padded = [*tight, *([[]] * (num_rows * num_ranks - len(tight)))]
    dealt = [_deal(rows, costs, num_ranks) for rows in (loose, padded) if rows is not None]
    found = dealt if even is None else [even, *dealt]
    return min(found, key=lambda ranks: imbalance(ranks, costs))


def imbalance(ranks: Sequence[Rows], costs: Floats) -> float:
    """The share of the mean by which the busiest rank exceeds it."""
    totals = np.array([sum(costs[i] for row in rows for i in row) for rows in ranks])
    return float(totals.max() / totals.mean() - 1) if totals.any() else 0.0


def _even_ranks(
    costs: Floats, lengths: Sequence[int], capacity: int, num_ranks: int, num_rows: int
) -> list[Rows] | None:
    """Samples to ranks, then each rank's samples to its rows; None if they do not fit."""
    room = [capacity * num_rows] * num_ranks
    ranks = spread(range(len(lengths)), costs, lengths, room) or []
    packed = [spread(own, costs, lengths, [capacity] * num_rows) for own in ranks]
    found = [rows for rows in packed if rows is not None]
    if len(found) < num_ranks:
        return None
    return [sorted(rows, key=lambda row: -sum(costs[i] for i in row)) for rows in found]


def _deal(rows: Rows, costs: Floats, num_ranks: int) -> list[Rows]:
    """Rows to ranks, one per rank in each round."""
    work = [float(sum(costs[i] for i in row)) for row in rows]
    order = sorted(range(len(rows)), key=lambda row: -work[row])
    ranks: list[Rows] = [[] for _ in range(num_ranks)]
    totals = [0.0] * num_ranks
    for start in range(0, len(rows), num_ranks):
        least_first = sorted(range(num_ranks), key=totals.__getitem__)
        for rank, row in zip(least_first, order[start : start + num_ranks], strict=True):
            ranks[rank].append(rows[row])
            totals[rank] += work[row]

    return ranks
