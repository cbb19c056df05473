"""Rewards as numbers: they are sums, so they are exact up to rounding only.

    settled(0.7 + 0.2 + 0.1)    1.0, not 0.9999999999999999
    is_negligible(x, values)    x is what rounding leaves where ``values`` cancel
    at_least(reward, least)     ties count, also where a mean was rounded

Core settles the reward of every rollout before it is scored, so rewards that are equal but for the
order of their terms are equal. A credit that divides by a mean or a deviation asks
``is_negligible`` first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction
from numbers import Real

import numpy as np

DOUBLE = 2.0**-48
"""16 spacings of float64: what the sum of some terms loses."""
SINGLE = 2.0**-22
"""Two spacings of float32, in which many environments compute their rewards."""


def settled(reward: float, scale: float = 1.0) -> float:
    """The simple fraction that ``reward`` is but for rounding; ``reward`` itself if there is none.

    Terms of a weighted sum are short decimals and small fractions, and so is their sum. Rounding
    moves it by some spacings of float64, or of float32 if it was computed in that. A number that is
    written with at most twelve decimals, or with a power of two below, keeps every bit, and so does
    almost every number of other digits. ``scale``: the size of the largest term, where terms may
    have cancelled.
    """
    if not isinstance(reward, Real) or isinstance(reward, int) or not math.isfinite(reward):
        return reward  # what is no number is reported where it is used

    value = float(reward)
    # A multiple of 2**-16, or a number of at most twelve decimals, has no rounding to undo.
    if (value * 2.0**16).is_integer() or round(value, 12) == value:
        return value

    # A reward computed in float32 has far larger rounding errors than one in float64.
    if float(np.float32(value)) == value:
        from_single = _nearest(value, SINGLE * abs(value), apart=100)
        if from_single is not None:
            return from_single

    from_double = _nearest(value, DOUBLE * max(abs(value), scale, 1.0), apart=10_000)
    return value if from_double is None else from_double


def _nearest(value: float, tolerance: float, apart: float) -> float | None:
    """The fraction with a small denominator within ``tolerance``. None: there is none.

    Two fractions with denominators of at most n are at least 1 / n^2 apart, and n is chosen so that
    this is ``apart`` tolerances. So a rounded fraction is near that fraction and no other, and any
    other number is seldom near one.
    """
    largest = max(int(1 / math.sqrt(apart * tolerance)), 1)
    fraction = Fraction(value).limit_denominator(largest)
    near = fraction.numerator / fraction.denominator
    return near if abs(near - value) <= tolerance else None


def at_least(reward: float, least: float) -> bool:
    """Whether ``reward`` reaches ``least``, but for rounding."""
    return reward >= least - DOUBLE * max(abs(reward), abs(least))


def is_negligible(value: float, values: Iterable[float]) -> bool:
    """Whether ``value``, a sum or a deviation of ``values``, is no more than what rounding leaves
    of numbers of their size: then nothing may be divided by it."""
    return abs(value) <= 2 * SINGLE * max((abs(each) for each in values), default=0.0)
