"""PRIME's implicit process reward: a second model of which the log-ratio is the reward of a token.

    r_t   = beta (log phi(y_t) - log ref(y_t))         phi: a copy of the policy that trains
    A_t   = sum over s >= t of gamma^(s-t) (r_s - mean over siblings of their mean r)
            + R - mean over siblings of R              R: the reward of the rollout
    loss  = -(o log sigma(S) + (1 - o) log(1 - sigma(S)))        S = sum over t of r_t
            o = 1 for a success: R >= success, else 0

(Cui et al. 2025, arXiv:2502.01456.) The steps are the trainable tokens of a
rollout, over all its samples. Without a sibling in the batch nothing is subtracted, and the rollout
has no advantage.

Differences from the paper: 1. phi starts as a copy of the policy, and ref are the policy's first
weights; 2. the policy's update of a batch uses phi before its own update (the paper updates phi
first); 3. rollouts are not filtered by accuracy: use a filter or sampler of the run.

This module does not import torch before the trainer calls the loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, cast

import numpy as np
import numpy.typing as npt
from pydantic import Field, NonNegativeFloat, PositiveFloat

from prime_rl import (
    Algorithm,
    Head,
    HeadInputs,
    Loss,
    LossInputs,
    LossOutputs,
    PluginConfig,
    Rollout,
    hookimpl,
)

Floats = npt.NDArray[np.float64]


class PrimeConfig(PluginConfig):
    """``[orchestrator.algo] type = "prime"``"""

    success: float = 0.5
    """A rollout with at least this reward is a success to the reward model."""


class Prime(Algorithm):
    """The reward above the siblings', and each token's implicit reward."""

    name = "prime"
    config_class = PrimeConfig
    losses = ("rl", "implicit_reward_loss")
    needs_heads = ("implicit_reward",)
    group_relative = True

    @hookimpl
    def score_rollout(self, rollout: Rollout) -> None:
        """Route the tokens to the reward model."""
        success = cast(PrimeConfig, self.config).success
        rollout.assign_stream("outcomes", float(rollout.reward >= success))
        rollout.assign_stream("rewards", rollout.reward)
        rollout.assign_weights("implicit_reward_loss", 1.0)


class ImplicitRewardConfig(PluginConfig):
    """Settings of the head ``implicit_reward``; the run sets ``own_model`` too."""

    beta: PositiveFloat = 0.05
    """What the log-ratio is multiplied by."""
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount of the implicit reward one token later."""


class ImplicitReward(Head):
    """log phi of each token."""

    name = "implicit_reward"
    config_class = ImplicitRewardConfig
    scope = "group"
    reads = ("rewards", "initial_logprobs")
    writes = ("advantages", "implicit_beta")
    gives_logprobs = True

    def prepare(self, inputs: HeadInputs) -> Mapping[str, Floats]:
        """Advantages of one group, 0.0 off the trainable tokens; and beta, for the loss."""
        config = cast(ImplicitRewardConfig, self.config)
        mask = inputs.loss_mask
        ratio = np.asarray(inputs.outputs, np.float64) - inputs.streams["initial_logprobs"]
        rewards = np.where(mask, config.beta * ratio, 0.0)
        owners = np.repeat(inputs.rollouts, inputs.lengths)
        members = {rollout: np.flatnonzero(mask & (owners == rollout)) for rollout in owners[mask]}
        means = {rollout: rewards[at].mean() for rollout, at in members.items()}
        earned = {
            rollout: float(inputs.streams["rewards"][at[0]]) for rollout, at in members.items()
        }

        advantages = np.zeros(len(mask))
        for rollout, at in members.items():
            siblings = [other for other in members if other != rollout]
            if not siblings:
                continue
            above = rewards[at] - np.mean([means[other] for other in siblings])
            to_come = 0.0
            for step in reversed(range(len(at))):
                to_come = above[step] + config.gamma * to_come
                advantages[at[step]] = to_come
            advantages[at] += earned[rollout] - np.mean([earned[other] for other in siblings])
        return {"advantages": advantages, "implicit_beta": np.full(len(mask), config.beta)}


class ImplicitRewardLossConfig(PluginConfig):
    """``[trainer.losses.implicit_reward_loss]``"""

    coef: NonNegativeFloat = 1.0
    """What the cross entropy is multiplied by."""


class ImplicitRewardLoss(Loss):
    """Cross entropy between the outcome of a rollout and the probability that phi gives it."""

    name = "implicit_reward_loss"
    config_class = ImplicitRewardLossConfig
    scope = "rollout"
    normalize_by = "rollouts"
    reads = ("implicit_reward", "initial_logprobs", "outcomes", "implicit_beta")
    compares_with_sampler = False

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Metrics: the cross entropy, the sum of the rewards, and whether its sign tells success
        from failure."""
        import torch
        from torch.nn.functional import softplus

        config = cast(ImplicitRewardLossConfig, self.config)
        member = inputs.loss_mask
        logprobs = inputs.streams["implicit_reward"]
        outcomes = inputs.streams["outcomes"]
        beta = inputs.streams["implicit_beta"]
        assert logprobs is not None and outcomes is not None and beta is not None
        assert inputs.initial_logprobs is not None
        ratio = torch.where(member, logprobs - inputs.initial_logprobs, 0.0)
        total = beta[member][0] * ratio.sum()
        outcome = outcomes[member][0]
        entropy = softplus(total) - outcome * total
        weight = 1.0 if inputs.loss_weights is None else inputs.loss_weights[member][0]
        metrics = {
            "cross_entropy": entropy.detach(),
            "implicit_return": total.detach(),
            "is_right": ((total > 0) == (outcome > 0.5)).float(),
        }
        return LossOutputs(config.coef * weight * entropy, metrics)


@hookimpl
def register_heads() -> list[type[Head]]:
    return [ImplicitReward]


@hookimpl
def register_losses() -> list[type[Loss]]:
    return [ImplicitRewardLoss]
