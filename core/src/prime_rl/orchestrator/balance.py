"""The work of samples, and a batch in minibatches of whole groups and about equal work.

A sample of n tokens counts as n * (1 + attention_flops * n) work.
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

ATTENTION_FLOPS = 1e-4
"""Cost of one more token of context for each token, relative to its linear layers: layers * heads *
head size / parameters. Of a model of about 1B parameters; a larger one has less."""


def split_groups(groups: Sequence[int], costs: Floats, number: int) -> list[list[int]]:
    """The samples (or bundles) of each minibatch: whole groups, of about equal work. Fewer than
    ``number`` if there are fewer groups. ``groups``, ``costs``: one for each sample."""
    ids, owners = np.unique(groups, return_inverse=True)
    work = np.asarray(np.bincount(owners, costs), np.float64)
    # Groups have no length here, so bins without room take them.
    lengths = [0] * len(ids)
    num_bins = min(number, len(ids))
    bins = spread(range(len(ids)), work, lengths=lengths, room=[0] * num_bins) or []
    return [np.flatnonzero(np.isin(owners, members)).tolist() for members in bins]


def sample_costs(lengths: Sequence[int], attention_flops: float) -> Floats:
    """[samples] the work of each sample, in tokens without attention."""
    n = np.asarray(lengths, np.float64)
    costs: Floats = n * (1 + attention_flops * n)
    return costs


def spread(
    samples: Sequence[int], costs: Floats, lengths: Sequence[int], room: list[int]
) -> Rows | None:
    """The samples in bins with this room each and of about equal work; None if they do not fit."""
    bins: Rows = [[] for _ in room]
    heap = [(0.0, number, free) for number, free in enumerate(room)]  # least work first
    work = costs.tolist()
    smallest = min((lengths[i] for i in samples), default=0)

    # The costliest first (Graham 1969), to the bin with the least work that has room.
    for index in sorted(samples, key=lambda i: -work[i]):
        passed = []
        # Bins without room for this sample are put back after it.
        while heap and heap[0][2] < lengths[index]:
            passed.append(heappop(heap))
        if not heap:
            return None

        done, number, free = heap[0]
        bins[number].append(index)
        heapreplace(heap, (done + work[index], number, free - lengths[index]))

        for other in passed:
            if other[2] >= smallest:  # otherwise it is full
                heappush(heap, other)

    return bins
