"""MT-GRPO: credit for a turn from its own reward and from the outcome (Zeng et al. 2025,
arXiv:2505.11821v1, section 4).

    A_{i,k} = T_{i,k} + omega O_i      for every reply but the last
    A_{i,k} = O_i                      for the last

    T_{i,k} = (r_{i,k} - mean) / std   over the group's k-th replies, r_{i,k} a reply's reward
    O_i     = (R_i - mean) / std       over the group, R_i the reward of the rollout

The env gives rewards of turns (``trace.info["turn_rewards"]``).

Changed from the paper: 1. the paper has two turns, and any number is possible here: only a
rollout's last reply has no T, and rollouts that ended by then are left out of its mean; 2. a reply
without a reward of its own has T = 0; 3. the standard deviation is that of a population, with 1e-6
added; ``std = false`` leaves it out; 4. the loss is the run's rl loss. The combination of the two
advantages was checked in descriptions of the paper, not in its equations.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from pydantic import NonNegativeFloat

from prime_rl import Algorithm, Group, PluginConfig, hookimpl
from prime_rl_credit.replies import assign, relative, replies_of

log = logging.getLogger(__name__)


class MTGRPOConfig(PluginConfig):
    """Settings of ``mt_grpo``."""

    omega: NonNegativeFloat = 1.0
    """Weight of the outcome in the credit of a reply that is not the last."""
    std: bool = True
    """Divide by the standard deviation."""


class MTGRPO(Algorithm):
    """Credit is a turn's reward above that of the siblings' same turn, and the outcome."""

    name = "mt_grpo"
    config_class = MTGRPOConfig
    config: MTGRPOConfig
    group_relative = True

    def __init__(self, config: PluginConfig) -> None:
        super().__init__(config)
        self.has_reported = False
        """That a group had no reward of a turn, or that one had some."""

    def _note_rewards(self, env: str, rewards: Sequence[float | None]) -> None:
        """Warn if the first group that could have rewards of turns has none: perhaps the env
        gives none at all."""
        if not rewards or self.has_reported:
            return
        self.has_reported = True
        if all(reward is None for reward in rewards):
            log.warning(
                "env %r: algo 'mt_grpo': the first group has no rewards of turns "
                '(trace.info["turn_rewards"]), so the outcome alone is its credit. If the env '
                "never gives any, use grpo, or gigpo, which can do without.",
                env,
            )

    @hookimpl
    def score_group(self, group: Group) -> None:
        """Assign both. A group without any reward of a turn has the outcome alone."""
        replies = [replies_of(rollout) for rollout in group]
        outcomes = relative([rollout.reward for rollout in group], self.config.std)
        credit = [[outcome] * len(spans) for outcome, spans in zip(outcomes, replies, strict=True)]
        early = [(i, k) for i, spans in enumerate(replies) for k in range(len(spans) - 1)]
        self._note_rewards(group[0].env, [replies[i][k].reward for i, k in early])
        for turn in range(max((k for _, k in early), default=-1) + 1):
            ours = [i for i, k in early if k == turn]
            rewarded = [i for i in ours if replies[i][turn].reward is not None]
            above = relative(
                [float(replies[i][turn].reward or 0) for i in rewarded], self.config.std
            )
            advantages = dict(zip(rewarded, above, strict=True))
            for i in ours:
                credit[i][turn] = advantages.get(i, 0.0) + self.config.omega * outcomes[i]

        for rollout, own_replies, values in zip(group, replies, credit, strict=True):
            assign(rollout, own_replies, values)
