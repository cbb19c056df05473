"""Rewards above their mean, with ties exactly at zero."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean


def centred(rewards: Sequence[float]) -> list[float]:
    """``r_i - mean(r)``, measured from the first reward.

    The plain mean of equal floats may differ from them in the last bit, and a group that tells
    nothing apart would train on that residue.
    """
    first = rewards[0]
    offset = fmean(reward - first for reward in rewards)
    return [reward - first - offset for reward in rewards]
