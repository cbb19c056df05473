"""``prime_rl.testing.run``: a real run of a few steps, in a plugin's own test.

Everything is what ``prime-rl run`` starts: an orchestrator, a trainer, the embedded engine. Only
the sizes are small, so that it takes seconds.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import prime_rl
from prime_rl.errors import ConfigError
from prime_rl.rundir.scratch import Scratch
from prime_rl_app.config import merge, read_toml, set_at

MODEL: dict[str, Any] = {
    "model": {"name": "tiny-reverse"},
    "orchestrator": {"renderer": {"name": "qwen3", "enable_thinking": False}},
}
"""Where the config names no model: a policy that is made here, in seconds and once, and its
renderer."""

ENVIRONMENT: dict[str, Any] = {"orchestrator": {"train": {"env": [{"id": "reverse-text"}]}}}
"""Where it names no environment."""

SIZES: dict[str, Any] = {
    "seq_len": 64,
    "orchestrator": {"group_size": 4, "env_workers": 0},
    "trainer": {"optim": {"lr": 7e-4}},
    "recovery": {"max_restarts": 0},
}
"""Below the config."""

UNTIMELY = ("orchestrator.eval", "trainer.scheduler", "ckpt", "stop", "monitors", "view", "resume")
"""Tables that a run of a few steps has no use for: warm-ups, evaluations, checkpoints."""

_scratches: list[Scratch] = []
"""The folders of this process's runs, which outlive the call."""


def short_run(
    config: str | Path | Mapping[str, Any] | None = None,
    steps: int = 2,
    *,
    folder: Path | None = None,
    **overrides: Any,
) -> Any:
    """See ``prime_rl.testing.run``."""
    if steps < 1:
        raise ConfigError(f"steps: expected at least 1, got {steps}")
    if folder is None:
        _scratches.append(Scratch("prime-rl-run-"))
        folder = _scratches[-1].path
    return prime_rl.train(short_config(config, steps, folder), **overrides)


def short_config(
    config: str | Path | Mapping[str, Any] | None, steps: int, folder: Path
) -> dict[str, Any]:
    """The tables of the run. Raises ``ConfigError`` for a file that cannot be read."""
    table: dict[str, Any] = {}
    if isinstance(config, Mapping):
        table = copy.deepcopy(dict(config))
    elif config is not None:
        table = dict(read_toml(Path(config)))

    for name in UNTIMELY:
        _drop(table, name.split("."))
    below = SIZES
    if not table.get("model", {}).get("name"):
        below = merge(below, MODEL)
    if not table.get("orchestrator", {}).get("train", {}).get("env"):
        below = merge(below, ENVIRONMENT)
    table = copy.deepcopy(merge(below, table))

    orchestrator = table["orchestrator"]
    group_size = orchestrator["group_size"]
    sizes = [env.get("group_size") or group_size for env in orchestrator["train"]["env"]]
    # Two groups of the largest env, or more: the groups of each env divide the batch.
    whole = math.lcm(*sizes)
    orchestrator["batch_size"] = whole * math.ceil(2 * max(sizes) / whole)
    for key, value in (("max_steps", steps), ("output_dir", str(folder))):
        set_at(table, [key], value)
    return table


def _drop(table: dict[str, Any], parts: list[str]) -> None:
    *path, last = parts
    inner: Any = table
    for part in path:
        inner = inner.get(part) if isinstance(inner, dict) else None
    if isinstance(inner, dict):
        inner.pop(last, None)
