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

With a ``target``, a coefficient c, 1 at the start, multiplies w; after each batch, of mean k::

    e = clip(k / target - 1, -0.2, 0.2)      c <- c (1 + 0.1 e)

(Ziegler et al. 2019, arXiv:1909.08593, section 2.2.) Checkpoints keep c.

Differences from the sources: 1. no importance ratio; 2. below d = -20, where exp(-d) would soon be
infinite, k3 goes on as the straight line with the value and the gradient that it has there.

Shapes: T = tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, cast

from pydantic import PositiveFloat

from prime_rl import ConfigError, Loss, LossInputs, LossOutputs, PluginConfig, TokenMetric
from prime_rl_clip_losses.surrogate import on_mask, weighted

GAIN = 0.1
MOST_ERROR = 0.2
"""The controller of the KL clips its relative error to this size."""
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
    target: PositiveFloat | None = None
    """The mean estimate per token that a coefficient of the loss holds. None: the weight stays."""


class KLToInitialLoss(Loss):
    """An estimate of the KL to the policy's first weights."""

    name = "kl_to_initial"
    config_class = KLToInitialConfig
    scope = "token"
    reads = ("initial_logprobs",)
    compares_with_sampler = False

    def __init__(self, config: PluginConfig) -> None:
        super().__init__(config)
        self.settings = cast(KLToInitialConfig, config)
        self.coefficient = 1.0

    def batch_trained(self, step: int, metrics: Mapping[str, float]) -> None:
        """Move the coefficient towards the target. A batch without members leaves it."""
        estimate = metrics.get(f"{self.name}/value")
        if self.settings.target is None or estimate is None or not math.isfinite(estimate):
            return
        error = min(max(estimate / self.settings.target - 1, -MOST_ERROR), MOST_ERROR)
        self.coefficient *= 1 + GAIN * error

    def save(self, directory: Path) -> None:
        """The coefficient, if it moves."""
        if self.settings.target is not None:
            path = directory / "coefficient.json"
            path.write_text(json.dumps({"coefficient": self.coefficient}), "utf-8")

    def load(self, directory: Path) -> None:
        """Raises ``ConfigError`` for a file that has no coefficient."""
        path = directory / "coefficient.json"
        try:
            self.coefficient = float(json.loads(path.read_text("utf-8"))["coefficient"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{path} has no coefficient of kl_to_initial: {error}") from error

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Metrics: the estimate, and the coefficient where it moves."""
        import torch

        assert inputs.initial_logprobs is not None
        d = on_mask(inputs, inputs.trainer_logprobs - inputs.initial_logprobs)
        estimator = self.settings.estimator
        if estimator == "k1":
            k = d.detach() * (d - d.detach()).exp()  # the value d, and the gradient d
        elif estimator == "k2":
            k = d.square() / 2
        else:
            bounded = d.clamp(min=LOWEST)
            # Off the line, 0 with the gradient 0: next to this slope, float32 loses any other.
            below = torch.where(d < LOWEST, d - LOWEST, 0.0)
            slope = 1 - math.exp(-LOWEST)
            k = torch.expm1(-bounded) + bounded + slope * below

        metrics = {"value": TokenMetric(k.detach(), inputs.loss_mask)}
        if self.settings.target is not None:
            coefficient = torch.full_like(k, self.coefficient)
            metrics["coefficient"] = TokenMetric(coefficient.detach(), inputs.loss_mask)
        return LossOutputs(self.coefficient * weighted(inputs, k).sum(), metrics)
