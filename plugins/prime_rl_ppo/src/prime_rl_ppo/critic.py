"""The critic of PPO: a value head, generalized advantage estimation and the value loss.

    V_t     = w · h_{t-1} + b        h_{t-1}: the hidden state that predicts token t
    delta_t = r_t + gamma V_{t+1} - V_t
    A_t     = delta_t + gamma lambda A_{t+1}
    R_t     = A_t + V_t

(Schulman et al. 2015, arXiv:1506.02438, equations 11 and 16.) Differences from the paper:

1. The steps are the trainable tokens of a rollout, over all its samples in order. Tokens of the
   environment lie between two steps and take no time.
2. Every rollout ends after its last trainable token, with V = 0 there, also if it was truncated.
3. V and R are those of the weights with which the trainer began the batch, in every minibatch and
   epoch.

This module does not import torch before the trainer builds the head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, cast

import numpy as np
import numpy.typing as npt
from pydantic import Field, NonNegativeFloat, PositiveFloat

from prime_rl import (
    Head,
    HeadInputs,
    Loss,
    LossInputs,
    LossOutputs,
    PluginConfig,
    TokenMetric,
    hookimpl,
)

if TYPE_CHECKING:
    from torch import nn

Floats = npt.NDArray[np.float64]


class ValueHeadConfig(PluginConfig):
    """Settings of the head ``values``."""

    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount of the reward one token later."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95
    """1: the sampled return minus V, unbiased. Towards 0: less variance, and the critic's bias."""


class ValueHead(Head):
    """V of each token: linear in the hidden state, 0 at the start."""

    name = "values"
    config_class = ValueHeadConfig
    scope = "rollout"
    reads = ("rewards",)
    writes = ("advantages", "returns", "old_values")

    def build(self, hidden_size: int) -> nn.Module:
        """A linear layer to one value."""
        from torch import nn

        linear = nn.Linear(hidden_size, 1)
        nn.init.zeros_(linear.weight)
        nn.init.zeros_(linear.bias)
        return nn.Sequential(linear, nn.Flatten(0))

    def prepare(self, inputs: HeadInputs) -> Mapping[str, Floats]:
        """Advantages and returns of one rollout; 0.0 off its trainable tokens."""
        config = cast(ValueHeadConfig, self.config)
        mask = inputs.loss_mask
        values = inputs.outputs[mask]
        rewards = inputs.streams["rewards"][mask]
        columns = {name: np.zeros(len(mask)) for name in self.writes}
        columns["advantages"][mask] = gae(rewards, values, config.gamma, config.gae_lambda)
        columns["old_values"][mask] = values
        columns["returns"] = columns["advantages"] + columns["old_values"]
        return columns


def gae(rewards: npt.ArrayLike, values: npt.ArrayLike, gamma: float, gae_lambda: float) -> Floats:
    """The advantage of each step of one episode, [C]; ``rewards`` and ``values`` [C]."""
    r = np.asarray(rewards, np.float64)
    v = np.asarray(values, np.float64)
    advantages = r + gamma * np.append(v[1:], 0.0) - v
    for t in reversed(range(len(v) - 1)):
        advantages[t] += gamma * gae_lambda * advantages[t + 1]
    return advantages


class ValueLossConfig(PluginConfig):
    """``[trainer.losses.value_loss]``"""

    coef: NonNegativeFloat = 0.5
    """What the squared error is multiplied by."""
    clip_eps: PositiveFloat | None = 0.2
    """A value that has moved further than this from the batch's start, towards its return, stops
    training. None: no clipping."""


class ValueLoss(Loss):
    """coef max((V - R)^2, (clip(V, old - eps, old + eps) - R)^2), summed over the member tokens."""

    name = "value_loss"
    config_class = ValueLossConfig
    token_wise = True
    reads = ("values", "old_values", "returns")
    compares_with_sampler = False

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Metrics: the squared error, the value, the return, and the share that is clipped."""
        import torch

        config = cast(ValueLossConfig, self.config)
        member = inputs.loss_mask
        values, old, returns = (
            inputs.streams[name] for name in ("values", "old_values", "returns")
        )
        assert values is not None and old is not None and returns is not None
        error = (values - returns).square()
        kept = error
        if config.clip_eps is not None:
            near = values.clamp(old - config.clip_eps, old + config.clip_eps)
            kept = torch.maximum(error, (near - returns).square())

        terms = config.coef * kept
        if inputs.loss_weights is not None:
            terms = terms * inputs.loss_weights
        metrics = {
            "error": TokenMetric(error.detach(), member),
            "value": TokenMetric(values.detach(), member),
            "return": TokenMetric(returns, member),
            "clip_frac": TokenMetric((kept > error).float(), member),
        }
        return LossOutputs(torch.where(member, terms, 0.0).sum(), metrics)


@hookimpl
def register_heads() -> list[type[Head]]:
    return [ValueHead]


@hookimpl
def register_losses() -> list[type[Loss]]:
    return [ValueLoss]
