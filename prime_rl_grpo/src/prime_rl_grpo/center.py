"""Rewards minus their mean, exactly zero for ties."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean


def centered(rewards: Sequence[float]) -> list[float]:
    """``r_i - mean(r)``, computed relative to the first reward.

    The plain mean of equal floats may differ from them in the last bit, and a group of ties would
    train on that rounding error.
    """
    first = rewards[0]
    offset = fmean(reward - first for reward in rewards)
    return [reward - first - offset for reward in rewards]
