"""PPO's clipped surrogate (Schulman et al. 2017, arXiv:1707.06347, equation 7).

Per token, t = trainer logprob, i = inference logprob, A = advantage, w = weight (1 if absent)::

    ratio = exp(t - i)
    loss  = sum over members of  -w * min(ratio * A, clip(ratio, 1 - low, 1 + high) * A)

The minimum is the clipped term, a constant without gradient, where ratio > 1 + high with a positive
advantage or ratio < 1 - low with a negative one. With ``dual_clip`` = c, a negative advantage gives
max(that minimum, c * A): a constant where ratio > c (Ye et al. 2020, arXiv:1912.09729, with c =
3; checked in published code, not in the paper).

Differences from the papers:

1. The two bounds may differ (``clip_eps_low``, ``clip_eps_high``). The paper has one, 0.2.
2. The old policy is the sampling policy, with the logprobs that the engine reported.
3. Summed, not averaged: the trainer divides by the step's member tokens.

Shapes: T = tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, cast

from pydantic import Field

from prime_rl import LossInputs, TokenMetric
from prime_rl_clip_losses.surrogate import (
    Clip,
    ClipConfig,
    WeightedTerms,
    sampled_log_ratio,
    surrogate,
)

if TYPE_CHECKING:
    from torch import Tensor


class PPOClipConfig(ClipConfig):
    """``[trainer.loss] type = "ppo_clip"``"""

    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """With a negative advantage, a token stops training once its ratio is above this; 3 is usual.
    None: never."""

    @property
    def clip(self) -> Clip:
        return Clip(self.clip_eps_low, self.clip_eps_high, self.dual_clip)


class PPOClipLoss(WeightedTerms):
    """The formula above."""

    name = "ppo_clip"
    config_class = PPOClipConfig
    token_wise = True

    def terms(self, inputs: LossInputs) -> tuple[Tensor, dict[str, TokenMetric]]:
        """``is_masked`` is the share that has no gradient."""
        clip = cast(PPOClipConfig, self.config).clip
        return surrogate(inputs, sampled_log_ratio(inputs), clip)
