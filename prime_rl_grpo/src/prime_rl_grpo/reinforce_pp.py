"""REINFORCE++: credit whitened over the env's whole batch (Hu 2025, arXiv:2501.03262).

    A_t = (s_t - mean(s)) / (std(s) + 1e-8)          mean and std over the batch's trainable tokens

where s_t is, on every trainable token of rollout i, the reward r_i (``reinforce_pp``) or the reward
minus the group's mean (``reinforce_pp_baseline``).

Changed from the paper: 1. the KL penalty is a loss, not a part of the reward; 2. the batch is the
rollouts of one env that the filters keep: under ``reinforce_pp_baseline``, ``zero_advantage`` drops
a rollout whose s is 0, so tied groups count neither in the mean nor in the standard deviation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prime_rl import Algorithm, Group, Rollout, hookimpl, is_negligible
from prime_rl_grpo.grpo import GRPO

EPSILON = 1e-8
"""Added to the standard deviation."""


def whiten(rollouts: Sequence[Rollout]) -> None:
    """Give the assigned advantages of all trainable tokens mean 0 and standard deviation 1; 0 where
    they are equal but for the rounding of the rewards that they come from."""
    columns = [np.asarray(rollout.advantages, np.float64) for rollout in rollouts]
    every = np.concatenate(columns)
    offset = every[0] + (every - every[0]).mean()  # exact where all are equal
    deviation = every.std()
    rewards = [rollout.reward for rollout in rollouts]
    is_tied = is_negligible(deviation, [*every, *rewards])
    for rollout, column in zip(rollouts, columns, strict=True):
        whitened = (column - offset) / (deviation + EPSILON)
        rollout.assign_advantages(0.0 if is_tied else whitened)


class ReinforcePP(Algorithm):
    """Credit is the reward, whitened over the batch. Needs no groups."""

    name = "reinforce_pp"

    @hookimpl
    def score_batch(self, groups: Sequence[Group]) -> None:
        """Assign every rollout its whitened reward. Before, no rollout has credit, so that
        ``zero_advantage`` does not drop a reward of 0."""
        rollouts = [rollout for group in groups for rollout in group]
        for rollout in rollouts:
            rollout.assign_advantages(rollout.reward)
        whiten(rollouts)


class ReinforcePPBaseline(GRPO):
    """Credit is the reward minus the group's mean, as under ``grpo``, whitened over the batch."""

    name = "reinforce_pp_baseline"

    @hookimpl
    def score_batch(self, groups: Sequence[Group]) -> None:
        """Whiten what ``score_group`` assigned."""
        whiten([rollout for group in groups for rollout in group])
