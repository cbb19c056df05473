"""Losses that imitate: cross entropy, and reverse KL to a reference model.

Per token, t = trainer logprob, i = inference logprob, w = weight (1 if absent)::

    ce      -t * w
    ref_kl  drop = exp(t) - exp(i) < -0.2,  g = (ref - t) as a constant
            (-(not drop) * g * exp(t - i) + 1e-3 * (t - i)^2) * w
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prime_rl import Loss, LossInputs, LossOutputs, TokenMetric

if TYPE_CHECKING:
    from torch import Tensor

MASK_LOW = 0.2
TAU = 1e-3


class CrossEntropy(Loss):
    """Cross entropy of the member tokens: supervised fine-tuning."""

    name = "ce"
    scope = "token"
    reads = ()
    compares_with_sampler = False

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        import torch

        nll = torch.where(inputs.loss_mask, -inputs.trainer_logprobs, 0.0)
        metrics = {"nll": TokenMetric(nll.detach(), inputs.loss_mask)}
        return LossOutputs(_weighted(nll, inputs).sum(), metrics)


class ReferenceKL(Loss):
    """Reverse KL to a reference policy as a per-token advantage, importance weighted."""

    name = "ref_kl"
    scope = "token"
    reads = ("ref_logprobs",)

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        import torch

        assert inputs.ref_logprobs is not None
        member, zero = inputs.loss_mask, inputs.trainer_logprobs.new_zeros(())
        log_ratio = torch.where(member, inputs.trainer_logprobs - inputs.inference_logprobs, zero)
        trainer = inputs.trainer_logprobs.detach()
        dropped = member & (trainer.exp() - inputs.inference_logprobs.exp() < -MASK_LOW)
        keep = member & ~dropped
        signal = inputs.ref_logprobs - trainer
        # Where, not a product: off the mask a ratio may be infinite, and 0 * inf is NaN.
        gain = torch.where(keep, signal * torch.where(keep, log_ratio, zero).exp(), zero)
        per_token = _weighted(TAU * log_ratio.square() - gain, inputs)
        mismatch_kl = log_ratio.detach().expm1() - log_ratio.detach()
        metrics = {
            "ref_kl": TokenMetric(signal, member),
            "masked_mismatch_kl": TokenMetric(mismatch_kl, dropped),
            "unmasked_mismatch_kl": TokenMetric(mismatch_kl, keep),
            "is_masked": TokenMetric(dropped.float(), member),
        }
        return LossOutputs(per_token.sum(), metrics)


def _weighted(per_token: Tensor, inputs: LossInputs) -> Tensor:
    """``per_token`` is zero off the mask, and stays so whatever the weights are there."""
    import torch

    if inputs.loss_weights is None:
        return per_token
    return per_token * torch.where(inputs.loss_mask, inputs.loss_weights, 0.0)
