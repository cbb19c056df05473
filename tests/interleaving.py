"""Conversations driven step by step through verifiers, a renderer and an engine on a real socket,
down to the trainer's samples; and what those samples must be.

A *plan* is an async function that holds a rollout's conversations: ``await ask(messages)`` sends
one request and returns the assistant's message. The engine answers in token ids the test chose, and
keeps what it saw and produced.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from waiting import LIMIT

pytest.importorskip("in_process", reason="needs the plugin prime-rl-environments")
import verifiers.v1 as vf
from aiohttp import web

from in_process import InProcessHarness
from in_process.turns import Refused, TurnDriver
from prime_rl.env.environment import Environment, SamplingSettings
from prime_rl.env.episode import EnvSettings, ModelEndpoint, RolloutResult
from prime_rl.env.traces import build_samples
from prime_rl.rollout import Sample
from prime_rl_environments.tiny.tokenizer import build_tokenizer

END = 2
"""``<|im_end|>``."""

Message = dict[str, Any]
Ask = Callable[[list[Message]], Awaitable[Message]]
Plan = Callable[[Ask], Awaitable[None]]


@dataclass(frozen=True)
class Call:
    """One request, as the engine saw and answered it. Every token ever sampled has a logprob of its
    own, so it can be told from any other."""

    prompt: list[int]
    completion: list[int]
    logprobs: list[float]


@dataclass
class Engine:
    """Answers each request with the next of ``replies``: token ids, or a status to fail with."""

    replies: list[list[int] | int] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    url: str = ""
    _numbers: Any = field(default_factory=lambda: count(1))

    async def generate(self, request: web.Request) -> web.StreamResponse:
        prompt = (await request.json())["token_ids"]
        reply = self.replies.pop(0)
        if isinstance(reply, int):
            return web.Response(status=reply, text="out of order")
        logprobs = [-next(self._numbers) / 1024 for _ in reply]  # exact in float32
        self.calls.append(Call(prompt, reply, logprobs))
        content = [
            {"token": f"token_id:{token}", "logprob": value}
            for token, value in zip(reply, logprobs, strict=True)
        ]
        choice = {
            "index": 0,
            "token_ids": reply,
            "finish_reason": "stop" if reply[-1:] == [END] else "length",
            "logprobs": {"content": content},
        }
        return web.json_response({"request_id": "r", "choices": [choice]})

    async def models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"data": [{"id": "m", "max_model_len": 4096}]})

    async def start(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/inference/v1/generate", self.generate)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        return runner


PLANS: list[Plan] = []
"""The plan of each agent's run, taken in order."""


class PlannedHarness(InProcessHarness):
    """Runs the next plan instead of a chat loop."""

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: Any, secret: str, urls: Any, data: Any
    ) -> vf.ProgramResult:
        driver = TurnDriver(secret, trace, ctx)

        async def ask(messages: list[Message]) -> Message:
            return await driver.turn({"model": ctx.model, "messages": messages})

        try:
            await PLANS.pop(0)(ask)
        except Refused as refusal:
            return vf.ProgramResult(1, "", str(refusal))
        return vf.ProgramResult(0, "", "")


class PlannedTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def one(self, trace: vf.Trace) -> float:
        return 1.0


class PlannedTaskset(vf.Taskset[PlannedTask, vf.TasksetConfig]):
    def load(self) -> Any:
        yield PlannedTask(vf.TaskData(prompt="the plan decides"), self.config.task)


class TwoSeatsConfig(vf.EnvConfig):
    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()


class TwoSeatsEnv(vf.Env[TwoSeatsConfig]):
    """Two agents, one after the other."""

    async def run(self, task: Any, agents: Any) -> None:
        await agents.first.run(task)
        await agents.second.run(task)


def register(name: str, *classes: type) -> None:
    """Make verifiers find the classes under this id."""
    module = ModuleType(name)
    module.__all__ = [cls.__name__ for cls in classes]  # type: ignore[attr-defined]
    for cls in classes:
        setattr(module, cls.__name__, cls)
    sys.modules[name] = module


register("planned", PlannedTaskset, PlannedHarness)
register("planned_pair", PlannedTaskset, PlannedHarness, TwoSeatsEnv)


@dataclass
class Studio:
    """An environment and an engine; ``play`` runs one episode of given plans and replies."""

    env: Environment
    engine: Engine

    async def play(self, plans: Sequence[Plan], replies: Sequence[Any]) -> list[RolloutResult]:
        PLANS[:] = plans
        self.engine.replies, self.engine.calls = list(replies), []
        return await self.env.run(
            self.env.examples[0],
            model=ModelEndpoint("m", self.engine.url),
            sampling=SamplingSettings(),
        )


def settings(renderer: Any, folder: Path, env_id: str = "planned", **tokenizer: Any) -> EnvSettings:
    """An env of plans whose renderer loads a tokenizer made here: ``phrases`` and
    ``chat_template``."""
    made = build_tokenizer(tokenizer.get("phrases", ()))
    made.chat_template = tokenizer.get("chat_template", made.chat_template)
    made.save_pretrained(folder)
    return EnvSettings(
        default_harness={"id": "in-process"},
        id=env_id,
        renderer=renderer,
        tokenizer_path=folder,
        timeout=LIMIT,
    )


def samples_of(results: Iterable[RolloutResult]) -> list[Sample]:
    """What would train of an episode."""
    return [sample for each in results if each.ok for sample in build_samples(each.branches, 1.0)]


def assert_faithful(samples: Sequence[Sample], calls: Sequence[Call]) -> None:
    """Every token the engine sampled trains exactly once, with the logprob it was sampled at, after
    exactly the tokens the engine saw before it; nothing else trains."""
    where = {
        value: (sample, place)
        for sample in samples
        for place, value in enumerate(sample.inference_logprobs.tolist())
        if sample.loss_mask[place]
    }
    assert sum(sample.num_trainable_tokens for sample in samples) == len(where)
    assert sorted(where) == sorted(value for call in calls for value in call.logprobs)
    for call in calls:
        for offset, value in enumerate(call.logprobs):
            sample, place = where[value]
            seen = [*call.prompt, *call.completion[: offset + 1]]
            assert sample.token_ids[: place + 1].tolist() == seen
    for sample in samples:
        assert not sample.inference_logprobs[~sample.loss_mask].any()


def interleaved(
    calls: Sequence[Call], parents: Sequence[int | None] | None = None
) -> list[list[int]]:
    """The reference: greedy interleaving of steps (semantics.md 2.7). Each step extends the longest
    sequence that its prompt begins with, or starts a new one; the sequences at the end.

    ``parents`` says which step's conversation each one goes on with: then only sequences that end
    in a step of its own conversation are extended, not those of equal tokens by chance.
    """
    active: list[tuple[int, list[int]]] = []
    for number, call in enumerate(calls):
        own = set(range(number)) if parents is None else set(_ancestors(number, parents))
        fits = [
            (last, tokens)
            for last, tokens in active
            if last in own and call.prompt[: len(tokens)] == tokens
        ]
        if fits:
            active.remove(max(fits, key=lambda each: len(each[1])))
        active.append((number, [*call.prompt, *call.completion]))
    return [tokens for _, tokens in active]


def _ancestors(step: int, parents: Sequence[int | None]) -> Iterator[int]:
    parent = parents[step]
    while parent is not None:
        yield parent
        parent = parents[parent]
