"""What the baselines share: credit from a group's rewards, and further losses beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from pydantic import PositiveFloat, model_validator

from prime_rl import (
    Algorithm,
    ConfigError,
    Group,
    PluginConfig,
    hookimpl,
    is_negligible,
    log_metric,
)
from prime_rl_grpo import centered

BONUS = "entropy_bonus"
"""The loss that ``entropy`` weighs."""
COEFFICIENT = "entropy_coefficient.json"
"""The file in a checkpoint."""


class AdaptiveEntropy(PluginConfig):
    """``entropy`` of a baseline: an entropy bonus that adapts, to keep entropy (He et al. 2025,
    Skywork-OR1, arXiv:2505.22312).

        alpha_k = c_k if H_k <= target, else 0        the weight of ``entropy_bonus`` in batch k
        c_{k+1} = c_k + delta if H_k < target, else max(c_k - delta, 0)        c_1 = 0

    H_k is the mean of -log μ over the env's sampled tokens of the batch: an unbiased estimate of
    the entropy of the policy that sampled, which the paper computes from the distributions.

    Changed from the paper: 1. that estimate; 2. c is never negative. The rule was written from
    memory of the paper and checked in a launch script of an implementation only.
    """

    target: PositiveFloat
    """Entropy per token, in nats, below which the bonus grows; 0.2 in the paper."""
    delta: PositiveFloat = 0.005
    """Change of the weight per batch."""


class BaselineConfig(PluginConfig):
    """Settings of every baseline."""

    penalties: Mapping[str, PositiveFloat] = {}
    """Further losses of the sampled tokens by name, each with its weight: ``{ entropy_bonus = 0.001
    }``. Each is averaged by itself; a rollout without credit trains in them alone."""
    entropy: AdaptiveEntropy | None = None
    """``{ target = 0.2, delta = 0.005 }``: weigh ``entropy_bonus`` so that the entropy stays above
    ``target``. None: no such weight."""

    @model_validator(mode="after")
    def _one_weight(self) -> BaselineConfig:
        if self.entropy is not None and BONUS in self.penalties:
            raise ValueError(
                "entropy and penalties.entropy_bonus both weigh entropy_bonus: remove one of them"
            )
        return self


class Baseline(Algorithm):
    """Credit that the rewards of a group give. Subclass and implement ``credit``."""

    config_class = BaselineConfig
    config: BaselineConfig

    def __init__(self, config: PluginConfig) -> None:
        super().__init__(config)
        bonus = [] if self.config.entropy is None else [BONUS]
        self.losses = (self.action_loss, *self.config.penalties, *bonus)
        self.coefficient = 0.0
        """c of ``AdaptiveEntropy``."""

    def credit(self, group: Group) -> list[float]:
        """The advantage of every token of each rollout."""
        raise NotImplementedError

    @hookimpl
    def score_group(self, group: Group) -> None:
        """Assign the credit, and route the sampled tokens to the penalties."""
        for rollout, advantage in zip(group, self.credit(group), strict=True):
            rollout.assign_advantages(advantage)
            for name, weight in self.config.penalties.items():
                rollout.assign_weights(name, weight)

    @hookimpl
    def score_batch(self, groups: Sequence[Group]) -> None:
        """Weigh the entropy of the batch's tokens, and adapt the weight of the next batch's."""
        adaptive = self.config.entropy
        rollouts = [rollout for group in groups for rollout in group]
        if adaptive is None or not rollouts:
            return
        samples = [sample for rollout in rollouts for sample in rollout.samples]
        logprobs = [sample.inference_logprobs[sample.loss_mask] for sample in samples]
        entropy = -float(np.concatenate(logprobs).mean(dtype=np.float64))
        weight = self.coefficient if entropy <= adaptive.target else 0.0
        log_metric(BONUS, weight)
        if weight:
            for rollout in rollouts:
                rollout.assign_weights(BONUS, weight)

        change = adaptive.delta if entropy < adaptive.target else -adaptive.delta
        self.coefficient = max(self.coefficient + change, 0.0)

    def save(self, directory: Path) -> None:
        """Write the exact weight of the next batch's entropy."""
        if self.config.entropy is not None:
            (directory / COEFFICIENT).write_text(json.dumps(self.coefficient), "utf-8")

    def load(self, directory: Path) -> None:
        """Restore it. Raises ``ConfigError``."""
        if self.config.entropy is None:
            return
        path = directory / COEFFICIENT
        try:
            self.coefficient = float(json.loads(path.read_text("utf-8")))
        except (OSError, ArithmeticError, RecursionError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}: not a weight that {self.name} saved: {error}") from error


def standardized(values: Sequence[float], epsilon: float) -> list[float]:
    """``values`` minus their mean, over their standard deviation plus ``epsilon``; the deviation is
    that of a population (divided by their number). 0 where they are equal but for rounding."""
    above = centered(values)
    std = (sum(value**2 for value in above) / len(above)) ** 0.5
    if is_negligible(std, values):
        return [0.0] * len(above)
    return [value / (std + epsilon) for value in above]
