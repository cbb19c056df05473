"""Branches that act: an env's episode goes on from the middle of a rollout, with its tool, its
reward and the protocol of engines. The values of a small policy are compared with exact ones."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from renderers import Qwen3RendererConfig
from waiting import LIMIT

from prime_rl import BranchFailed, Rollout, StreamError
from prime_rl.config.contract import SamplingConfig
from prime_rl.env.environment import Environment
from prime_rl.env.episode import EnvSettings, ModelEndpoint, RolloutResult
from prime_rl.env.traces import build_rollout
from prime_rl.orchestrator.branches import Branches
from prime_rl.orchestrator.sources import train_sampling
from prime_rl_environments.tasks import book_entry
from prime_rl_environments.tiny.tokenizer import build_tokenizer
from prime_rl_environments.words import position_score

TOKENIZER = build_tokenizer()
KEY = re.compile(r"<\|im_start\|>user\n(\w+)<\|im_end\|>")
SAMPLING = SamplingConfig(max_completion_tokens=64)


def call(key: str) -> str:
    return f'<tool_call>\n{{"name": "get", "arguments": {{"k": "{key}"}}}}\n</tool_call>'


def choices(prompt: str) -> list[str]:
    """What the policy may say, each with the same chance: the key's letters, or a call; after it,
    the answer, the answer without its last letter, or nothing right."""
    (key,) = KEY.findall(prompt)
    answer = book_entry(key)[::-1]
    if "<tool_response>" in prompt:
        return [answer, answer[:-1] + "?", "???"]
    return [call(key), call(key), key[::-1]]


class Policy:
    """Says each of its choices in turn after each prompt: N calls are an exact enumeration."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()

    def __call__(self, prompt: str) -> str:
        every = choices(prompt)
        self.asked[prompt] += 1
        return every[(self.asked[prompt] - 1) % len(every)]


def exact_values(key: str) -> tuple[float, float]:
    """The expected reward at the start, and after the tool's answer."""
    answer = book_entry(key)[::-1]
    after = [position_score(reply, answer) for reply in (answer, answer[:-1] + "?", "???")]
    value = sum(after) / 3
    return (2 * value + position_score(key[::-1], answer)) / 3, value


class OneEngine:
    """A router of one engine, as core's without its pool."""

    def __init__(self, url: str) -> None:
        self.endpoint = ModelEndpoint("scripted", url)

    async def run(
        self, key: object, episode: Callable[[ModelEndpoint], Awaitable[list[RolloutResult]]]
    ) -> list[RolloutResult]:
        return await episode(self.endpoint)


class World:
    """A running env, its branches, and rollouts of it."""

    def __init__(self, env: Environment, branches: Branches, engine: Any) -> None:
        self.env = env
        self.branches = branches
        self.engine = engine

    async def play(self, script: Callable[[str], str]) -> Rollout:
        self.engine.script = script
        (result,) = await self.env.run(
            self.env.examples[0],
            model=ModelEndpoint("scripted", self.engine.base_url),
            sampling=train_sampling(SAMPLING),
        )
        assert result.ok, result.error
        rollout = build_rollout(
            result, env="e", example_id=0, group_id=3, policy_version=0, temperature=1.0
        )
        rollout.task = result.task_fields
        return rollout

    async def branch(self, prefix: Any, number: int = 0) -> Rollout:
        return await self.branches.rollout(
            prefix, self.env, sampling=SAMPLING, seed=number, seq_len=4096
        )

    async def reward(self, sample: Any, rollout: Rollout) -> float:
        return await self.branches.reward(sample, rollout, self.env, sampling=SAMPLING)


@pytest.fixture
async def world(engine: Any, tokenizer_path: Path) -> AsyncIterator[World]:
    async with running("word-lookup", engine, tokenizer_path) as started:
        yield started


@asynccontextmanager
async def running(
    env_id: str, engine: Any, tokenizer_path: Path, **fields: Any
) -> AsyncIterator[World]:
    settings = EnvSettings(
        default_harness={"id": "in-process"},
        id=env_id,
        renderer=Qwen3RendererConfig(enable_thinking=False),
        tokenizer_path=tokenizer_path,
        timeout=LIMIT,
        **fields,
    )
    branches = Branches(
        OneEngine(engine.base_url),  # type: ignore[arg-type]
        stop_token_ids=lambda: [TOKENIZER.eos_token_id],
        version=lambda: 5,
        most_inflight=8,
    )
    async with Environment(settings) as env:
        yield World(env, branches, engine)
    await branches.close()


def said(rollout: Rollout) -> list[str]:
    """The replies that train, as text."""
    return [
        TOKENIZER.decode(s.token_ids[s.loss_mask]).removesuffix("<|im_end|>")
        for s in rollout.samples
    ]


def replies(rollout: Rollout) -> list[Any]:
    return [turn for turn in rollout.turns if turn.role == "assistant"]


