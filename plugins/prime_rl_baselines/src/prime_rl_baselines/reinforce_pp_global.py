"""REINFORCE++ with one whitening for several envs (Hu 2025, arXiv:2501.03262).

    A_t = (s_t - mean(s)) / (std(s) + 1e-8)      mean and std over the trainable tokens of all envs

where s_t is, on every trainable token of rollout i, the reward minus the group's mean, as under
``grpo``. The paper normalizes over the global batch; ``reinforce_pp_baseline`` does so for each env
alone, which gives an env with small differences of reward the same weight as one with large ones.
Here such an env keeps its small credit: choose it where the rewards of the envs have one scale.

Changed from the paper: 1. the KL penalty is a loss, not a part of the reward; 2. the batch is the
rollouts that the filters keep, of the envs with this algorithm and equal settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prime_rl import Group, hookimpl, log_metric
from prime_rl_grpo import GRPO, GRPOConfig, whiten


class ReinforcePPGlobalConfig(GRPOConfig):
    """``[orchestrator.algo] type = "reinforce_pp_global"``: the keys of ``grpo``."""


class ReinforcePPGlobal(GRPO):
    """Credit is the reward minus the group's mean, whitened over all envs with equal settings."""

    name = "reinforce_pp_global"
    config_class = ReinforcePPGlobalConfig

    @hookimpl
    def score_envs(self, batches: Mapping[str, Sequence[Group]]) -> None:
        """Whiten what ``score_group`` of each env assigned."""
        whiten([rollout for groups in batches.values() for group in groups for rollout in group])
        log_metric("envs", len(batches))
