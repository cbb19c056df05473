"""Held-out rollouts go with the batches that are due, and with the last one."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from prime_rl import Algorithm, ConfigError, PluginConfig, Rollout, hookimpl
from prime_rl.orchestrator.measure import Measurement
from prime_rl.orchestrator.sources import RolloutRequest
from prime_rl.registry.components import installed_losses
from prime_rl.registry.manager import Hooks, scope
from prime_rl.rollout import Batch
from prime_rl.testing import make_rollout


class Plain(Algorithm):
    name = "plain"

    @hookimpl
    def score_rollout(self, rollout: Rollout) -> None:
        rollout.assign_advantages(rollout.reward)


class Env:
    """Examples of which each gives one rollout, with its number as reward: two tokens of prompt,
    and as many as ``completions`` says."""

    def __init__(self, name: str, *completions: int, num_examples: int | None = -1) -> None:
        self.name = name
        self.algorithm = Plain(PluginConfig())
        self.hooks = scope(name, Hooks(), [self.algorithm])
        self.requests: list[RolloutRequest] = []

        async def produce(request: RolloutRequest) -> Sequence[Rollout]:
            self.requests.append(request)
            number = request.example_id
            return [make_rollout(float(number), env=name, completion=completions[number])]

        count = len(completions) if num_examples == -1 else num_examples
        self.source = SimpleNamespace(num_examples=count, produce=produce)


def measurement(seq_len: int, envs: dict[Any, int]) -> Measurement:
    config = SimpleNamespace(max_steps=5, seq_len=seq_len, seed=7)
    run: Any = SimpleNamespace(config=config, losses=installed_losses())
    return Measurement(run, envs)


async def measured(part: Measurement, step: int) -> list[tuple[str, float]]:
    batch = Batch(step)
    await part.batch_taken(batch)
    return [(rollout.env, rollout.reward) for rollout in batch.measured]


async def test_every_example_is_measured_at_every_so_many_steps_and_at_the_last() -> None:
    often, seldom = Env("often", 1, 1), Env("seldom", 1)
    part = measurement(8, {often: 2, seldom: 4})
    await part.setup()
    both = [("often", 0.0), ("often", 1.0)]
    assert [await measured(part, step) for step in (1, 2, 3, 4, 5)] == [
        [],
        both,
        [],
        [*both, ("seldom", 0.0)],
        [*both, ("seldom", 0.0)],
    ]
    assert [(each.example_id, each.seed) for each in often.requests] == [(0, 7), (1, 7)]


async def test_rollouts_are_cut_and_those_without_a_sampled_token_left_out() -> None:
    """Of a prompt of two tokens and five more, seq_len 4 leaves two; seq_len 2 nothing."""
    env = Env("e", 5)
    part = measurement(4, {env: 1})
    await part.setup()
    batch = Batch(1)
    await part.batch_taken(batch)
    (rollout,) = batch.measured
    assert (rollout.num_tokens, rollout.num_trainable_tokens, rollout.frozen) == (4, 2, True)
    with pytest.raises(ConfigError, match="no token of its 1 examples is among the first 2"):
        await measurement(2, {env: 1}).setup()


async def test_an_env_without_an_end_cannot_be_measured() -> None:
    with pytest.raises(ConfigError, match=r"env 'e': measure_every .* the env has no end"):
        await measurement(8, {Env("e", num_examples=None): 1}).setup()
