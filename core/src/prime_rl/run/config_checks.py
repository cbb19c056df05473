"""Checks of a config that need no plugin: environments, their labels, and sizes that must fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from prime_rl.config.orchestrator import SourceConfig
from prime_rl.config.run import RunConfig
from prime_rl.errors import ConfigError

RESERVED_LABELS = ("agg", "all", "effective")
"""Labels that metrics use for all envs together."""


def check_envs(config: RunConfig) -> None:
    """Environments exist, have distinct labels and group sizes that divide the batch. Raises
    ``ConfigError``."""
    orchestrator = config.orchestrator
    if not orchestrator.train.env:
        raise ConfigError(
            "orchestrator.train.env: the run has no training environment. Add a table "
            "[[orchestrator.train.env]] with an id."
        )
    for label, envs in (("train", orchestrator.train.env), ("eval", orchestrator.eval.env)):
        _check_labels(label, envs)
    for env in orchestrator.train.env:
        size = env.group_size or orchestrator.group_size
        if orchestrator.batch_size % size:
            raise ConfigError(
                f"env {env.label!r}: group_size {size} does not divide orchestrator.batch_size "
                f"{orchestrator.batch_size}. Make the batch a multiple of every group size."
            )


def _check_labels(where: str, envs: Sequence[SourceConfig]) -> None:
    counts = Counter(env.label for env in envs)
    for label, count in counts.items():
        if count > 1:
            raise ConfigError(
                f"orchestrator.{where}.env: {count} envs are called {label!r}. Give each its own "
                "name."
            )
        if label in RESERVED_LABELS:
            raise ConfigError(f"orchestrator.{where}.env: the name {label!r} is taken by metrics")


def check_sizes(config: RunConfig) -> None:
    """A row holds a sample, and the rollouts in flight hold a group. Raises ``ConfigError``."""
    row, inflight = config.trainer.micro_batch_tokens, config.orchestrator.max_inflight_rollouts
    if row is not None and row < config.seq_len:
        raise ConfigError(
            f"trainer.micro_batch_tokens: a row of {row} tokens cannot hold a sample of seq_len = "
            f"{config.seq_len}. Raise it to seq_len or more, or leave it out."
        )
    envs = config.orchestrator.train.env
    largest = max(env.group_size or config.orchestrator.group_size for env in envs)
    if inflight is not None and inflight < largest:
        raise ConfigError(
            f"orchestrator.max_inflight_rollouts: {inflight} cannot hold one group of {largest}. "
            "Raise it, or lower group_size."
        )
