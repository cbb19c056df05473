"""What the losses of this package share: their frame, the log-ratio, PPO's clipped surrogate.

Shapes: T = tokens of one call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, NamedTuple

from pydantic import Field, NonNegativeFloat

from prime_rl import Loss, LossInputs, LossOutputs, PluginConfig, TokenMetric

if TYPE_CHECKING:
    from torch import Tensor


class Clip(NamedTuple):
    """The bounds of a surrogate."""

    low: float
    """With a negative advantage, a token stops training once its ratio is below 1 minus this."""
    high: float
    """With a positive advantage, a token stops training once its ratio is above 1 plus this."""
    dual: float | None = None
    """With a negative advantage, a token stops training once its ratio is above this."""


class ClipConfig(PluginConfig):
    """The keys of a loss around PPO's clipped surrogate."""

    clip_eps_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    """With a negative advantage, a token stops training once its ratio is below 1 minus this."""
    clip_eps_high: NonNegativeFloat = 0.2
    """With a positive advantage, a token stops training once its ratio is above 1 plus this."""

    @property
    def clip(self) -> Clip:
        return Clip(self.clip_eps_low, self.clip_eps_high)


class WeightedTerms(Loss):
    """The frame of the losses of this package: the sum over the member tokens of weight times term.
    Subclass and implement ``terms``."""

    averages: ClassVar[bool] = False
    """Divide the sum by the member tokens of the call: the mean of a rollout."""

    def terms(self, inputs: LossInputs) -> tuple[Tensor, dict[str, TokenMetric]]:
        """[T] each token's term, 0 off the mask; and the metrics."""
        raise NotImplementedError

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        terms, metrics = self.terms(inputs)
        total = weighted(inputs, terms).sum()
        if self.averages:
            total = total / num_members(inputs)
        return LossOutputs(total, metrics)


def num_members(inputs: LossInputs) -> Tensor:
    """The member tokens of the call, at least 1."""
    return inputs.loss_mask.sum().clamp(min=1)


def sampled_log_ratio(inputs: LossInputs) -> Tensor:
    """[T] t - i: log of the policy's probability over the sampling policy's, 0 off the mask."""
    return on_mask(inputs, inputs.trainer_logprobs - inputs.inference_logprobs)


def on_mask(inputs: LossInputs, values: Tensor) -> Tensor:
    """[T] ``values``, 0 off the mask, where they may be infinite: 0 times inf would be NaN."""
    import torch

    return torch.where(inputs.loss_mask, values, values.new_zeros(()))


def weighted(inputs: LossInputs, terms: Tensor) -> Tensor:
    """[T] each term, which is 0 off the mask, times its weight."""
    weights = inputs.loss_weights
    return terms if weights is None else terms * on_mask(inputs, weights)


def surrogate(
    inputs: LossInputs, log_ratio: Tensor, clip: Clip
) -> tuple[Tensor, dict[str, TokenMetric]]:
    """[T] -min(r A, clip(r, 1 - low, 1 + high) A), with ``dual`` at most -dual A where A < 0; and
    the shares of tokens without gradient, under the names that the token export uses.

    ``log_ratio``: [T] log r, finite on the mask.
    """
    import torch

    member = inputs.loss_mask
    advantages = on_mask(inputs, inputs.advantages)
    with torch.no_grad():
        ratio = log_ratio.exp()
        low = 1 - clip.low
        high = 1 + clip.high
        too_high = member & (advantages > 0) & (ratio > high)
        too_low = member & (advantages < 0) & (ratio < low)
        bound = ratio.clamp(low, high)
        if clip.dual is not None:
            above = member & (advantages < 0) & (ratio > clip.dual)
            too_high = too_high | above
            bound = torch.where(above, clip.dual, bound)

        clipped = too_high | too_low
        constant = clipped | (advantages == 0)

    # torch.where, not min: the other branch may be infinite, and its gradient 0 * inf is NaN.
    zero = log_ratio.new_zeros(())
    ratio = torch.where(constant, bound, torch.where(constant, zero, log_ratio).exp())
    metrics = {
        "is_masked": TokenMetric(clipped.float(), member),
        "is_masked_low": TokenMetric(too_low.float(), member),
        "is_masked_high": TokenMetric(too_high.float(), member),
    }
    return -ratio * advantages, metrics
