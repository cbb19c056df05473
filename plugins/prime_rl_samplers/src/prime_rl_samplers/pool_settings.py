"""Settings of ``difficulty_pools``, and their requirements on the envs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from prime_rl import ConfigError, PluginConfig, SampledEnv
from prime_rl_samplers.pool_files import row_of
from prime_rl_samplers.rotation import POOLS

Fraction = Annotated[float, Field(ge=0, le=1)]


class DifficultyPoolsConfig(PluginConfig):
    """Settings of ``difficulty_pools``: the table ``[orchestrator.sampler]``."""

    seed: int | None = None
    """Seed for the choice of envs and of the examples to sample again. None: the run's seed."""
    easy_threshold: float | None = None
    """An example is retired as easy if its group's mean reward is at or above this. None: never."""
    hard_threshold: float | None = None
    """An example is retired as hard if its group's mean reward is at or below this. None: never."""
    easy_fraction: Fraction = 0.0
    """Share of the easy pool that is sampled again after a resume or a ``load_from``."""
    hard_fraction: Fraction = 0.0
    """Share of the hard pool that is sampled again after a resume or a ``load_from``."""
    online_difficulty_filtering: bool = False
    """Reject groups whose mean reward is 0.0 or 1.0, but for rounding."""
    hash_keys: Annotated[tuple[str, ...], Field(min_length=1)] = ("env_name", "prompt")
    """Keys that identify an example in the files: ``env_name``, and fields of its task."""
    load_from: Path | None = None
    """Start with the pools of another run: a folder that this sampler saved
    (``checkpoints/step_N/orchestrator``), relative to the working directory."""

    @model_validator(mode="after")
    def _fits_together(self) -> DifficultyPoolsConfig:
        easy = self.easy_threshold
        hard = self.hard_threshold
        if easy is not None and hard is not None and easy <= hard:
            raise ValueError(
                f"easy_threshold must exceed hard_threshold, got {easy} and {hard}: an example "
                "could be both easy and hard"
            )

        for pool in POOLS:
            unread = getattr(self, f"{pool}_threshold") is None and self.load_from is None
            if unread and getattr(self, f"{pool}_fraction"):
                raise ValueError(
                    f"{pool}_fraction returns examples from the {pool} pool, which is always "
                    f"empty: set {pool}_threshold or load_from"
                )

        return self

    @property
    def uses_pools(self) -> bool:
        """Whether examples can be retired."""
        settings = (self.easy_threshold, self.hard_threshold, self.load_from)
        return any(setting is not None for setting in settings)


def check_envs(config: DifficultyPoolsConfig, envs: Sequence[SampledEnv]) -> None:
    """Raises ``ConfigError`` if pools cannot work with these envs."""
    endless = [env.name for env in envs if env.num_examples is None]
    if len(endless) == len(envs):
        raise ConfigError(
            "orchestrator.sampler: difficulty pools retire examples, but every env has unlimited "
            f"examples ({', '.join(map(repr, endless))}) and shows each one once. Remove "
            "easy_threshold, hard_threshold and load_from; online_difficulty_filtering works "
            "without them."
        )

    if endless and all(env.ratio is None for env in envs):
        raise ConfigError(
            f"orchestrator.sampler: env {endless[0]!r} has unlimited examples, but without ratios "
            "an env's share is its number of remaining examples. Set a ratio on each "
            "[[orchestrator.train.env]]."
        )

    for env in envs:
        if env.num_examples:
            row_of(env, 0, config.hash_keys)
