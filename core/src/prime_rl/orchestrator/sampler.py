"""Which example is sampled next: environments by their share, examples in order."""

from __future__ import annotations

import random
from collections.abc import Sequence

from prime_rl.plugins.base import PluginConfig, SampledEnv, Sampler
from prime_rl.plugins.errors import RunError


class StandardSampler(Sampler):
    """Picks an env by its ratio (all alike if none is set), then that env's next example, starting
    over at the end."""

    name = "standard"

    def __init__(self, config: PluginConfig, envs: Sequence[SampledEnv], seed: int) -> None:
        super().__init__(config, envs, seed)
        self._random = random.Random(seed)
        self._next = [0] * len(envs)
        self._weights = [1.0 if env.ratio is None else env.ratio for env in envs]

    def next_example(self) -> tuple[int, int]:
        """The next group's ``(env index, example index)``. Raises ``RunError`` if no env has
        anything to give."""
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
