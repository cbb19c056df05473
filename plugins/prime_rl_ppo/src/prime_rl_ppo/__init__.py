"""PPO with a critic (Schulman et al. 2017, arXiv:1707.06347): the orchestrator's half.

The algorithm routes each sampled token to two components and says what it earns:

    rl            the run's policy loss, with the advantages that the critic writes
    value_loss    the error of the critic (``critic.py``)
    rewards       the rollout's reward at its last trainable token, 0 elsewhere
    truncated     1 for a truncated rollout, with ``bootstrap``

The critic, in the trainer, makes advantages and returns of these rewards.
"""

from __future__ import annotations

from typing import Literal, cast

import numpy as np

from prime_rl import Algorithm, PluginConfig, Rollout, hookimpl

LOSSES = {"values": "value_loss", "value_bins": "value_bins_loss"}
"""The loss that trains each critic."""


class PPOConfig(PluginConfig):
    """``[orchestrator.algo] type = "ppo"``"""

    critic: Literal["values", "value_bins"] = "values"
    """The head: one that gives V, or one that gives a distribution over bins of the return."""
    bootstrap: bool = False
    """End a truncated rollout with the critic's value of the state in which it was left. False:
    with 0, as if nothing more could be earned."""


class PPO(Algorithm):
    """Credit is what each token adds to the value that the critic expects."""

    name = "ppo"
    config_class = PPOConfig

    def __init__(self, config: PluginConfig) -> None:
        super().__init__(config)
        self.settings = cast(PPOConfig, config)
        self.value_loss = LOSSES[self.settings.critic]
        self.losses = ("rl", self.value_loss)
        self.needs_heads = (self.settings.critic,)

    @hookimpl
    def score_rollout(self, rollout: Rollout) -> None:
        """Write the rewards, and route the tokens to the critic too."""
        rewards = np.zeros(rollout.num_trainable_tokens, np.float32)
        rewards[-1:] = rollout.reward
        rollout.assign_stream("rewards", rewards)
        if self.settings.bootstrap and rollout.is_truncated:
            rollout.assign_stream("truncated", 1.0)
        rollout.assign_weights(self.value_loss, 1.0)


@hookimpl
def register_algorithms() -> list[type[Algorithm]]:
    return [PPO]
