"""Importance-weighted policy gradient in a trust region on probabilities, with a penalty.

Per token, t = trainer logprob, i = inference logprob, A = advantage, w = weight (1 if absent), m =
member::

    log_ratio = t - i                     ratio = exp(log_ratio)
    d         = exp(t) - exp(i)           # a difference of probabilities, not a ratio
    keep      = m and not dropped(d, A)   # the trust region
    loss      = sum over m of  w * (-keep * adv_tau * A * ratio + kl_tau * log_ratio^2)

``default`` drops a token that has moved too far *in the direction its advantage pushes* (binary
total variation, after DPPO): d > dppo_mask_high if A > 0, else d < -dppo_mask_low. ``ipo`` drops it
in either direction: |d| > ipo_threshold.

1. ``keep`` is a constant for autograd. The gradient flows through ``ratio``, which is clipped only
   if ``ratio_clip`` is set.
2. The penalty (after Kimi k1.5) also applies to dropped tokens, and pulls them back.
3. d is a difference of probabilities, so a token that is unlikely under both policies is never
   dropped.

Shapes: T = tokens.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, cast

from pydantic import NonNegativeFloat, PositiveFloat

from prime_rl import Loss, LossInputs, LossOutputs, PluginConfig, TokenMetric

if TYPE_CHECKING:
    from torch import Tensor


class TrustRegionConfig(PluginConfig):
    """Settings of both losses."""

    adv_tau: NonNegativeFloat = 1.0
    """Scale of the advantages; 0 leaves only the penalty."""
    kl_tau: NonNegativeFloat = 1e-3
    """Scale of the squared log-ratio penalty."""
    ratio_clip: PositiveFloat | None = None
    """Upper bound of the importance ratio, ``min(ratio, ratio_clip)``. None: no bound."""


class DefaultLossConfig(TrustRegionConfig):
    """``[trainer.loss] type = "default"``"""

    dppo_mask_low: NonNegativeFloat = 0.2
    """With a zero or negative advantage, a token is dropped if its probability has fallen by more
    than this."""
    dppo_mask_high: NonNegativeFloat = 0.2
    """With a positive advantage, a token is dropped if its probability has risen by more than this.
    """


class IPOLossConfig(TrustRegionConfig):
    """``[trainer.loss] type = "ipo"``"""

    ipo_threshold: NonNegativeFloat = 0.1
    """A token is dropped if its probability has moved by more than this in either direction."""


class TrustRegionLoss(Loss):
    """The formula above. Subclasses decide which tokens are dropped."""

    token_wise = True

    @abstractmethod
    def dropped(self, difference: Tensor, advantages: Tensor) -> Tensor:
        """[T] bool: whether the difference of probabilities [T] is too large, given the advantages
        [T]."""

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Sum over the member tokens. Metrics: the share and the KL of dropped tokens."""
        import torch

        config = cast(TrustRegionConfig, self.config)
        member = inputs.loss_mask
        advantages = inputs.advantages
        # Off the mask a ratio may be infinite, and 0 * inf is NaN: use torch.where, not a product.
        zero = inputs.trainer_logprobs.new_zeros(())
        log_ratio = torch.where(member, inputs.trainer_logprobs - inputs.inference_logprobs, zero)
        with torch.no_grad():
            difference = inputs.trainer_logprobs.exp() - inputs.inference_logprobs.exp()
            dropped = member & self.dropped(difference, advantages)

        keep = member & ~dropped
        ratio = torch.where(keep, log_ratio, zero).exp()
        if config.ratio_clip is not None:
            ratio = ratio.clamp(max=config.ratio_clip)
        gain = torch.where(keep, config.adv_tau * advantages * ratio, zero)
        per_token = config.kl_tau * log_ratio.square() - gain
        if inputs.loss_weights is not None:
            per_token = per_token * torch.where(member, inputs.loss_weights, zero)
        metrics = _metrics(log_ratio.detach(), member, dropped=dropped, advantages=advantages)
        return LossOutputs(per_token.sum(), metrics)


class DefaultLoss(TrustRegionLoss):
    """Binary total variation, one-sided by the advantage's sign. A = 0 counts as negative."""

    name = "default"
    config_class = DefaultLossConfig

    def dropped(self, difference: Tensor, advantages: Tensor) -> Tensor:
        import torch

        config = cast(DefaultLossConfig, self.config)
        too_high, too_low = _outside(difference, config.dppo_mask_low, config.dppo_mask_high)
        return torch.where(advantages > 0, too_high, too_low)


class IPOLoss(TrustRegionLoss):
    """Total variation in both directions, whatever the advantage."""

    name = "ipo"
    config_class = IPOLossConfig

    def dropped(self, difference: Tensor, advantages: Tensor) -> Tensor:
        threshold = cast(IPOLossConfig, self.config).ipo_threshold
        too_high, too_low = _outside(difference, threshold, threshold)
        return too_high | too_low


def _outside(difference: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    return difference > high, difference < -low


def _metrics(
    log_ratio: Tensor, member: Tensor, dropped: Tensor, advantages: Tensor
) -> dict[str, TokenMetric]:
    """Shares of the member tokens, and the KL estimate (k3: ratio - 1 - log_ratio) of dropped and
    kept tokens."""
    mismatch_kl = log_ratio.expm1() - log_ratio
    positive = advantages > 0
    negative = advantages < 0

    def share(of: Tensor, among: Tensor) -> TokenMetric:
        return TokenMetric(of.to(log_ratio.dtype), among)

    return {
        "masked_mismatch_kl": TokenMetric(mismatch_kl, dropped),
        "unmasked_mismatch_kl": TokenMetric(mismatch_kl, member & ~dropped),
        "is_masked": share(dropped, member),
        "is_masked_low": share(dropped & negative, member),
        "is_masked_high": share(dropped & positive, member),
        "masked_advantage_positive": share(positive, dropped),
        "masked_advantage_negative": share(negative, dropped),
    }
