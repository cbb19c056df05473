"""VinePPO with several turns: values from branches that go on in the environment (Kazemnejad et al.
2024, arXiv:2410.01679, whose states are steps of one reply).

    V(s_k)  = mean reward of ``branches`` episodes that go on from s_k
    A_k     = V(s_{k+1}) - V(s_k)      for every token of reply k
    A_K     = R - V(s_K)               for the last reply, R the reward of the rollout

s_k is everything before reply k: the prompt, earlier replies, and what tools and users answered.
Each branch is an episode of the env itself, with its tools and its reward (``Host.rollout``), so no
siblings are needed and ``group_size = 1`` works. A rollout of K replies costs K times ``branches``
episodes; the metric ``vine_value`` is V(s_1).

What it estimates: the mean of A_k is Q(s_k, reply k) - V(s_k), so the expected update is the
gradient of the expected reward if the policy that branches is the one that sampled.

Changed from the paper: 1. states are replies, not parts of one; 2. the policy that branches may be
a version newer than the one that sampled; 3. a branch that fails is left out. If all branches of a
state fail, it has the value of the state before, or of the next one if it is the first: its step
gets no credit.
"""

from __future__ import annotations

import asyncio

import numpy as np
from pydantic import PositiveInt

from prime_rl import (
    Algorithm,
    BranchFailed,
    Host,
    PluginConfig,
    Prefix,
    Rollout,
    hookimpl,
    log_metric,
)
from prime_rl_credit.replies import assign, replies_of


class TurnVinePPOConfig(PluginConfig):
    """Settings of ``vineppo_turns``."""

    branches: PositiveInt = 4
    """Episodes per value."""


class TurnVinePPO(Algorithm):
    """Credit is what a reply adds to the value of the conversation."""

    name = "vineppo_turns"
    config_class = TurnVinePPOConfig
    config: TurnVinePPOConfig

    async def setup(self, host: Host) -> None:
        self.host = host

    @hookimpl
    async def score_rollout(self, rollout: Rollout) -> None:
        """Branch at the start of each reply. Raises ``ConfigError`` for an env without branches."""
        replies = replies_of(rollout)
        starts = [rollout.prefix(reply.start, reply.sample) for reply in replies]
        known = await asyncio.gather(*(self.value(start) for start in starts))
        values = filled(known, rollout.reward)
        rollout.metrics["vine_value"] = values[0]
        assign(rollout, replies, np.diff([*values, rollout.reward]).tolist())

    async def value(self, start: Prefix) -> float | None:
        """Mean reward from here. None: every branch has failed."""
        numbers = range(self.config.branches)
        rewards = await asyncio.gather(*(self.reward(start, number) for number in numbers))
        ended = [reward for reward in rewards if reward is not None]
        log_metric("failed_branches", 1 - len(ended) / len(rewards))
        return float(np.mean(ended)) if ended else None

    async def reward(self, start: Prefix, number: int) -> float | None:
        """The reward of one branch. None: it has failed."""
        try:
            return (await self.host.rollout(start, number=number)).reward
        except BranchFailed as failure:
            self.host.logger.warning("a branch failed and is left out: %s", failure)
            return None


def filled(known: list[float | None], reward: float) -> list[float]:
    """Every state's value; an unknown one is that of the state before, or of the first one that is
    known, or the reward."""
    first = next((value for value in known if value is not None), reward)
    values = []
    for value in known:
        first = first if value is None else value
        values.append(first)
    return values
