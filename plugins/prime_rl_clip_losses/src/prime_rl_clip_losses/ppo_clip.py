"""PPO's clipped surrogate (Schulman et al. 2017, arXiv:1707.06347, equation 7).

Per token, t = trainer logprob, i = inference logprob, A = advantage, w = weight (1 if absent)::

    ratio = exp(t - i)
    loss  = sum over members of  -w * min(ratio * A, clip(ratio, 1 - low, 1 + high) * A)

The minimum is the clipped term, a constant without gradient, where ratio > 1 + high with a positive
advantage or ratio < 1 - low with a negative one.

Differences from the paper:

1. The two bounds may differ (``clip_eps_low``, ``clip_eps_high``). The paper has one, 0.2.
2. The old policy is the sampling policy, with the logprobs that the engine reported.
3. Summed, not averaged: the trainer divides by the step's member tokens.

Shapes: T = tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, cast

from pydantic import Field, NonNegativeFloat

from prime_rl import Loss, LossInputs, LossOutputs, PluginConfig, TokenMetric

if TYPE_CHECKING:
    from torch import Tensor


class PPOClipConfig(PluginConfig):
    """``[trainer.loss] type = "ppo_clip"``"""

    clip_eps_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    """With a negative advantage, a token stops training once its ratio is below 1 minus this."""
    clip_eps_high: NonNegativeFloat = 0.2
    """With a positive advantage, a token stops training once its ratio is above 1 plus this."""


class PPOClipLoss(Loss):
    """The formula above."""

    name = "ppo_clip"
    config_class = PPOClipConfig
    token_wise = True

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Sum over the member tokens. ``is_masked`` is the share that has no gradient."""
        import torch

        config = cast(PPOClipConfig, self.config)
        member, advantages = inputs.loss_mask, inputs.advantages
        zero = inputs.trainer_logprobs.new_zeros(())
        log_ratio = torch.where(member, inputs.trainer_logprobs - inputs.inference_logprobs, zero)
        with torch.no_grad():
            ratio = log_ratio.exp()
            low, high = 1 - config.clip_eps_low, 1 + config.clip_eps_high
            too_high = member & (advantages > 0) & (ratio > high)
            too_low = member & (advantages < 0) & (ratio < low)
            clipped = too_high | too_low
            bound = ratio.clamp(low, high)
            constant = clipped | (advantages == 0)
        # torch.where, not min: the other branch may be infinite, and its gradient 0 * inf is NaN.
        ratio = torch.where(constant, bound, torch.where(constant, zero, log_ratio).exp())
        per_token = -ratio * torch.where(member, advantages, zero)
        if inputs.loss_weights is not None:
            per_token = per_token * torch.where(member, inputs.loss_weights, zero)
        return LossOutputs(per_token.sum(), _metrics(member, clipped, too_low, too_high))


def _metrics(
    member: Tensor, clipped: Tensor, too_low: Tensor, too_high: Tensor
) -> dict[str, TokenMetric]:
    """Shares of the member tokens. The trainer's token export uses these three names."""
    return {
        "is_masked": TokenMetric(clipped.float(), member),
        "is_masked_low": TokenMetric(too_low.float(), member),
        "is_masked_high": TokenMetric(too_high.float(), member),
    }
