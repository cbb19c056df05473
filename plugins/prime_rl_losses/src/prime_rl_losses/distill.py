"""Losses that imitate: cross entropy, and KL to a reference model, of the sampled token or of the
reference's likeliest ones.

Per token, t = trainer logprob, i = inference logprob, w = weight (1 if absent)::

    ce      -t * w
    ref_kl  drop = exp(t) - exp(i) < -0.2,  g = (ref - t) as a constant
            (-(not drop) * g * exp(t - i) + 1e-3 * (t - i)^2) * w
    top_kl  P_v, Q_v = exp of the reference's and the trainer's logprobs of the ids in ``top_ids``,
            P_rest = 1 - sum P_v, Q_rest = 1 - sum Q_v, all other tokens in one bucket:
            forward  sum over v and rest of  P log(P / Q) * w
            reverse  sum over v and rest of  Q log(Q / P) * w

``top_kl`` is at most the KL over the whole vocabulary, and equal to it if all tokens are in
``top_ids``. Its gradient is exact: there is no sampled token in it, and no importance ratio. A
bucket below 1e-5 counts as empty: that is the precision of 1 minus a sum of float32 probabilities.

Shapes: T = tokens, k = ids per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast

from prime_rl import Loss, LossInputs, LossOutputs, PluginConfig, StreamError, TokenMetric

if TYPE_CHECKING:
    from torch import Tensor

MASK_LOW = 0.2
TAU = 1e-3
LEAST_REST = 1e-5


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
        member = inputs.loss_mask
        zero = inputs.trainer_logprobs.new_zeros(())
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


class TopKLConfig(PluginConfig):
    """``[trainer.losses.top_kl]``"""

    direction: Literal["forward", "reverse"] = "forward"
    """``forward``: KL(reference || policy), which covers all that the reference may say.
    ``reverse``: KL(policy || reference), which avoids what it would not say."""


class TopKL(Loss):
    """KL between the reference's and the trainer's distributions over the reference's top k."""

    name = "top_kl"
    config_class = TopKLConfig
    scope = "token"
    reads = ("top_logprobs", "top_ref_logprobs")
    compares_with_sampler = False

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Sum over the member tokens. Metrics: the KL, and the reference's probability of all
        tokens but the k. Raises ``StreamError`` if the streams have different shapes."""
        import torch

        ours = inputs.top_logprobs
        theirs = inputs.streams["top_ref_logprobs"]
        assert ours is not None and theirs is not None
        if ours.shape != theirs.shape:
            raise StreamError(
                f"loss 'top_kl': top_ref_logprobs has the shape {tuple(theirs.shape)} and top_ids "
                f"{tuple(ours.shape)}, expected one logprob per id. Fix the algorithm that assigns "
                "them."
            )

        member = inputs.loss_mask
        q, log_q = _with_rest(torch.where(member[:, None], ours, 0.0))
        p, log_p = _with_rest(torch.where(member[:, None], theirs, 0.0))
        forward = cast(TopKLConfig, self.config).direction == "forward"
        terms = p * (log_p - log_q) if forward else q * (log_q - log_p)
        kl = torch.where(member, terms.sum(1), 0.0)
        metrics = {
            "kl": TokenMetric(kl.detach(), member),
            "rest": TokenMetric(p[:, -1], member),
        }
        return LossOutputs(_weighted(kl, inputs).sum(), metrics)


def _with_rest(logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """[T, k + 1] probabilities and their logs; the last column is all other tokens together."""
    import torch

    chosen = logprobs.exp()
    rest = 1 - chosen.sum(1, keepdim=True)
    floor = rest.detach().clamp(min=LEAST_REST)
    # The value of log(floor) with the slope 1 / floor: clamp alone would have none below it, and a
    # bucket that the policy has emptied could not be filled again.
    log_rest = floor.log() + (rest - rest.detach()) / floor
    rest = torch.where(rest < LEAST_REST, 0.0, rest)
    return torch.cat([chosen, rest], 1), torch.cat([logprobs, log_rest], 1)


def _weighted(per_token: Tensor, inputs: LossInputs) -> Tensor:
    """``per_token`` is zero off the mask, and stays so whatever the weights are there."""
    import torch

    if inputs.loss_weights is None:
        return per_token
    return per_token * torch.where(inputs.loss_mask, inputs.loss_weights, 0.0)
