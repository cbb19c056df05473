"""The sampler ``standard``: every env by its ratio, its examples in turn."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from prime_rl import ConfigError, PluginConfig, RunError, SampledEnv, Sampler

STATE = "sampler.json"
"""Its file in a checkpoint."""


class StandardSampler(Sampler):
    """Picks an env by its ratio (default: all equal), then that env's next example; after the last
    example, the first."""

    name = "standard"

    def __init__(self, config: PluginConfig, envs: Sequence[SampledEnv], seed: int) -> None:
        super().__init__(config, envs, seed)
        self._random = random.Random(seed)
        self._next = [0] * len(envs)
        self._weights = [1.0 if env.ratio is None else env.ratio for env in envs]

    def next_example(self) -> tuple[int, int]:
        """The next group's ``(env index, example index)``. Raises ``RunError`` if every source is
        empty."""
        weights = [w * env.is_ready() for w, env in zip(self._weights, self.envs, strict=True)]
        if not any(weights):
            raise RunError(
                "no training env has anything to give: every source is empty. Add an env that "
                "samples, or fill the source."
            )

        (env,) = self._random.choices(range(len(self.envs)), weights)
        example = self._next[env]
        size = self.envs[env].num_examples
        self._next[env] = example + 1 if size is None else (example + 1) % size
        return env, example

    def save(self, directory: Path) -> None:
        """Write ``sampler.json``: the next example of every env, and the random state."""
        standing = {env.name: at for env, at in zip(self.envs, self._next, strict=True)}
        state = {"next": standing, "random_state": self._random.getstate()}
        (directory / STATE).write_text(json.dumps(state))

    def load(self, directory: Path) -> None:
        """Continue from what ``save`` wrote; a new env starts at its first example. Raises
        ``ConfigError``."""
        path = directory / STATE
        try:
            state = json.loads(path.read_text())
            version, internal, gauss = state["random_state"]
            self._random.setstate((version, tuple(internal), gauss))
            standing = state["next"]
            for index, env in enumerate(self.envs):
                self._next[index] = int(standing.get(env.name, 0)) % (env.num_examples or 2**62)
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{path}: not what the sampler 'standard' saves: {type(error).__name__}: {error}"
            ) from error
