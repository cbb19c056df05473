"""The loss of a pair (DPO, Rafailov et al. 2023, arXiv:2305.18290, equation 7).

t = trainer logprob, ref = logprob under the policy's first weights (``initial_logprobs``), p =
preference (+1 for the tokens of the chosen rollout, -1 for those of the rejected one), w = weight::

    h    = sum over members of  p * (t - ref)
    loss = -log sigmoid(beta * h) * mean(w)            one term per group

A group with one half of a pair (a filter dropped the other) is no group: it trains nothing and does
not count in the mean over groups. This module does not import
torch.

Shapes: T = tokens of one group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from pydantic import PositiveFloat

from prime_rl import Loss, LossInputs, LossOutputs, PluginConfig, hookimpl


class DPOConfig(PluginConfig):
    """``[trainer.losses.dpo]``"""

    beta: PositiveFloat = 0.1
    """How closely the policy stays with its first weights: a pair stops training at about h = 5 /
    beta."""


class DPOLoss(Loss):
    """The formula above."""

    name = "dpo"
    config_class = DPOConfig
    scope = "group"
    normalize_by = "groups"
    reads = ("preference", "initial_logprobs")
    compares_with_sampler = False

    @classmethod
    def completes(cls, streams: Mapping[str, Any]) -> bool:
        """Whether both halves of the pair are there."""
        preference = streams["preference"]
        return bool((preference > 0).any() and (preference < 0).any())

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """One group. Metrics: beta h, and whether the chosen rollout is ahead."""
        import torch

        preference = inputs.streams["preference"]
        reference = inputs.initial_logprobs
        assert preference is not None and reference is not None
        member = inputs.loss_mask
        zero = inputs.trainer_logprobs.new_zeros(())
        sign = torch.where(member, preference, zero)
        gains = torch.where(member, inputs.trainer_logprobs - reference, zero)
        margin = cast(DPOConfig, self.config).beta * (sign * gains).sum()
        whole = ((sign > 0).any() & (sign < 0).any()).to(margin.dtype)
        if inputs.loss_weights is not None:
            total = torch.where(member, inputs.loss_weights, zero).sum()
            whole = whole * total / member.sum().clamp(min=1)

        metrics = {"margin": margin.detach(), "accuracy": (margin.detach() > 0).float()}
        return LossOutputs(-torch.nn.functional.logsigmoid(margin) * whole, metrics)


@hookimpl
def register_losses() -> list[type[Loss]]:
    return [DPOLoss]
