"""Penalties that train beside a policy loss: entropy_bonus and kl_to_initial.

An algorithm routes tokens to them with a weight (``penalties`` of every baseline); each is averaged
by itself. t = trainer logprob, w = weight, H = entropy of the distribution that the token is drawn
from, d = t - log π under the policy's first weights::

    entropy_bonus    loss = sum over members of  -w H

    kl_to_initial    loss = sum over members of  w k        an estimate of KL(π || initial)
                     k1 = d                                 gradient d
                     k2 = d^2 / 2                           gradient d
                     k3 = exp(-d) - 1 + d                   gradient 1 - exp(-d)

(Schulman, "Approximating KL divergence", 2020; k3 with weight 0.04 is the KL term of GRPO,
arXiv:2402.03300.) As a loss, k1 would have the gradient 1, whose expectation is zero: here its
value is d and its gradient that of the policy gradient with the reward -d, which is exact on the
policy. k2 has the same gradient. The gradient of k3 is that of KL(initial || π) on the policy, and
bounded by 1 where the policy has become likelier.

Differences from the sources: 1. no importance ratio; 2. below d = -20, where exp(-d) would soon be
infinite, k3 goes on as the straight line with the value and the gradient that it has there.

Shapes: T = tokens.
"""

from __future__ import annotations

import math
from typing import Literal, cast

from prime_rl import Loss, LossInputs, LossOutputs, PluginConfig, TokenMetric
from prime_rl_clip_losses.surrogate import on_mask, weighted

LOWEST = -20.0
"""The d below which k3 is a straight line, so that exp(-d) stays finite."""


class EntropyBonusLoss(Loss):
    """Minus the entropy of each token's distribution."""

    name = "entropy_bonus"
    scope = "token"
    reads = ("entropies",)
    compares_with_sampler = False

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Metric: the entropy."""
        assert inputs.entropies is not None
        entropies = on_mask(inputs, inputs.entropies)
        metrics = {"value": TokenMetric(entropies.detach(), inputs.loss_mask)}
        return LossOutputs(weighted(inputs, -entropies).sum(), metrics)


class KLToInitialConfig(PluginConfig):
    """``[trainer.losses.kl_to_initial]``"""

    estimator: Literal["k1", "k2", "k3"]
    """``k1`` and ``k2``: the gradient of KL(π || initial) on the policy. ``k3``, as in GRPO: never
    negative, with the gradient of KL(initial || π). Required, so that the run has the table: by it
    a resumed run knows that it needs the first weights."""


class KLToInitialLoss(Loss):
    """An estimate of the KL to the policy's first weights."""

    name = "kl_to_initial"
    config_class = KLToInitialConfig
    scope = "token"
    reads = ("initial_logprobs",)
    compares_with_sampler = False

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Metric: the estimate."""
        assert inputs.initial_logprobs is not None
        d = on_mask(inputs, inputs.trainer_logprobs - inputs.initial_logprobs)
        estimator = cast(KLToInitialConfig, self.config).estimator
        if estimator == "k1":
            k = d.detach() * (d - d.detach()).exp()  # the value d, and the gradient d
        elif estimator == "k2":
            k = d.square() / 2
        else:
            bounded = d.clamp(min=LOWEST)
            slope = 1 - math.exp(-LOWEST)
            k = (-bounded).exp() - 1 + bounded + slope * (d - bounded)

        metrics = {"value": TokenMetric(k.detach(), inputs.loss_mask)}
        return LossOutputs(weighted(inputs, k).sum(), metrics)
