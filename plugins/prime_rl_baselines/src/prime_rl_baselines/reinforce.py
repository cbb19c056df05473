"""REINFORCE with a running baseline (Williams 1992; Ahmadian et al. 2024, arXiv:2402.14740).

    A_i = r_i - b        b = sum(d^k r_k) / sum(d^k)        k: rollouts that came between

The mean is over the env's rollouts of earlier groups, the latest with weight 1 (0 before the first
group). It contains no reward of the group itself, so the gradient is unbiased, and no siblings are
needed: ``group_size = 1`` works. With ``decay = 1`` b is the mean of all rewards so far.

Changed from the paper: 1. recent rewards count more, because the policy gets better; 2. the loss is
the run's rl loss. The paper's equation of the moving average was not checked against its text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from pydantic import Field

from prime_rl import ConfigError, Group, PluginConfig
from prime_rl_baselines.base import Baseline, BaselineConfig

FILE = "baseline.json"
"""The file in a checkpoint."""


class ReinforceConfig(BaselineConfig):
    """Settings of ``reinforce``."""

    decay: Annotated[float, Field(ge=0, le=1)] = 0.99
    """Weight of the earlier rewards when one more is added: 0.99 averages over about 100 rollouts,
    1 over all."""


class Reinforce(Baseline):
    """Credit is the reward minus the mean reward of earlier groups."""

    name = "reinforce"
    config_class = ReinforceConfig
    config: ReinforceConfig
    order_dependent = True

    def __init__(self, config: PluginConfig) -> None:
        super().__init__(config)
        self.total = 0.0
        self.weight = 0.0

    def credit(self, group: Group) -> list[float]:
        baseline = self.total / self.weight if self.weight else 0.0
        for rollout in group:
            self.total = self.config.decay * self.total + rollout.reward
            self.weight = self.config.decay * self.weight + 1
        return [rollout.reward - baseline for rollout in group]

    def save(self, directory: Path) -> None:
        """Write the two exact sums too."""
        super().save(directory)
        (directory / FILE).write_text(json.dumps([self.total, self.weight]), "utf-8")

    def load(self, directory: Path) -> None:
        """Restore them too. Raises ``ConfigError``."""
        super().load(directory)
        path = directory / FILE
        try:
            total, weight = json.loads(path.read_text("utf-8"))
            self.total = float(total)
            self.weight = float(weight)
        except (OSError, ArithmeticError, RecursionError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}: not a baseline that reinforce saved: {error}") from error
