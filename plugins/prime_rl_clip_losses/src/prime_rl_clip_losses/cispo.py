"""CISPO: clip the importance weight, not the token (MiniMax-M1, arXiv:2506.13585, equations 4, 5).

Per token, t = trainer logprob, i = inference logprob, A = advantage, w = weight (1 if absent)::

    r    = clip(exp(t - i), 1 - low, 1 + high)      as a constant
    loss = sum over members of  -w * r * A * t

Its gradient on t is -w * r * A: REINFORCE with a bounded importance weight. No token loses its
gradient, including the rare ones that carry a chain of thought.

Differences from the paper:

1. The paper tunes the upper bound but gives no number. Ours is 4, so r <= 5.
2. The paper disables the lower bound with a large ``low``. Here None (the default) does.
3. Summed, not averaged: the trainer divides by the step's member tokens.

Shapes: T = tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, cast

from pydantic import Field, NonNegativeFloat

from prime_rl import LossInputs, PluginConfig, TokenMetric
from prime_rl_clip_losses.surrogate import WeightedTerms, on_mask, sampled_log_ratio

if TYPE_CHECKING:
    from torch import Tensor


class CISPOConfig(PluginConfig):
    """``[trainer.loss] type = "cispo"``"""

    clip_eps_low: Annotated[float, Field(ge=0, le=1)] | None = None
    """The importance weight is at least 1 minus this. None: no lower bound."""
    clip_eps_high: NonNegativeFloat = 4.0
    """The importance weight is at most 1 plus this."""


class CISPOLoss(WeightedTerms):
    """The formula above."""

    name = "cispo"
    config_class = CISPOConfig
    token_wise = True

    def terms(self, inputs: LossInputs) -> tuple[Tensor, dict[str, TokenMetric]]:
        """Metrics: the share of clipped weights and the mean weight."""
        import torch

        config = cast(CISPOConfig, self.config)
        member = inputs.loss_mask
        logprobs = on_mask(inputs, inputs.trainer_logprobs)
        low = 0.0 if config.clip_eps_low is None else 1 - config.clip_eps_low
        high = 1 + config.clip_eps_high
        with torch.no_grad():
            ratio = sampled_log_ratio(inputs).exp()
            weight = ratio.clamp(low, high)
            credit = on_mask(inputs, weight * inputs.advantages)

        metrics = {
            "clip_frac_low": TokenMetric((ratio < low).float(), member),
            "clip_frac_high": TokenMetric((ratio > high).float(), member),
            "importance_weight": TokenMetric(weight, member),
        }
        return -credit * logprobs, metrics
