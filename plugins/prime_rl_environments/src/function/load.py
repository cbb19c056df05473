"""From the args of an env to its reward functions. Imports no verifiers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from function.rewards import RewardFunction, reward_functions
from function.travel import unpacked
from prime_rl import ConfigError, import_function


@cache
def load_functions(paths: tuple[str, ...], file: str | None) -> tuple[RewardFunction, ...]:
    """The reward functions of an env: by import paths, or from the file that a script has written.
    Raises ``ConfigError``."""
    if (file is None) == (not paths):
        raise ConfigError(
            "reward: set the import path of a reward function, such as reward = 'my_rewards.exact'"
        )
    functions = unpacked(Path(file)) if file is not None else [function_at(each) for each in paths]
    return tuple(reward_functions(functions))


def function_at(path: str) -> Any:
    """The function at an import path. Raises ``ConfigError``."""
    try:
        return import_function(path)
    except ConfigError as error:
        raise ConfigError(f"reward: {error}") from error


def as_paths(reward: str | Sequence[str] | None) -> tuple[str, ...]:
    if reward is None:
        return ()
    return (reward,) if isinstance(reward, str) else tuple(reward)
