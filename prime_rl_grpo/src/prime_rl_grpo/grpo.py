"""GRPO with a mean baseline and no division by the standard deviation (Dr. GRPO, arXiv:2503.20783).

    A_i = s_i - mean(s)          on every trainable token of rollout i

where s is the reward r, or the reward shaped by ``length_penalty`` (``shaping.py``).

Changed from the paper: 1. the mean is over the rollouts that did not fail, so a group with a failed
rollout is a smaller group, and a single rollout gets 0; 2. the loss divides by the step's token
count, not by a constant length; 3. the length penalties are ours.
"""

from __future__ import annotations

from prime_rl import Algorithm, Group, PluginConfig, hookimpl
from prime_rl_grpo.center import centered
from prime_rl_grpo.length_penalty import LengthPenalty


class GRPOConfig(PluginConfig):
    """Settings of ``grpo``."""

    length_penalty: LengthPenalty | None = None
    """A table whose ``type`` selects the penalty. ``tokens`` (``completion_weight``,
    ``tool_response_weight``) and ``turns`` give the cheaper of the best answers a higher reward.
    ``linear`` (``output_weight``, ``input_weight``, ``turns_weight``) subtracts a share of the mean
    reward from every answer. None: only the reward counts."""


class GRPO(Algorithm):
    """Credit is the reward minus the group's mean."""

    name = "grpo"
    config_class = GRPOConfig
    config: GRPOConfig
    group_relative = True

    @hookimpl
    def score_group(self, group: Group) -> None:
        """Assign every rollout of the group its reward minus the group's mean."""
        penalty = self.config.length_penalty
        rewards = penalty.shaped(group) if penalty else [rollout.reward for rollout in group]
        for rollout, advantage in zip(group, centered(rewards), strict=True):
            rollout.assign_advantages(advantage)
