"""Pearson's chi-square test: do samples have the reported probabilities?"""

from __future__ import annotations

import math
from collections.abc import Mapping

FEWEST = 5.0
"""Smallest expected number of samples in a bin; with fewer, the chi-square law does not hold."""

FAR = 6.0
"""Standard deviations that chance exceeds once in 10^9."""


def deviation(counts: Mapping[int, int], logprobs: Mapping[int, float]) -> float | None:
    """The distance of samples from their probabilities, in standard deviations of the chi-square
    law after its normal approximation (Wilson and Hilferty 1931). None: there is only one bin.

    counts: samples per token; logprobs: the reported value of each. Tokens without a sample, and
    tokens too rare for a bin, share one bin.
    """
    total = sum(counts.values())
    expected = {token: total * math.exp(logprobs[token]) for token in counts}
    bins = [(counts[t], e) for t, e in expected.items() if e >= FEWEST]
    bins.append((total - sum(c for c, _ in bins), total - sum(e for _, e in bins)))
    bins.sort(key=lambda pair: pair[1])
    while len(bins) > 1 and bins[0][1] < FEWEST:
        (count, share) = bins[0]
        (count_, share_) = bins[1]
        bins[:2] = [(count + count_, share + share_)]
        bins.sort(key=lambda pair: pair[1])

    freedom = len(bins) - 1
    if freedom < 1:
        return None
    statistic = sum((count - share) ** 2 / share for count, share in bins)
    spread = 2.0 / (9.0 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1.0 - spread)) / math.sqrt(spread))
