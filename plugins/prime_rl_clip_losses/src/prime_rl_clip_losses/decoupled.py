"""PPO around the policy that began the batch, corrected for the one that sampled: decoupled_ppo,
tis, icepop and geometric_mask.

Per token, t = trainer logprob, o = logprob under the weights with which the trainer began the batch
(``old_logprobs``), i = inference logprob, A = advantage, w = weight (1 if absent)::

    k    = exp(o - i)                              a constant: the engine's error, and staleness
    u    = exp(t - o)                              what has been learned since
    loss = sum over members of  -w * c(k) * min(u * A, clip(u, 1 - low, 1 + high) * A)

    decoupled_ppo     c(k) = k, at most max_correction     arXiv:2110.00641; arXiv:2505.24298
    tis               c(k) = min(k, 2)                     Yao et al. 2025
    icepop            c(k) = k if 0.5 <= k <= 5, else 0    Ring-1T, arXiv:2510.18855
    geometric_mask    c(k) = min(k, 2) if 0.99 <= exp(mean of log k) <= 1.01, else 0; the mean is
                      over the rollout

With one optimizer step per batch u is 1 and the gradient on t is -w * c(k) * A: REINFORCE with a
bounded importance weight. Clipping u instead of exp(t - i) does not punish a token for the engine's
rounding or for a stale sampler.

Differences from the sources:

1. The bounds of the clip may differ. All losses have the same defaults, 0.2 and 0.2.
2. k also covers staleness, for which ``tis`` and ``icepop`` were not proposed.
3. Masks of rollouts have been proposed with and without a weight per token, and with several
   bounds: ours is ``tis`` on the rollouts that pass.
4. Summed, not averaged. A dropped token counts in the divisor.

The equations of ``decoupled_ppo`` were checked in documentation of implementations, those of
``icepop`` in a description by its authors; ``tis`` and the mask in blog posts.

Shapes: T = tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self, cast

from pydantic import NonNegativeFloat, PositiveFloat, model_validator

from prime_rl import LossInputs, TokenMetric
from prime_rl_clip_losses.surrogate import (
    ClipConfig,
    WeightedTerms,
    num_members,
    on_mask,
    surrogate,
)

if TYPE_CHECKING:
    from torch import Tensor


class Corrected(WeightedTerms):
    """The formula above. Subclass and implement ``correction``."""

    config_class = ClipConfig
    token_wise = True
    reads = ("advantages", "old_logprobs")

    def correction(self, inputs: LossInputs, log_k: Tensor) -> Tensor:
        """[T] c(k), given log k, which is 0 off the mask."""
        raise NotImplementedError

    def terms(self, inputs: LossInputs) -> tuple[Tensor, dict[str, TokenMetric]]:
        """Metrics: shares that the clip and c leave out, mean c(k)."""
        import torch

        assert inputs.old_logprobs is not None
        old = inputs.old_logprobs.detach()
        with torch.no_grad():
            log_k = on_mask(inputs, old - inputs.inference_logprobs)
            correction = self.correction(inputs, log_k)
            correction = correction.clamp(max=torch.finfo(correction.dtype).max)  # 0 * inf is NaN

        log_u = on_mask(inputs, inputs.trainer_logprobs - old)
        terms, metrics = surrogate(inputs, log_u, cast(ClipConfig, self.config).clip)
        metrics |= {
            "correction": TokenMetric(correction, inputs.loss_mask),
            "is_dropped": TokenMetric((correction == 0).float(), inputs.loss_mask),
        }
        return correction * terms, metrics


class DecoupledPPOConfig(ClipConfig):
    """``[trainer.loss] type = "decoupled_ppo"``"""

    max_correction: PositiveFloat | None = None
    """Upper bound of the correction k. None: no bound."""


class DecoupledPPOLoss(Corrected):
    """The importance weight of the policy that began the batch, uncut (Hilton et al. 2021,
    arXiv:2110.00641; AReaL, arXiv:2505.24298)."""

    name = "decoupled_ppo"
    config_class = DecoupledPPOConfig

    def correction(self, inputs: LossInputs, log_k: Tensor) -> Tensor:
        bound = cast(DecoupledPPOConfig, self.config).max_correction
        return log_k.exp() if bound is None else log_k.exp().clamp(max=bound)


class TISConfig(ClipConfig):
    """``[trainer.loss] type = "tis"``"""

    max_correction: PositiveFloat = 2.0
    """Upper bound of the correction k."""


class TISLoss(Corrected):
    """Truncated importance sampling (Yao et al. 2025, "Your efficient RL framework secretly brings
    you off-policy RL training")."""

    name = "tis"
    config_class = TISConfig

    def correction(self, inputs: LossInputs, log_k: Tensor) -> Tensor:
        return log_k.exp().clamp(max=cast(TISConfig, self.config).max_correction)


class Interval(ClipConfig):
    """Bounds within which tokens train."""

    min_ratio: NonNegativeFloat
    max_ratio: PositiveFloat

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.min_ratio > self.max_ratio:
            raise ValueError(
                f"min_ratio {self.min_ratio} is above max_ratio {self.max_ratio}: no token would "
                "train. Exchange them"
            )
        return self


class IcePopConfig(Interval):
    """``[trainer.loss] type = "icepop"``"""

    min_ratio: NonNegativeFloat = 0.5
    """A token with a smaller k is dropped."""
    max_ratio: PositiveFloat = 5.0
    """A token with a larger k is dropped."""


class IcePopLoss(Corrected):
    """Drop the tokens on which engine and trainer disagree."""

    name = "icepop"
    config_class = IcePopConfig

    def correction(self, inputs: LossInputs, log_k: Tensor) -> Tensor:
        import torch

        config = cast(IcePopConfig, self.config)
        k = log_k.exp()
        keep = (k >= config.min_ratio) & (k <= config.max_ratio)
        return torch.where(keep, k, k.new_zeros(()))


class GeometricMaskConfig(Interval):
    """``[trainer.loss] type = "geometric_mask"``"""

    min_ratio: NonNegativeFloat = 0.99
    """A rollout with a smaller geometric mean of k is dropped."""
    max_ratio: PositiveFloat = 1.01
    """A rollout with a larger geometric mean of k is dropped."""
    max_correction: PositiveFloat = 2.0
    """Upper bound of the correction of each token that is kept."""


class GeometricMaskLoss(Corrected):
    """Drop the rollouts on which engine and trainer disagree, whatever their length."""

    name = "geometric_mask"
    config_class = GeometricMaskConfig
    token_wise = False
    scope = "rollout"

    def correction(self, inputs: LossInputs, log_k: Tensor) -> Tensor:
        import torch

        config = cast(GeometricMaskConfig, self.config)
        mean = (log_k.sum() / num_members(inputs)).exp()
        keep = (mean >= config.min_ratio) & (mean <= config.max_ratio)
        return torch.where(keep, log_k.exp().clamp(max=config.max_correction), log_k.new_zeros(()))
