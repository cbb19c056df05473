"""MaxRL: the centered reward divided by the group's mean (arXiv:2602.02710).

    A_i = (r_i - mean(r)) / mean(r)          0 if mean(r) <= 0, but for rounding

It weights hard examples by 1/p: an unbiased gradient of the maximum-likelihood objective, truncated
one below the group's size (``objective``: the baseline takes the last term). It has no
``length_penalty``: with shaped rewards the mean would not be the success rate, nor the objective
the likelihood.

Changed from the paper: 1. the group is the rollouts that did not fail, so the truncation is at
their number.
"""

from __future__ import annotations

from statistics import fmean
from typing import Any

from prime_rl import Algorithm, Group, hookimpl, is_negligible
from prime_rl_grpo.center import centered


class MaxRL(Algorithm):
    """Credit is the reward minus the group's mean, divided by that mean."""

    name = "max_rl"
    group_relative = True

    def objective(self, outcomes: Any) -> Any:
        """The log of the success rate p, truncated: -sum over k < G of (1 - p)^k / k."""
        if not outcomes.is_binary:
            return None
        failure = 1 - outcomes.mean_reward
        return 0 * failure - sum(failure**k / k for k in range(1, outcomes.group_size))

    @hookimpl
    def score_group(self, group: Group) -> None:
        """Assign every rollout of the group its centered reward divided by the group's mean."""
        rewards = [rollout.reward for rollout in group]
        mean = fmean(rewards)
        # Where rewards cancel, their mean is rounding, and the credit would be of any size.
        has_mean = mean > 0 and not is_negligible(mean, rewards)
        for rollout, above in zip(group, centered(rewards), strict=True):
            rollout.assign_advantages(above / mean if has_mean else 0.0)
