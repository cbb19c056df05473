"""A sampler of core's own tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from prime_rl import PluginConfig, RunError, SampledEnv, Sampler


class RotatingSampler(Sampler):
    """The envs that are ready in turn, and each one's examples in turn."""

    name = "rotating"

    def __init__(self, config: PluginConfig, envs: Sequence[SampledEnv], seed: int) -> None:
        super().__init__(config, envs, seed)
        self._turn = 0
        self._next = [0] * len(envs)

    def next_example(self) -> tuple[int, int]:
        ready = [number for number, env in enumerate(self.envs) if env.is_ready()]
        if not ready:
            raise RunError("no training env has anything to give")
        env = ready[self._turn % len(ready)]
        self._turn += 1
        example = self._next[env]
        self._next[env] = (example + 1) % (self.envs[env].num_examples or 2**62)
        return env, example

    def save(self, directory: Path) -> None:
        (directory / "rotating.json").write_text(json.dumps([self._turn, self._next]))

    def load(self, directory: Path) -> None:
        self._turn, self._next = json.loads((directory / "rotating.json").read_text())
