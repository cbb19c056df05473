"""An engine that answers what a test says, tasksets, and what an env may raise.

A test file says with a fixture ``harness`` which one runs the rollouts.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import verifiers.v1 as vf
from aiohttp import web
from loopback import listening
from renderers import Qwen3RendererConfig
from small_tokenizer import build_tokenizer

from prime_rl.env.environment import Environment, SamplingSettings
from prime_rl.env.episode import EnvSettings, ModelEndpoint, RolloutResult

TOKENIZER = build_tokenizer()
MODEL = "adapter"


LIMIT = 128


START, END, USER, ASSISTANT = 1, 2, 10, 11


(NEWLINE,) = TOKENIZER.encode("\n", add_special_tokens=False)


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


@dataclass
class FakeEngine:
    """``reply`` maps a request's body to a choice's fields, or to a response of its own."""

    reply: Callable[[dict[str, Any]], Any] = lambda body: {"text": "ok"}
    bodies: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        answer = self.reply(body)
        if asyncio.iscoroutine(answer):
            answer = await answer
        if isinstance(answer, web.StreamResponse):
            return answer
        tokens = [*ids(answer.pop("text")), END]
        choice = {
            "index": 0,
            "token_ids": tokens,
            "finish_reason": "stop",
            "logprobs": {
                "content": [
                    {"token": f"token_id:{token}", "logprob": -float(place + 1)}
                    for place, token in enumerate(tokens)
                ]
            },
        }
        return web.json_response({"request_id": "r", "choices": [choice | answer]})

    async def models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"data": [{"id": MODEL, "max_model_len": LIMIT}]})


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    fake = FakeEngine()
    app = web.Application()
    app.router.add_get("/v1/models", fake.models)
    app.router.add_post("/inference/v1/generate", fake.generate)
    async with listening(app, handler_cancellation=True) as url:
        fake.url = f"{url}/v1"
        yield fake


class Data(vf.TaskData):
    answer: str = ""


class Plain(vf.Task[Data]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class PlainConfig(vf.TasksetConfig):
    prompt: str = "ab"


class PlainTaskset(vf.Taskset[Plain, PlainConfig]):
    def load(self) -> Any:
        for answer in ("ok", "no"):
            yield Plain(Data(prompt=self.config.prompt, answer=answer), self.config.task)


class Raising(vf.Task[Data]):
    @vf.reward
    async def broken(self, trace: vf.Trace) -> float:
        raise RuntimeError("the judge is on strike")


class RaisingTaskset(vf.Taskset[Raising, vf.TasksetConfig]):
    def load(self) -> Any:
        yield Raising(Data(prompt="ab"), self.config.task)


class Refusing(vf.Task[Data]):
    @vf.stop
    async def at_once(self, trace: vf.Trace) -> bool:
        return True


class RefusingTaskset(vf.Taskset[Refusing, vf.TasksetConfig]):
    def load(self) -> Any:
        yield Refusing(Data(prompt="ab"), self.config.task)


class EndlessTaskset(vf.Taskset[Plain, vf.TasksetConfig]):
    INFINITE = True

    def load(self) -> Any:
        for number in count():
            yield Plain(Data(prompt=str(number)), self.config.task)


class EmptyTaskset(vf.Taskset[Plain, vf.TasksetConfig]):
    def load(self) -> Any:
        return iter(())


class PairConfig(vf.EnvConfig):
    asker: vf.AgentConfig = vf.AgentConfig()
    solver: vf.AgentConfig = vf.AgentConfig(max_turns=7)
    rounds: int = 1


class PairEnv(vf.Env[PairConfig]):
    """Two agents per episode; the asker does not train."""

    async def setup(self, agents: Any) -> None:
        agents.asker.trainable = False

    async def run(self, task: Any, agents: Any) -> None:
        for _ in range(self.config.rounds):
            await agents.asker.run(task)
        await agents.solver.run(task)


class TalkEnv(vf.SingleAgentEnv, vf.Env[vf.SingleAgentEnvConfig]):
    async def run(self, task: Any, agents: Any) -> None:
        async with agents.agent.interaction(task) as talk:
            await talk.turn()
            await talk.turn("more")


async def run_first(
    settings: EnvSettings, engine: FakeEngine, **fields: Any
) -> list[RolloutResult]:
    async with Environment(settings) as env:
        model = ModelEndpoint(MODEL, engine.url)
        return await env.run(env.examples[0], model=model, sampling=SamplingSettings(), **fields)


async def only(settings: EnvSettings, engine: FakeEngine, **fields: Any) -> RolloutResult:
    (result,) = await run_first(settings, engine, **fields)
    return result


async def cancel_own_task() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


async def exit_in_a_task() -> None:
    async def leave() -> None:
        sys.exit(3)

    await asyncio.create_task(leave())


async def exit_in_a_thread() -> None:
    await asyncio.to_thread(sys.exit, 3)


async def interrupt_in_a_thread() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    await asyncio.to_thread(interrupt)


class Silent(BaseException):
    def __str__(self) -> str:
        raise RuntimeError("no text")


async def exit_in_a_group() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(exit_in_a_task())
        group.create_task(asyncio.sleep(30))


async def forget_a_task_that_exits() -> None:
    async def leave() -> None:
        sys.exit(3)

    FORGOTTEN.append(asyncio.create_task(leave()))
    await asyncio.sleep(0)
    raise RuntimeError("a task has ended with SystemExit")


FORGOTTEN: list[asyncio.Task[None]] = []


def raises(error: BaseException) -> Callable[[], Any]:
    async def hook() -> None:
        raise error

    return hook


HOOKS: dict[str, tuple[Callable[[], Any], str]] = {
    "cancelled": (raises(asyncio.CancelledError()), "CancelledError"),
    "exit": (raises(SystemExit(3)), "SystemExit: 3"),
    "generator exit": (raises(GeneratorExit()), "GeneratorExit"),
    "group": (raises(BaseExceptionGroup("two", [SystemExit(1)])), "BaseExceptionGroup"),
    "a class of its own": (raises(type("Odd", (BaseException,), {})("odd")), "Odd"),
    "an exit of its own": (raises(type("Leave", (SystemExit,), {})(4)), "Leave: 4"),
    "interrupt": (raises(KeyboardInterrupt()), "KeyboardInterrupt"),
    "interrupt in a thread": (interrupt_in_a_thread, "KeyboardInterrupt"),
    "interrupt in a group": (raises(BaseExceptionGroup("g", [KeyboardInterrupt()])), "Group"),
    "an error without text": (raises(Silent()), "Silent: its text cannot be made: RuntimeError"),
    "cancels its task": (cancel_own_task, "CancelledError"),
    "exit in a task": (exit_in_a_task, "SystemExit: 3"),
    "exit in a thread": (exit_in_a_thread, "SystemExit: 3"),
    "exit in a group": (exit_in_a_group, "ExceptionGroup"),
    "exit in a forgotten task": (forget_a_task_that_exits, "a task has ended with SystemExit"),
}


def hooked(stage: str, hook: Callable[[], Any]) -> type:
    """A taskset whose task calls ``hook`` at one stage of its rollout."""

    class Hooked(vf.Task[Data]):
        async def setup(self, trace: vf.Trace, runtime: Any) -> None:
            await self.at("setup")

        async def finalize(self, trace: vf.Trace, runtime: Any) -> None:
            await self.at("finalize")

        @vf.stop
        async def never(self, trace: vf.Trace) -> bool:
            await self.at("stop")
            return False

        @vf.reward
        async def right(self, trace: vf.Trace) -> float:
            await self.at("reward")
            return 1.0

        async def at(self, name: str) -> None:
            if name == stage:
                await hook()

    class HookedTaskset(vf.Taskset[Hooked, vf.TasksetConfig]):
        def load(self) -> Any:
            yield Hooked(Data(prompt="ab"), self.config.task)

    return HookedTaskset


@pytest.fixture
def settings(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, harness: str
) -> Callable[..., EnvSettings]:
    """``settings(Taskset, ..., **fields)``: verifiers finds the classes by the id given here."""
    folder = tmp_path_factory.getbasetemp() / "tokenizer"
    if not folder.exists():
        TOKENIZER.save_pretrained(folder)

    def make(*classes: type, **fields: Any) -> EnvSettings:
        module = ModuleType("adapter_env")
        module.__all__ = [cls.__name__ for cls in classes]  # type: ignore[attr-defined]
        for cls in classes:
            setattr(module, cls.__name__, cls)
        monkeypatch.setitem(sys.modules, "adapter_env", module)
        renderer = Qwen3RendererConfig(thinking_retention="all")
        defaults = {"id": "adapter-env", "renderer": renderer, "tokenizer_path": Path(folder)}
        defaults["default_harness"] = {"id": harness}
        return EnvSettings(**(defaults | fields))

    return make
