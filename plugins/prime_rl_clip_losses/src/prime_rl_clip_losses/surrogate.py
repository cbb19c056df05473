"""What the losses of this package share: the log-ratio, PPO's clipped surrogate, weights.

Shapes: T = tokens of one call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from prime_rl import LossInputs, TokenMetric

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
