"""The sampler ``standard``: every env by its ratio, its examples in turn."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from prime_rl import ConfigError, PluginConfig, RunError, SampledEnv, Sampler
from prime_rl_samplers.turns import EnvTurns

STATE = "sampler.json"
"""Its file in a checkpoint."""


class StandardConfig(PluginConfig):
    """Settings of ``standard``."""

    shuffle: bool = False
    """Take the examples of an env in a new random order on each pass. An env without end has
    none."""


class StandardSampler(Sampler):
    """Picks an env at random by its ratio (default: all equal), then that env's next example; after
    the last example, the first. The rollouts of every stretch of groups have the ratios
    (``EnvTurns``): an env with groups twice as large gives half as many groups."""

    name = "standard"
    config_class = StandardConfig

    def __init__(self, config: PluginConfig, envs: Sequence[SampledEnv], seed: int) -> None:
        super().__init__(config, envs, seed)
        self._random = random.Random(seed)
        self._next = [0] * len(envs)
        self._turns = EnvTurns([env.name for env in envs])
        self._shuffles = isinstance(config, StandardConfig) and config.shuffle
        self._passes = [0] * len(envs)
        """Complete passes of each env."""
        self._orders: dict[str, tuple[int, list[int]]] = {}
        """The pass of each env, and its order."""

    def next_example(self) -> tuple[int, int]:
        """The next group's ``(env index, example index)``. Raises ``RunError`` if every source is
        empty."""
        weights = [
            env.weight / env.rollouts_per_group() if env.is_ready() else 0.0 for env in self.envs
        ]
        if not any(weights):
            raise RunError(
                "no training env has anything to give: every source is empty, but for envs whose "
                "gate is closed or whose weight is 0 now. Add an env that samples, or fill the "
                "source."
            )

        env = self._turns.next(weights, self._random)
        example = self._next[env]
        size = self.envs[env].num_examples
        chosen = example
        if size is not None and self._shuffles:
            chosen = self._order(env, size)[example]
        self._next[env] = example + 1 if size is None else (example + 1) % size
        self._passes[env] += size is not None and self._next[env] == 0
        return env, chosen

    def _order(self, env: int, size: int) -> list[int]:
        """The examples of an env in the order of the current pass, by seed, env and pass."""
        name = self.envs[env].name
        made_for, order = self._orders.get(name, (-1, []))
        if made_for != self._passes[env]:
            order = list(range(size))
            random.Random(f"{self.seed} {name} {self._passes[env]}").shuffle(order)
            self._orders[name] = (self._passes[env], order)
        return order

    def save(self, directory: Path) -> None:
        """Write ``sampler.json``: each env's next example and credit, and the random state."""
        standing = {env.name: at for env, at in zip(self.envs, self._next, strict=True)}
        passes = {env.name: n for env, n in zip(self.envs, self._passes, strict=True)}
        state = {
            "next": standing,
            "passes": passes,
            "credits": self._turns.state,
            "random_state": self._random.getstate(),
        }
        (directory / STATE).write_text(json.dumps(state), "utf-8")

    def load(self, directory: Path) -> None:
        """Continue from what ``save`` wrote; a new env starts at its first example. Raises
        ``ConfigError``."""
        path = directory / STATE
        try:
            state = json.loads(path.read_text("utf-8"))
            version, internal, gauss = state["random_state"]
            self._random.setstate((version, tuple(internal), gauss))
            self._turns.restore(state.get("credits", {}))  # files of 0.1 have none
            standing = state["next"]
            passes = state.get("passes", {})  # files of 0.1 have none
            for index, env in enumerate(self.envs):
                self._passes[index] = int(passes.get(env.name, 0))
                self._next[index] = int(standing.get(env.name, 0)) % (env.num_examples or 2**62)
        except (
            *(OSError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError),
            ValueError,
        ) as error:
            raise ConfigError(
                f"{path}: not what the sampler 'standard' saves: {type(error).__name__}: {error}"
            ) from error
