"""RAFT: imitate the policy's own best rollouts (Dong et al. 2023, arXiv:2304.06767).

    L = mean over tokens of the kept rollouts of -log π(y_t)

Kept are the rollouts with at least ``min_reward``; or, with ``min_reward = None``, those with the
highest reward of their group, as in the paper. The others train no token, and the batch is filled
with further rollouts. There is no importance ratio: what was sampled from older weights counts
fully.

Changed from the paper: 1. the default keeps all successes (rejection sampling), not the best of K;
2. one batch at a time instead of a data set per stage; 3. with ``min_reward = None`` equal rewards
keep the whole group. The algorithm was checked in descriptions of the paper, not in the paper.
"""

from __future__ import annotations

from typing import Any

from prime_rl import Algorithm, Group, PluginConfig, at_least, hookimpl


class RAFTConfig(PluginConfig):
    """Settings of ``raft``."""

    min_reward: float | None = 1.0
    """Imitate the rollouts with at least this reward. None: the best of each group."""


class RAFT(Algorithm):
    """The signal is the sampled answer itself, if it was good."""

    name = "raft"
    config_class = RAFTConfig
    config: RAFTConfig
    action_loss = "ce"

    def __init__(self, config: PluginConfig) -> None:
        super().__init__(config)
        self.needs_siblings = self.config.min_reward is None

    def objective(self, outcomes: Any) -> Any:
        """The log-likelihood of the sampled replies that are kept; on the policy, its gradient is
        that of the probability of such a reply.

        No claim where all replies are kept, or none: nothing is learned there.
        """
        rewards = outcomes.rewards
        least = self.config.min_reward
        if least is None:  # no sibling is better
            kept = (rewards <= rewards[:, None]).double() @ outcomes.sampled
            kept = kept ** (outcomes.group_size - 1)
        else:
            kept = (rewards >= least).double()

        if kept.min() == kept.max():
            return None
        return (outcomes.sampled * kept * outcomes.log_probabilities).sum()

    @hookimpl
    def score_group(self, group: Group) -> None:
        """Route the kept rollouts to ``ce``; the others train nothing."""
        least = self.config.min_reward
        if least is None:
            least = max(rollout.reward for rollout in group)
        for rollout in group:
            rollout.assign_weights("ce", float(at_least(rollout.reward, least)))
