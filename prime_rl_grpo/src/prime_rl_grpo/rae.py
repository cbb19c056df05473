"""RAE: role-conditioned advantage estimation, a running baseline for each agent (SPIRAL,
arXiv:2506.24119).

    A   = r - b[agent]                       b starts at 0
    b[agent] <- d b[agent] + (1 - d) r       d = decay

one rollout after the other, in the order of the group. No siblings are needed, so it learns with
``group_size = 1``; and in a zero-sum game, where the mean over both seats says nothing, each seat
is measured by its own returns.

Changed from the paper: 1. the paper updates the baseline first and subtracts the new one, so its
advantage is d times ours; with the baseline from before, a rollout is not measured by itself;
2. the paper keeps a baseline for each game and role, we for each env and agent.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Annotated

from pydantic import Field

from prime_rl import Algorithm, ConfigError, Group, PluginConfig, hookimpl

BASELINES = "baselines.json"
"""Its file in a checkpoint."""


class RAEConfig(PluginConfig):
    """Settings of ``rae``."""

    decay: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """How much of an agent's baseline is left after one more of its rewards: 0.95 averages over
    about 20 rollouts."""


class RAE(Algorithm):
    """Credit is the reward above the running mean of the agent that earned it."""

    name = "rae"
    config_class = RAEConfig
    config: RAEConfig
    order_dependent = True

    def __init__(self, config: PluginConfig) -> None:
        super().__init__(config)
        self.baselines: defaultdict[str, float] = defaultdict(float)

    @hookimpl
    def score_group(self, group: Group) -> None:
        """Assign every rollout its reward minus its agent's baseline; then move the baseline."""
        decay = self.config.decay
        for rollout in group:
            baseline = self.baselines[rollout.agent]
            rollout.assign_advantages(rollout.reward - baseline)
            self.baselines[rollout.agent] = decay * baseline + (1 - decay) * rollout.reward

    def save(self, directory: Path) -> None:
        """Write the baselines, exactly."""
        (directory / BASELINES).write_text(json.dumps(self.baselines))

    def load(self, directory: Path) -> None:
        """Go on with saved baselines. Raises ``ConfigError``."""
        path = directory / BASELINES
        try:
            saved = {str(agent): float(b) for agent, b in json.loads(path.read_text()).items()}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}: not baselines that rae saved: {error}") from error
        self.baselines = defaultdict(float, saved)
