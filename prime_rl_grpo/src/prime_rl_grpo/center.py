"""Rewards minus their mean, exactly zero for ties and for the mean itself."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

ROUNDING = 2.0**-48
"""16 spacings of float64, relative to the largest reward."""


def centered(rewards: Sequence[float]) -> list[float]:
    """``r_i - mean(r)``, computed relative to the first reward.

    The plain mean of equal floats may differ from them in the last bit, and a group of ties would
    train on that rounding error. So would the middle of 0.1, 0.2, 0.3, which is 0.2 only almost.
    """
    first = rewards[0]
    offset = fmean(reward - first for reward in rewards)
    rounding = ROUNDING * max(abs(reward) for reward in rewards)
    above = (reward - first - offset for reward in rewards)
    return [each if abs(each) > rounding else 0.0 for each in above]
