"""The critic of PPO: a value head and its loss. Advantages: ``gae.py``.

The critic ``value_bins`` gives a distribution over bins of the return instead of its mean, and
learns by classification (``value_bins.py``).

This module does not import torch before the trainer builds the head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt
from pydantic import NonNegativeFloat, PositiveFloat

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
from prime_rl_clip_losses.surrogate import on_mask, weighted
from prime_rl_ppo.gae import ValueHeadConfig, credit
from prime_rl_ppo.value_bins import ValueBinsHead, ValueBinsLoss

if TYPE_CHECKING:
    from torch import nn

Floats = npt.NDArray[np.float64]


class ValueHead(Head):
    """V of each token: linear in the hidden state, 0 at the start."""

    name = "values"
    config_class = ValueHeadConfig
    scope = "rollout"
    reads = ("rewards", ("truncated", 0.0))
    reads_ends = True
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
        return credit(inputs, inputs.outputs, ends=inputs.ends, config=config)


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

        metrics = {
            "error": TokenMetric(error.detach(), member),
            "value": TokenMetric(values.detach(), member),
            "return": TokenMetric(returns, member),
            "clip_frac": TokenMetric((kept > error).float(), member),
        }
        return LossOutputs(config.coef * weighted(inputs, on_mask(inputs, kept)).sum(), metrics)


@hookimpl
def register_heads() -> list[type[Head]]:
    return [ValueHead, ValueBinsHead]


@hookimpl
def register_losses() -> list[type[Loss]]:
    return [ValueLoss, ValueBinsLoss]
