"""GRPO with a mean baseline and no division by the standard deviation (Dr. GRPO, arXiv:2503.20783).

    A_i = s_i - mean(s)          on every trainable token of rollout i

where s is the reward r, or what ``length_penalty`` makes of it (``shaping.py``).

Changed from the paper: 1. the mean is over the rollouts that survived, so a group with a failed
member is a smaller group, and a lone survivor gets 0; 2. the loss divides by the step's token
count, not by a constant length; 3. the length penalties are ours.
"""

from __future__ import annotations

from prime_rl import Algorithm, Group, PluginConfig, hookimpl
from prime_rl_grpo.centre import centred
from prime_rl_grpo.length_penalty import LengthPenalty


class GRPOConfig(PluginConfig):
    """Settings of ``grpo``."""

    length_penalty: LengthPenalty | None = None
    """A table whose ``type`` says what counts as long: ``tokens`` (``completion_weight``,
    ``tool_response_weight``) and ``turns`` reward the cheaper of the best answers; ``linear``
    (``output_weight``, ``input_weight``, ``turns_weight``) takes a share of the mean reward off
    every answer. None: only the reward counts."""


class GRPO(Algorithm):
    """Credit is the reward above the group's mean."""

    name = "grpo"
    config_class = GRPOConfig
    config: GRPOConfig
    group_relative = True

    @hookimpl
    def score_group(self, group: Group) -> None:
        """Assign every rollout of the group its reward minus the group's mean."""
        penalty = self.config.length_penalty
        rewards = penalty.shaped(group) if penalty else [rollout.reward for rollout in group]
        for rollout, advantage in zip(group, centred(rewards), strict=True):
            rollout.assign_advantages(advantage)
