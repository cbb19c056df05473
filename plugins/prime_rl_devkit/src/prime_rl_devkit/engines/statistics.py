"""Do samples come from the probabilities that were reported for them? Pearson's chi-square test."""

from __future__ import annotations

import math
from collections.abc import Mapping

FEWEST = 5.0
"""A bin is expected to hold at least so many samples, or Pearson's statistic has another law."""

FAR = 6.0
"""Standard deviations from which on chance is no excuse: one in 10^9."""


def deviation(counts: Mapping[int, int], logprobs: Mapping[int, float]) -> float | None:
    """How far samples are from their probabilities, in standard deviations of the chi-square law
    made normal (Wilson and Hilferty 1931). None: everything falls into one bin.

    counts: token to how often it was drawn; logprobs: what was reported of each of them. What no
    sample fell on, and what is too rare for a bin, shares the bin of the rest.
    """
    total = sum(counts.values())
    expected = {token: total * math.exp(logprobs[token]) for token in counts}
    bins = [(counts[t], e) for t, e in expected.items() if e >= FEWEST]
    bins.append((total - sum(c for c, _ in bins), total - sum(e for _, e in bins)))
    bins.sort(key=lambda pair: pair[1])
    while len(bins) > 1 and bins[0][1] < FEWEST:
        (count, share), (count_, share_) = bins[0], bins[1]
        bins[:2] = [(count + count_, share + share_)]
        bins.sort(key=lambda pair: pair[1])
    freedom = len(bins) - 1
    if freedom < 1:
        return None
    statistic = sum((count - share) ** 2 / share for count, share in bins)
    spread = 2.0 / (9.0 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1.0 - spread)) / math.sqrt(spread))
