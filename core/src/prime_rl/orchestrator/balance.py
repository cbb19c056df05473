"""Assigns rows to ranks: equally many rows and about equal work for each.

Ranks wait for one another at every block of every row, so their totals should be equal, and so
should the rows that they compute at the same time. A sample of n tokens counts as
n * (1 + attention_flops * n) work.

Longest-processing-time-first (Graham 1969): the costliest sample goes to the rank with the least
work that has room, and there to a row. If that does not fit or does not balance, samples go to rows
of any rank, or stay in the fewest rows, and rows go to ranks: costliest first, in rounds of one per
rank, in each of which the costliest goes to the rank with the least work.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush, heapreplace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Rows: TypeAlias = list[list[int]]
"""Indices of the samples of each row."""
Floats: TypeAlias = npt.NDArray[np.float64]

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
    spread = _spread(everything, costs, lengths, [capacity] * (num_rows * num_ranks))
    padded = [*tight, *([[]] * (num_rows * num_ranks - len(tight)))]
    dealt = [_deal(rows, costs, num_ranks) for rows in (spread, padded) if rows is not None]
    found = dealt if even is None else [even, *dealt]
    return min(found, key=lambda ranks: imbalance(ranks, costs))


def split_groups(groups: Sequence[int], costs: Floats, number: int) -> list[list[int]]:
    """The samples (or bundles) of each minibatch: whole groups, of about equal work. Fewer than
    ``number`` if there are fewer groups. ``groups``, ``costs``: of each sample."""
    ids, owners = np.unique(groups, return_inverse=True)
    work, free = np.asarray(np.bincount(owners, costs), np.float64), [0] * len(ids)
    bins = _spread(range(len(ids)), work, free, free[:number]) or []
    return [np.flatnonzero(np.isin(owners, own)).tolist() for own in bins]


def sample_costs(lengths: Sequence[int], attention_flops: float) -> Floats:
    """[samples] the work of each sample, in tokens without attention."""
    n = np.asarray(lengths, np.float64)
    costs: Floats = n * (1 + attention_flops * n)
    return costs


def imbalance(ranks: Sequence[Rows], costs: Floats) -> float:
    """The share of the mean by which the busiest rank exceeds it."""
    totals = np.array([sum(costs[i] for row in rows for i in row) for rows in ranks])
    return float(totals.max() / totals.mean() - 1) if totals.any() else 0.0


def _even_ranks(
    costs: Floats, lengths: Sequence[int], capacity: int, num_ranks: int, num_rows: int
) -> list[Rows] | None:
    """Samples to ranks, then each rank's samples to its rows; None if they do not fit."""
    room = [capacity * num_rows] * num_ranks
    ranks = _spread(range(len(lengths)), costs, lengths, room) or []
    spread = [_spread(own, costs, lengths, [capacity] * num_rows) for own in ranks]
    found = [rows for rows in spread if rows is not None]
    if len(found) < num_ranks:
        return None
    return [sorted(rows, key=lambda row: -sum(costs[i] for i in row)) for rows in found]


def _spread(
    samples: Sequence[int], costs: Floats, lengths: Sequence[int], room: list[int]
) -> Rows | None:
    """The samples in bins with this room each and of about equal work; None if they do not fit."""
    bins: Rows = [[] for _ in room]
    heap = [(0.0, number, free) for number, free in enumerate(room)]  # least work first
    work = costs.tolist()
    smallest = min((lengths[i] for i in samples), default=0)
    for index in sorted(samples, key=lambda i: -work[i]):
        passed = []
        while heap and heap[0][2] < lengths[index]:
            passed.append(heappop(heap))
        if not heap:
            return None
        done, number, free = heap[0]
        bins[number].append(index)
        heapreplace(heap, (done + work[index], number, free - lengths[index]))
        for other in passed:
            if other[2] >= smallest:  # else it is full
                heappush(heap, other)
    return bins


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
