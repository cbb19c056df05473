"""Keep entropy by holding back the tokens that lower it most: clip_cov and kl_cov (Cui et al. 2025,
arXiv:2505.22617).

t = trainer logprob, i = inference logprob, A = advantage, w = weight (1 if absent), N = member
tokens of a group; means are over them::

    cov_t = (A_t - mean(A)) * (t - mean(t))     the token's share in the covariance of A and log π

    clip_cov    PPO's clipped surrogate; of the tokens with low < cov_t < high, max(1, share * N)
                get no gradient
    kl_cov      -A exp(t - i), plus beta * abs(t - i) on the max(1, share * N) tokens with the
                largest cov_t

The change of entropy in one step is about minus the covariance of log π and the step: few tokens,
likely and rewarded, cause most of it.

Differences from the paper:

1. Means and shares are over one group, not over the batch: a loss sees at most a group.
2. ``clip_cov`` takes the candidates with the largest cov_t instead of random ones, so that a
   resumed run repeats them.
3. The old policy is the sampling policy. The KL of ``kl_cov`` is abs(t - i), as in the authors'
   code.
4. Summed over tokens; a token without gradient counts in the divisor.

The formulas were checked in the authors' published code, not in the paper.

Shapes: T = tokens of one group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, cast

from pydantic import Field, NonNegativeFloat

from prime_rl import LossInputs, PluginConfig, TokenMetric
from prime_rl_clip_losses.surrogate import (
    Clip,
    ClipConfig,
    WeightedTerms,
    num_members,
    on_mask,
    sampled_log_ratio,
    surrogate,
)

if TYPE_CHECKING:
    from torch import Tensor

Share = Annotated[float, Field(gt=0, le=1)]


def largest(inputs: LossInputs, share: float, low: float, high: float) -> tuple[Tensor, Tensor]:
    """[T] cov_t; and bool: the tokens with the largest of those between ``low`` and ``high``, at
    most max(1, ``share`` of all members)."""
    import torch

    member = inputs.loss_mask
    number = num_members(inputs)
    advantages = on_mask(inputs, inputs.advantages)
    logprobs = on_mask(inputs, inputs.trainer_logprobs.detach())
    covariance = (advantages - advantages.sum() / number) * (logprobs - logprobs.sum() / number)
    candidate = member & (covariance > low) & (covariance < high)
    # The numbers stay on the device: to read one would wait for it, once per group.
    count = (share * number.double()).floor().clamp(min=1)
    places = torch.arange(len(member), device=member.device)
    order = torch.where(candidate, covariance, -torch.inf).argsort(descending=True, stable=True)
    chosen = torch.zeros_like(member).scatter(0, order, places < count)
    return on_mask(inputs, covariance), chosen & candidate


class ClipCovConfig(ClipConfig):
    """``[trainer.loss] type = "clip_cov"``"""

    share: Share = 2e-4
    """Share of a group's tokens that gets no gradient, at least one token."""
    min_covariance: float = 1.0
    """Tokens with a smaller covariance train."""
    max_covariance: float = 5.0
    """Tokens with a larger covariance train."""


class ClipCovLoss(WeightedTerms):
    """PPO without the gradient of some tokens of high covariance."""

    name = "clip_cov"
    config_class = ClipCovConfig
    scope = "group"

    def terms(self, inputs: LossInputs) -> tuple[Tensor, dict[str, TokenMetric]]:
        """One group. Metrics: the share without gradient, and the mean covariance."""
        config = cast(ClipCovConfig, self.config)
        terms, metrics = surrogate(inputs, sampled_log_ratio(inputs), config.clip)
        covariance, chosen = largest(
            inputs, config.share, low=config.min_covariance, high=config.max_covariance
        )
        metrics["is_held"] = TokenMetric(chosen.float(), inputs.loss_mask)
        metrics["covariance"] = TokenMetric(covariance, inputs.loss_mask)
        return terms.masked_fill(chosen, 0.0), metrics


class KLCovConfig(PluginConfig):
    """``[trainer.loss] type = "kl_cov"``"""

    share: Share = 2e-4
    """Share of a group's tokens that is penalized, at least one token; 2e-3 for small models."""
    beta: NonNegativeFloat = 1.0
    """Weight of the penalty."""


class KLCovLoss(WeightedTerms):
    """The unclipped surrogate, with a penalty on the tokens of the highest covariance."""

    name = "kl_cov"
    config_class = KLCovConfig
    scope = "group"

    def terms(self, inputs: LossInputs) -> tuple[Tensor, dict[str, TokenMetric]]:
        """One group. Metrics: the share that is penalized, and the mean covariance."""
        import torch

        config = cast(KLCovConfig, self.config)
        log_ratio = sampled_log_ratio(inputs)
        terms, _ = surrogate(inputs, log_ratio, Clip(1.0, torch.inf))
        covariance, chosen = largest(inputs, config.share, low=-torch.inf, high=torch.inf)
        penalty = config.beta * torch.where(chosen, log_ratio, 0.0).abs()
        metrics = {
            "is_held": TokenMetric(chosen.float(), inputs.loss_mask),
            "covariance": TokenMetric(covariance, inputs.loss_mask),
        }
        return terms + penalty, metrics
