"""VinePPO: values from branches instead of a critic (Kazemnejad et al. 2024, arXiv:2410.01679).

    V(s)  = mean reward of ``branches`` completions that the policy samples from s
    A_m   = V(s_{m+1}) - V(s_m)         for every token of segment m
    A_M   = R - V(s_M)                  for the last, R the reward of the rollout

s_m is the prompt and the reply up to segment m, so V(s_1) needs only the prompt and is a baseline
of its own: no siblings are needed, ``group_size = 1`` works.

The reward of a branch is the algorithm's own: the env scores rollouts only. ``reward`` names a
function ``reward(reply: str, task: dict) -> float``, which must agree with the env's. Each rollout
costs ``branches`` times ``segments`` completions; the metric ``vine_value`` is V(s_1).

Changed from the paper: 1. segments are equal numbers of tokens, not lines of a solution; 2. the
policy that scores may be a version newer than the one that sampled; 3. one reply per rollout: a
state after an answer of the env is refused (``vineppo_turns`` branches there). The equations
were checked in descriptions of the paper, not in the paper.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from pydantic import PositiveInt, field_validator

from prime_rl import Algorithm, ConfigError, Host, PluginConfig, Rollout, Sample, hookimpl

Reward = Callable[[str, Mapping[str, Any]], float]


def exact(reply: str, task: Mapping[str, Any]) -> float:
    """1.0 if the reply is the task's ``answer``, apart from blanks around it."""
    answer = task["answer"]
    if not isinstance(answer, str | int | float) or isinstance(answer, bool):
        raise ConfigError(
            f"vineppo: the task's 'answer' is {answer!r:.60}; the reward of the replies compares "
            "texts. Set algo.reward to a function of your own."
        )
    return float(reply.strip() == str(answer).strip())


def load_reward(import_path: str) -> Reward:
    """The function ``module:name``. Raises ``ValueError``."""
    module, _, name = import_path.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{import_path!r}: {error}. Expected a function as module:name, in an installed "
            "package or the working directory"
        ) from error

    if not callable(function):
        raise ValueError(f"{import_path!r} is {type(function).__name__}, expected a function")
    return function  # type: ignore[no-any-return]


class VinePPOConfig(PluginConfig):
    """Settings of ``vineppo``."""

    max_tokens: PositiveInt
    """Longest branch, in tokens: as long as the longest reply of a rollout."""
    branches: PositiveInt = 9
    """Completions per value."""
    segments: PositiveInt = 4
    """Parts of a reply with a value each."""
    reward: str = "prime_rl_credit.vineppo:exact"
    """The function that scores a branch, as ``module:name``: text of the reply and fields of the
    example to a number. The default compares with the example's ``answer``."""

    @field_validator("reward")
    @classmethod
    def _can_be_loaded(cls, value: str) -> str:
        load_reward(value)
        return value


class VinePPO(Algorithm):
    """Credit is what a segment adds to the value of the state."""

    name = "vineppo"
    config_class = VinePPOConfig
    config: VinePPOConfig

    async def setup(self, host: Host) -> None:
        self.host = host
        self.reward = load_reward(self.config.reward)

    @hookimpl
    async def score_rollout(self, rollout: Rollout) -> None:
        """Branch at the start of each segment. Raises ``ConfigError`` for several replies."""
        sample, sampled = _only_reply(rollout)
        starts = [part[0] for part in np.array_split(sampled, self.config.segments) if len(part)]
        values = await asyncio.gather(
            *(self.value(rollout, sample, first=int(sampled[0]), cut=int(cut)) for cut in starts)
        )
        rollout.metrics["vine_value"] = values[0]
        steps = np.diff([*values, rollout.reward])
        rollout.assign_advantages(np.repeat(steps, np.diff([*starts, sampled[-1] + 1])))

    async def value(self, rollout: Rollout, sample: Sample, first: int, cut: int) -> float:
        """V of the state before token ``cut``; the reply begins at token ``first``."""
        branches = await self.host.generate(
            sample.token_ids[:cut],
            max_tokens=max(self.config.max_tokens - (cut - first), 1),
            temperature=sample.temperature,
            n=self.config.branches,
            group_id=rollout.group_id,
            seed=rollout.episode_id,
        )
        replies = [
            self.host.decode([*sample.token_ids[first:cut], *branch.token_ids])
            for branch in branches
        ]
        return float(np.mean([self.reward(reply, rollout.task) for reply in replies]))


def _only_reply(rollout: Rollout) -> tuple[Sample, np.ndarray]:
    """The sample of a rollout, and the positions of its sampled tokens."""
    sample, *others = rollout.samples
    sampled = np.flatnonzero(sample.loss_mask)
    if others or len(sampled) != sampled[-1] - sampled[0] + 1:
        raise ConfigError(
            f"env {rollout.env!r}: algo 'vineppo' branches a single reply, and a rollout has "
            "several turns. Use vineppo_turns, gigpo or mt_grpo for such an env."
        )
    return sample, sampled
