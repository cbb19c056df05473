"""GRPO with a mean baseline and no division by the standard deviation (Dr. GRPO, arXiv:2503.20783).

    A_i = r_i - mean(r)          on every trainable token of rollout i

Changed from the paper: 1. the mean is over the rollouts that survived, so a group with a failed
member is a smaller group; 2. the loss divides by the step's token count, not by a constant length.
"""

from __future__ import annotations

from prime_rl import Algorithm, Group, hookimpl
from prime_rl_grpo.centre import centred


class GRPO(Algorithm):
    """Credit is the reward above the group's mean."""

    name = "grpo"
    group_relative = True

    @hookimpl
    def score_group(self, group: Group) -> None:
        """Assign every rollout of the group its reward minus the group's mean."""
        rewards = [rollout.reward for rollout in group]
        for rollout, advantage in zip(group, centred(rewards), strict=True):
            rollout.assign_advantages(advantage)
