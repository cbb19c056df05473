"""A critic that classifies: a distribution over bins of the return, trained by cross entropy.

    V       = sum_i p_i z_i                     p = softmax(outputs), z_i the middle of bin i
    F(u)    = Phi((u - R) / s)                  u_0 .. u_k: edges of bins; s = sigma (u_1 - u_0)
    q_i     = (F(u_(i+1)) - F(u_i)) / (F(u_k) - F(u_0))
    loss    = -sum_i q_i log p_i

Farebrother et al. 2024, arXiv:2403.03950, HL-Gauss: R, the return of ``gae.py``, becomes a
histogram of a normal distribution around it. A return outside the bins counts as the nearest edge.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import erf, sqrt
from typing import TYPE_CHECKING, Annotated, cast

import numpy as np
import numpy.typing as npt
from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from prime_rl import (
    ConfigError,
    Head,
    HeadInputs,
    Loss,
    LossInputs,
    LossOutputs,
    PluginConfig,
    TokenMetric,
)
from prime_rl_clip_losses.surrogate import on_mask, weighted
from prime_rl_ppo.gae import Floats, ValueHeadConfig, credit

if TYPE_CHECKING:
    from torch import nn


class ValueBinsConfig(ValueHeadConfig):
    """Settings of the head ``value_bins``."""

    low: float = 0.0
    """The lowest edge of the bins: the least return."""
    high: float = 1.0
    """The highest edge: the greatest return."""
    bins: Annotated[int, Field(ge=2, le=1024)] = 51
    """How many bins of equal width."""
    sigma: PositiveFloat = 0.75
    """Standard deviation of a return's histogram, in bins."""

    @model_validator(mode="after")
    def _check(self) -> ValueBinsConfig:
        if self.low >= self.high:
            raise ConfigError(
                f"trainer.heads.value_bins: low is {self.low} and high {self.high}, expected low "
                "below high."
            )
        return self

    @property
    def edges(self) -> Floats:
        """[k + 1]"""
        return np.linspace(self.low, self.high, self.bins + 1)

    @property
    def middles(self) -> Floats:
        """[k]"""
        return (self.edges[1:] + self.edges[:-1]) / 2


class ValueBinsHead(Head):
    """Logits of the bins, [T, k]; uniform at the start."""

    name = "value_bins"
    config_class = ValueBinsConfig
    scope = "rollout"
    reads = ("rewards", ("truncated", 0.0))
    reads_ends = True
    gives_vectors = True
    writes = ("advantages", "returns", "return_bins")

    def build(self, hidden_size: int) -> nn.Module:
        """A linear layer to the logits."""
        from torch import nn

        linear = nn.Linear(hidden_size, cast(ValueBinsConfig, self.config).bins)
        nn.init.zeros_(linear.weight)
        nn.init.zeros_(linear.bias)
        return linear

    def prepare(self, inputs: HeadInputs) -> Mapping[str, Floats]:
        """Advantages and returns of one rollout, and each return as a histogram [T, k]."""
        config = cast(ValueBinsConfig, self.config)
        values = softmax(inputs.outputs) @ config.middles
        ends = None if inputs.ends is None else softmax(inputs.ends) @ config.middles
        columns = credit(inputs, values, ends=ends, config=config)
        del columns["old_values"]
        histograms = np.zeros((len(inputs.loss_mask), config.bins))
        histograms[inputs.loss_mask] = histogram(columns["returns"][inputs.loss_mask], config)
        return columns | {"return_bins": histograms}


def softmax(logits: npt.ArrayLike) -> Floats:
    """Along the last axis."""
    shifted = np.asarray(logits, np.float64)
    shifted = np.exp(shifted - shifted.max(-1, keepdims=True))
    return np.asarray(shifted / shifted.sum(-1, keepdims=True))


def histogram(returns: npt.ArrayLike, config: ValueBinsConfig) -> Floats:
    """[N, k] of [N] returns."""
    inside = np.clip(np.asarray(returns, np.float64), config.low, config.high)
    deviation = config.sigma * (config.high - config.low) / config.bins
    below = np.vectorize(lambda z: (1 + erf(z / sqrt(2))) / 2, otypes=[np.float64])
    mass = below((config.edges - inside[:, None]) / deviation)
    return np.asarray(np.diff(mass) / (mass[:, -1:] - mass[:, :1]))


class ValueBinsLossConfig(PluginConfig):
    """``[trainer.losses.value_bins_loss]``"""

    coef: NonNegativeFloat = 0.5
    """What the cross entropy is multiplied by."""


class ValueBinsLoss(Loss):
    """coef times the cross entropy of each return's histogram, summed over the member tokens."""

    name = "value_bins_loss"
    config_class = ValueBinsLossConfig
    token_wise = True
    reads = ("value_bins", "return_bins", "returns")
    compares_with_sampler = False

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Metrics: the cross entropy and the return."""
        import torch

        config = cast(ValueBinsLossConfig, self.config)
        member = inputs.loss_mask
        logits = inputs.streams["value_bins"]
        targets = inputs.streams["return_bins"]
        returns = inputs.streams["returns"]
        assert logits is not None and targets is not None and returns is not None
        kept = torch.where(member[:, None], targets, 0.0)
        entropy = on_mask(inputs, -(kept * logits.log_softmax(-1)).sum(-1))
        metrics = {
            "cross_entropy": TokenMetric(entropy.detach(), member),
            "return": TokenMetric(returns, member),
        }
        return LossOutputs(config.coef * weighted(inputs, entropy).sum(), metrics)
