"""SAPO: a soft gate instead of a clip (Gao et al. 2025, arXiv:2511.20347).

Per token, t = trainer logprob, i = inference logprob, A = advantage, w = weight (1 if absent)::

    r    = exp(t - i)
    f(r) = 4 / tau * sigmoid(tau * (r - 1))            tau = tau_pos if A > 0, else tau_neg
    loss = sum over members of  -w * f(r) * A

Its gradient on t is -w * A * r * 4 p (1 - p), p = sigmoid(tau (r - 1)): REINFORCE at r = 1, and
less the further r has moved, in both directions.

Differences from the paper:

1. The old policy is the sampling policy.
2. Summed over tokens. The paper averages each response's tokens and then the responses: that is
   ``normalize_by = "rollouts"``.

The formula was checked in the documentation of two implementations, not in the paper.

Shapes: T = tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from pydantic import PositiveFloat

from prime_rl import LossInputs, PluginConfig, TokenMetric
from prime_rl_clip_losses.surrogate import WeightedTerms, on_mask, sampled_log_ratio

if TYPE_CHECKING:
    from torch import Tensor

LARGEST = 20.0
"""Bound of log r: the gate's gradient is 0 in floating point long before."""


class SAPOConfig(PluginConfig):
    """``[trainer.loss] type = "sapo"``"""

    tau_pos: PositiveFloat = 1.0
    """Temperature of the gate with a positive advantage: the larger, the sooner it closes."""
    tau_neg: PositiveFloat = 1.05
    """The same with a negative advantage."""


class SAPOLoss(WeightedTerms):
    """The formula above."""

    name = "sapo"
    config_class = SAPOConfig
    token_wise = True

    def terms(self, inputs: LossInputs) -> tuple[Tensor, dict[str, TokenMetric]]:
        """Metric: the gradient's factor 4 p (1 - p)."""
        import torch

        config = cast(SAPOConfig, self.config)
        advantages = on_mask(inputs, inputs.advantages)
        ratio = sampled_log_ratio(inputs).clamp(max=LARGEST).exp()
        tau = torch.where(advantages > 0, config.tau_pos, config.tau_neg)
        gate = torch.sigmoid(tau * (ratio - 1))
        share = (4 * gate * (1 - gate)).detach()
        metrics = {"gate": TokenMetric(share, inputs.loss_mask)}
        return -4 / tau * gate * advantages, metrics
