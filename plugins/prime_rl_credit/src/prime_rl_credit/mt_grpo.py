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

from pydantic import NonNegativeFloat

from prime_rl import Algorithm, ConfigError, Group, PluginConfig, hookimpl
from prime_rl_credit.replies import assign, relative, replies_of


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

    @hookimpl
    def score_group(self, group: Group) -> None:
        """Assign both. Raises ``ConfigError`` if an env with several turns rewards none of them."""
        replies = [replies_of(rollout) for rollout in group]
        outcomes = relative([rollout.reward for rollout in group], self.config.std)
        credit = [[outcome] * len(own) for outcome, own in zip(outcomes, replies, strict=True)]
        early = [(i, k) for i, own in enumerate(replies) for k in range(len(own) - 1)]
        if early and all(replies[i][k].reward is None for i, k in early):
            raise ConfigError(
                f"env {group[0].env!r}: algo 'mt_grpo' needs rewards of turns, and the env gives "
                'none (trace.info["turn_rewards"]). Use grpo, or gigpo, which can do without.'
            )
        for turn in range(max((k for _, k in early), default=-1) + 1):
            ours = [i for i, k in early if k == turn]
            rewarded = [i for i in ours if replies[i][turn].reward is not None]
            above = relative(
                [float(replies[i][turn].reward or 0) for i in rewarded], self.config.std
            )
            own = dict(zip(rewarded, above, strict=True))
            for i in ours:
                credit[i][turn] = own.get(i, 0.0) + self.config.omega * outcomes[i]
        for rollout, own_replies, values in zip(group, replies, credit, strict=True):
            assign(rollout, own_replies, values)