async def test_values_at_the_turns_of_a_tool_env_are_exact(world: World) -> None:
    """9 branches from the start, 3 from after the tool: each is every future once."""
    rollout = await world.play(lambda prompt: choices(prompt)[0])
    first, second = replies(rollout)
    policy = Policy()
    world.engine.script = policy
    start = [(await world.branch(rollout.before(first), n)).reward for n in range(9)]
    assert len(policy.asked) == 2
    world.engine.script = Policy()
    after = [(await world.branch(rollout.before(second), n)).reward for n in range(3)]
    values = exact_values(str(rollout.prompt))
    assert (np.mean(start), np.mean(after)) == pytest.approx(values)
    assert values[0] < values[1] < 1.0 == rollout.reward


async def test_the_record_is_played_again_and_only_what_is_new_trains(world: World) -> None:
    rollout = await world.play(lambda prompt: choices(prompt)[0])
    _, second = replies(rollout)
    before = rollout.samples[0].token_ids.tolist()
    world.engine.script = lambda prompt: choices(prompt)[2]
    branch = await world.branch(rollout.before(second))
    assert said(branch) == ["???"]  # the call came from the record, and the tool ran again
    (sample,) = branch.samples
    start = int(np.flatnonzero(sample.loss_mask)[0])
    assert sample.token_ids[: second.start].tolist() == before[: second.start]
    assert sample.is_repeat is not None
    assert sample.is_repeat.tolist() == [place < second.start for place in range(len(sample))]
    assert not sample.loss_mask[:start].any() and not sample.inference_logprobs[:start].any()
    assert (branch.policy_version, branch.group_id, branch.reward) == (5, 3, 0.0)
    assert branch.metrics["tool_calls"] == 1.0


async def test_a_branch_may_begin_inside_a_reply(world: World) -> None:
    """Two letters of the answer are recorded, and the engine says the others."""
    rollout = await world.play(lambda prompt: choices(prompt)[0])
    answer = book_entry(str(rollout.prompt))[::-1]
    _, second = replies(rollout)
    sampled = np.flatnonzero(rollout.samples[0].loss_mask)
    begin = next(int(place) for place in sampled if place >= second.start)
    prefix = rollout.prefix(begin + 2)
    recorded = TOKENIZER.decode(rollout.samples[0].token_ids[begin : begin + 2])
    assert answer.startswith(recorded)
    world.engine.script = lambda prompt: "!" * (len(answer) - len(recorded))
    branch = await world.branch(prefix)
    assert said(branch) == ["!" * (len(answer) - len(recorded))]
    assert branch.reward == pytest.approx(len(recorded) / len(answer))


async def test_the_reward_of_a_sample_is_the_envs(world: World) -> None:
    rollout = await world.play(lambda prompt: choices(prompt)[1 if "response" in prompt else 0])
    other = await world.play(lambda prompt: choices(prompt)[0])
    world.engine.script = lambda prompt: pytest.fail("nothing is sampled")
    assert await world.reward(rollout.samples[0], rollout) == rollout.reward == pytest.approx(5 / 6)
    assert await world.reward(other.samples[0], rollout) == other.reward == 1.0
    _, second = replies(rollout)
    with pytest.raises(BranchFailed, match="the episode goes on after the"):
        await world.reward(rollout.samples[0].cut(second.start), rollout)


async def test_a_branch_that_is_adopted_trains_with_its_rollout(world: World) -> None:
    rollout = await world.play(lambda prompt: choices(prompt)[0])
    _, second = replies(rollout)
    world.engine.script = lambda prompt: choices(prompt)[2]
    branch = await world.branch(rollout.before(second))
    own = rollout.num_trainable_tokens
    (sample,) = rollout.adopt(branch)
    assert rollout.num_trainable_tokens == own + int(sample.loss_mask.sum())
    ((later, earlier, length),) = rollout.shared_prefixes
    assert (later, earlier, length) == (1, 0, second.start)
    assert [turn.role for turn in rollout.turns if turn.sample == 1] == ["assistant"]
    rollout.assign_advantages(1.0)


async def test_an_env_that_goes_another_way_is_refused(engine: Any, tokenizer_path: Path) -> None:
    """The tool gives another word when it is asked again."""
    import word_lookup

    given, word_lookup.get.__code__ = word_lookup.get.__code__, (lambda k: f"{k}x").__code__
    try:
        async with running("word-lookup", engine, tokenizer_path) as world:
            rollout = await world.play(lambda prompt: choices(prompt)[0])
            _, second = replies(rollout)
            word_lookup.get.__code__ = (lambda k: f"{k}y").__code__
            with pytest.raises(BranchFailed, match="went another way than before: prompt token"):
                await world.branch(rollout.before(second))
    finally:
        word_lookup.get.__code__ = given


async def test_branches_run_beside_each_other(world: World) -> None:
    rollout = await world.play(lambda prompt: choices(prompt)[0])
    first, second = replies(rollout)
    world.engine.script = Policy()
    prefixes = [rollout.before(first)] * 9 + [rollout.before(second)] * 3
    found = await asyncio.gather(*(world.branch(each, n) for n, each in enumerate(prefixes)))
    assert all(branch.samples for branch in found)


def test_a_prefix_beyond_the_end_is_refused() -> None:
    from prime_rl.testing import make_rollout

    with pytest.raises(StreamError, match=r"6 tokens of sample 0; the samples have \[5\] tokens"):
        make_rollout().prefix(6)
