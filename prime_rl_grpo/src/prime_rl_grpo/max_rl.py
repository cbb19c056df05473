"""MaxRL: the centred reward over the group's mean (arXiv:2602.02710).

    A_i = (r_i - mean(r)) / mean(r)          0 where mean(r) <= 0

Up-weights hard examples like 1/p: an unbiased gradient of the maximum-likelihood objective,
truncated at the group's size. It takes no ``length_penalty``: with shaped rewards the mean is no
longer the rate of success, and the objective no longer the likelihood.

Changed from the paper: 1. the group is the rollouts that survived, so the truncation is at their
number.
"""

from __future__ import annotations

from statistics import fmean

from prime_rl import Algorithm, Group, hookimpl
from prime_rl_grpo.centre import centred


class MaxRL(Algorithm):
    """Credit is the reward above the group's mean, relative to that mean."""

    name = "max_rl"
    group_relative = True

    @hookimpl
    def score_group(self, group: Group) -> None:
        """Assign every rollout of the group its centred reward over the group's mean."""
        rewards = [rollout.reward for rollout in group]
        mean = fmean(rewards)
        for rollout, above in zip(group, centred(rewards), strict=True):
            rollout.assign_advantages(above / mean if mean > 0 else 0.0)
