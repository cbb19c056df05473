"""Core's own plugin: sampler ``standard``, monitor ``file``, launcher ``local``, view ``lines``."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from prime_rl.errors import ConfigError, RunError
from prime_rl.plugins.base import PluginConfig
from prime_rl.plugins.hookspecs import hookimpl
from prime_rl.plugins.launchers import Launcher
from prime_rl.plugins.monitor import Monitor
from prime_rl.plugins.sampler import SampledEnv, Sampler
from prime_rl.plugins.view import RunView
from prime_rl.run.children import LocalLauncher

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


class FileMonitor(Monitor):
    """Appends to ``<run>/metrics.jsonl``; a line is written whole or not at all."""

    name = "file"
    in_background = False  # views read the file during the run

    def __init__(self, config: PluginConfig, run_dir: Path) -> None:
        super().__init__(config, run_dir)
        self._file = (run_dir / "metrics.jsonl").open("ab", buffering=0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one line; a value that is not finite becomes null, because JSON has no name for
        it. Raises ``OSError`` if the disk does not take the line."""
        finite = {k: v if math.isfinite(v) else None for k, v in metrics.items()}
        line = f"{json.dumps({'step': step, 'time': time.time(), **finite})}\n".encode()
        written = self._file.write(line)
        if written < len(line):  # torn lines would break every reader of the file
            os.truncate(self._file.fileno(), os.fstat(self._file.fileno()).st_size - written)
            raise OSError(errno.ENOSPC, "no room for a line", self._file.name)

    def close(self) -> None:
        self._file.close()


@hookimpl
def register_samplers() -> list[type[Sampler]]:
    return [StandardSampler]


@hookimpl
def register_monitors() -> list[type[Monitor]]:
    return [FileMonitor]


@hookimpl
def register_launchers() -> list[type[Launcher]]:
    return [LocalLauncher]


@hookimpl
def register_views() -> list[type[RunView]]:
    return [RunView]
