"""PPO with a critic (Schulman et al. 2017, arXiv:1707.06347): the orchestrator's half.

The algorithm routes each sampled token to two components and says what it earns:

    rl            the run's policy loss, with the advantages that the critic writes
    value_loss    the error of the critic (``critic.py``)
    rewards       the rollout's reward at its last trainable token, 0 elsewhere

The critic, in the trainer, makes advantages and returns of these rewards.
"""

from __future__ import annotations

import numpy as np

from prime_rl import Algorithm, Rollout, hookimpl


class PPO(Algorithm):
    """Credit is what each token adds to the value that the critic expects."""

    name = "ppo"
    losses = ("rl", "value_loss")
    needs_heads = ("values",)

    @hookimpl
    def score_rollout(self, rollout: Rollout) -> None:
        """Write the rewards, and route the tokens to the critic too."""
        rewards = np.zeros(rollout.num_trainable_tokens, np.float32)
        rewards[-1:] = rollout.reward
        rollout.assign_stream("rewards", rewards)
        rollout.assign_weights("value_loss", 1.0)


@hookimpl
def register_algorithms() -> list[type[Algorithm]]:
    return [PPO]
