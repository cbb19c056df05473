"""Rollouts of programs against a scripted engine."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import verifiers.v1 as vf
from program_rollouts import Play
from renderers import Qwen3RendererConfig
from scripted_replies import MODEL, TOKENIZER, ScriptedEngine, replying
from waiting import LIMIT

from prime_rl.env.environment import Environment, SamplingSettings
from prime_rl.env.episode import EnvSettings, ModelEndpoint, RolloutResult


class TalkTask(vf.Task):
    """Ends when the program does."""

    @vf.reward
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class TalkTaskset(vf.Taskset[TalkTask, vf.TasksetConfig]):
    def load(self) -> Iterator[TalkTask]:
        yield TalkTask(vf.TaskData(prompt="hello"), self.config.task)


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with replying() as scripted:
        scripted.version = 7
        yield scripted


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    TOKENIZER.save_pretrained(path)
    return path


@pytest.fixture
def play(
    engine: ScriptedEngine,
    tokenizer_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Play:
    """``await play(code, reward=...)``: the result of one rollout of a Python program. It asks the
    scripted engine, or ``endpoint``. Of several at once: one that failed, else any."""
    monkeypatch.chdir(tmp_path)
    talk = ModuleType("talk")
    vars(talk).update(__all__=["TalkTaskset"], TalkTaskset=TalkTaskset)
    monkeypatch.setitem(sys.modules, "talk", talk)

    async def result_of(
        code: str,
        *,
        id: str = "talk",
        args: dict[str, Any] | None = None,
        timeout: float = LIMIT,
        max_turns: int | None = None,
        max_tokens: int | None = None,
        endpoint: ModelEndpoint | None = None,
        tokenizer: Path | None = None,
        times: int = 1,
        harness_timeout: float | None = None,
        **harness: Any,
    ) -> RolloutResult:
        Path("agent.py").write_text(code)
        own = {} if harness_timeout is None else {"timeout": harness_timeout}
        harness = {"command": [sys.executable, "agent.py"], "id": "program"} | own | harness
        settings = EnvSettings(
            id=id,
            args=args or {},
            harness=harness,
            timeout=timeout,
            max_turns=max_turns,
            renderer=Qwen3RendererConfig(thinking_retention="all"),
            tokenizer_path=tokenizer or tokenizer_path,
        )
        endpoint = endpoint or ModelEndpoint(MODEL, engine.base_url)
        sampling = SamplingSettings(temperature=0.75, max_completion_tokens=max_tokens)
        async with Environment(settings) as env:
            example = env.examples[0]
            runs = [env.run(example, model=endpoint, sampling=sampling) for _ in range(times)]
            results = [result for (result,) in await asyncio.gather(*runs)]
        failed = [result for result in results if not result.ok]
        return [*failed, *results][0]

    return result_of
