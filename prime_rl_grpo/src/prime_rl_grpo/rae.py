"""RAE: role-conditioned advantage estimation, a running baseline for each agent (SPIRAL,
arXiv:2506.24119).

    A   = r - b[agent]                       b starts at 0
    b[agent] <- d b[agent] + (1 - d) r       d = decay

one rollout after the other, in the order of the group. It needs no siblings, so it learns with
``group_size = 1``. In a zero-sum game, where the mean over both agents carries no information, each
agent is compared with its own returns.

Changed from the paper: 1. the paper updates the baseline first and subtracts the new one, so its
advantage is d times ours; our baseline does not contain the rollout's own reward; 2. the paper
keeps a baseline per game and role, we keep one per env and agent.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Annotated

from pydantic import Field

from prime_rl import Algorithm, ConfigError, Group, PluginConfig, hookimpl

BASELINES = "baselines.json"
"""The file in a checkpoint."""


class RAEConfig(PluginConfig):
    """Settings of ``rae``."""

    decay: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Weight of an agent's old baseline when a reward is added: 0.95 averages over about 20
    rollouts."""


class RAE(Algorithm):
    """Credit is the reward minus the running mean of its agent."""

    name = "rae"
    config_class = RAEConfig
    config: RAEConfig
    order_dependent = True
    needs_siblings = False

    def __init__(self, config: PluginConfig) -> None:
        super().__init__(config)
        self.baselines: defaultdict[str, float] = defaultdict(float)

    @hookimpl
    def score_group(self, group: Group) -> None:
        """Assign every rollout its reward minus its agent's baseline, then update the baseline."""
        decay = self.config.decay
        for rollout in group:
            baseline = self.baselines[rollout.agent]
            rollout.assign_advantages(rollout.reward - baseline)
            self.baselines[rollout.agent] = decay * baseline + (1 - decay) * rollout.reward

    def save(self, directory: Path) -> None:
        """Write the exact baselines."""
        (directory / BASELINES).write_text(json.dumps(self.baselines), "utf-8")

    def load(self, directory: Path) -> None:
        """Restore saved baselines. Raises ``ConfigError``."""
        path = directory / BASELINES
        try:
            table = dict(json.loads(path.read_text("utf-8")))
            saved = {str(agent): float(baseline) for agent, baseline in table.items()}
        except (OSError, OverflowError, RecursionError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}: not baselines that rae saved: {error}") from error
        self.baselines = defaultdict(float, saved)
