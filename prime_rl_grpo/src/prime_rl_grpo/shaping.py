"""Rewards shaped by cost: pure functions over a group, one value per rollout.

Both return shaped rewards, from which the algorithm then subtracts the mean. Equal rewards with
equal costs stay exactly equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from prime_rl import at_least


def efficiency_shaped(rewards: Sequence[float], costs: Sequence[float]) -> list[float]:
    """Up to twice the reward for best answers that cost less than the average best answer.

        best_i = r_i >= max(r), but for rounding          c = mean cost of the best
        s_i    = r_i (1 + best_i clamp(1 - cost_i / c, 0, 1))

    Only the best answers change, so a short wrong answer gains nothing. The rewards do not change
    if none is positive (max(r) <= 0) or the best cost nothing (c <= 0).
    """
    top = max(rewards)
    best = [at_least(reward, top) for reward in rewards]
    mean_cost = fmean(cost for cost, is_best in zip(costs, best, strict=True) if is_best)
    if top <= 0 or mean_cost <= 0:
        return list(rewards)
    saved = [min(max(1 - cost / mean_cost, 0.0), 1.0) for cost in costs]
    return [
        reward * (1 + bonus) if is_best else reward
        for reward, bonus, is_best in zip(rewards, saved, best, strict=True)
    ]


def linear_shaped(
    rewards: Sequence[float], costs: Sequence[tuple[float, Sequence[float]]]
) -> list[float]:
    """Subtract a share of the mean reward from every answer, for each of several costs.

        s_i = r_i - mean(r) sum_k w_k cost_ki / max(1, max(cost_k))

    ``costs``: for each ``k``, a weight ``w_k`` and one value per rollout. The penalty shrinks with
    the mean reward, so it never outweighs success. With a negative mean its sign flips, so rewards
    should not be negative.
    """
    mean = fmean(rewards)
    shares = [0.0] * len(rewards)
    for weight, values in costs:
        longest = max(1.0, *values)
        shares = [share + weight * v / longest for share, v in zip(shares, values, strict=True)]
    return [reward - mean * share for reward, share in zip(rewards, shares, strict=True)]
