"""Losses with one importance ratio for a whole response: gspo and gmpo.

n = member tokens of the rollout, t = trainer logprob, i = inference logprob, A = advantage, w =
weight (1 if absent), sg = without gradient::

    gspo    s    = exp(mean of (t - i))                         the geometric mean of the ratios
            s_t  = sg[s] * exp(t - sg[t])
            loss = sum over members of  -w / n * min(s_t * A, clip(s_t, 1 - low, 1 + high) * A)

    gmpo    l_t  = t - i, at most ``log_clip`` where A > 0, at least -``log_clip`` where A < 0
            g    = exp(mean of l_t)
            loss = sum over members of  -w / n * A * sg[g] * exp(l_t - sg[l_t])

(GSPO, arXiv:2507.18071, equation 5, with the clips 3e-4 and 4e-4; GMPO, arXiv:2507.20673, with
log_clip = 0.4.) With one advantage per rollout these are the papers' objectives -min(s A, clip(s)
A) and -A g in value and in gradient. With an advantage per token ``gspo`` is the paper's
GSPO-token, and ``gmpo`` its analog.

Differences from the papers:

1. A response is a rollout, with all its turns and samples.
2. The old policy is the sampling policy. The clip of ``gspo`` is so narrow that the engine's
   rounding takes a part of it: see ``is_masked`` in the metrics.
3. Summed over rollouts; the trainer divides by their number in the step.
4. gmpo's bounds are for log r. Tokens with advantage 0 stay in the mean.

The formulas were checked in a review of GSPO, in published code and in documentation of GMPO, not
in the papers.

Shapes: T = tokens of one rollout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, cast

from pydantic import Field, NonNegativeFloat, PositiveFloat

from prime_rl import LossInputs, PluginConfig, TokenMetric
from prime_rl_clip_losses.surrogate import (
    ClipConfig,
    WeightedTerms,
    num_members,
    on_mask,
    sampled_log_ratio,
    surrogate,
)

if TYPE_CHECKING:
    from torch import Tensor


class GSPOConfig(ClipConfig):
    """``[trainer.loss] type = "gspo"``"""

    clip_eps_low: Annotated[float, Field(ge=0, le=1)] = 3e-4
    """With a negative advantage, a rollout stops training once s is below 1 minus this."""
    clip_eps_high: NonNegativeFloat = 4e-4
    """With a positive advantage, a rollout stops training once s is above 1 plus this."""


class GSPOLoss(WeightedTerms):
    """Clip the geometric mean of a rollout's ratios."""

    name = "gspo"
    config_class = GSPOConfig
    scope = "rollout"
    normalize_by = "rollouts"
    averages = True

    def terms(self, inputs: LossInputs) -> tuple[Tensor, dict[str, TokenMetric]]:
        """One rollout. Metrics: the share of tokens without gradient, and s."""
        logprobs = inputs.trainer_logprobs
        mean = sampled_log_ratio(inputs).detach().sum() / num_members(inputs)
        of_token = on_mask(inputs, mean + logprobs - logprobs.detach())
        terms, metrics = surrogate(inputs, of_token, cast(GSPOConfig, self.config).clip)
        metrics["sequence_ratio"] = TokenMetric(of_token.detach().exp(), inputs.loss_mask)
        return terms, metrics


class GMPOConfig(PluginConfig):
    """``[trainer.loss] type = "gmpo"``"""

    log_clip: PositiveFloat = 0.4
    """A token stops training once the logarithm of its ratio has moved further than this in the
    direction of its advantage."""


class GMPOLoss(WeightedTerms):
    """The geometric mean of a rollout's clipped ratios."""

    name = "gmpo"
    config_class = GMPOConfig
    scope = "rollout"
    normalize_by = "rollouts"
    averages = True

    def terms(self, inputs: LossInputs) -> tuple[Tensor, dict[str, TokenMetric]]:
        """One rollout. Metrics: the share of tokens without gradient, and g."""
        import torch

        bound = cast(GMPOConfig, self.config).log_clip
        member = inputs.loss_mask
        advantages = on_mask(inputs, inputs.advantages)
        log_ratio = sampled_log_ratio(inputs)
        too_high = (advantages > 0) & (log_ratio > bound)
        too_low = (advantages < 0) & (log_ratio < -bound)
        clipped = torch.where(
            too_high | too_low, log_ratio.detach().clamp(-bound, bound), log_ratio
        )
        mean = (clipped.detach().sum() / num_members(inputs)).exp()
        terms = -advantages * mean * (clipped - clipped.detach()).exp()
        metrics = {
            "is_masked": TokenMetric((too_high | too_low).float(), member),
            "is_masked_low": TokenMetric(too_low.float(), member),
            "is_masked_high": TokenMetric(too_high.float(), member),
            "sequence_ratio": TokenMetric(mean.expand_as(log_ratio), member),
        }
        return terms, metrics
