"""An environment whose rollouts run in its own process: what depends on the harness."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from aiohttp import web
from env_cases import FORGOTTEN, HOOKS, FakeEngine, PlainTaskset, hooked, only
from env_cases import engine as engine
from env_cases import settings as settings


@pytest.mark.slow  # a fresh interpreter imports verifiers
def test_running_an_environment_does_not_import_torch(settings: Any) -> None:
    folder = settings(PlainTaskset).tokenizer_path
    code = f"""
import asyncio, sys
from pathlib import Path
from renderers import Qwen3RendererConfig
from prime_rl.env.environment import *

async def main():
    path, renderer = Path({str(folder)!r}), Qwen3RendererConfig()
    settings = EnvSettings(id="reverse-text", tokenizer_path=path, renderer=renderer)
    async with Environment(settings) as env:
        model = ModelEndpoint("m", "http://127.0.0.1:9/v1")
        results = await env.run(env.examples[0], model=model, sampling=SamplingSettings())
    print(results[0].error_type, "torch" in sys.modules)

asyncio.run(main())
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["ProviderError", "False"]


@pytest.fixture
def harness() -> str:
    return "in-process"


async def test_the_spans_of_a_reply_become_a_column(settings: Any, engine: FakeEngine) -> None:
    engine.reply = lambda body: {
        "text": "ok",
        "weight_versions": [
            {"version": 4, "start": 0, "end": 1},
            {"version": "5", "start": 1, "end": 3},
        ],
    }
    result = await only(settings(PlainTaskset), engine)
    assert result.branches[0].policy_versions == [-1] * 8 + [4, 5, 5]


async def test_an_engine_that_is_down_is_named(settings: Any) -> None:
    result = await only(settings(PlainTaskset), FakeEngine(url="http://127.0.0.1:9/v1"))
    assert (result.ok, result.error_type, result.branches) == (False, "ProviderError", [])
    assert "Cannot connect to host 127.0.0.1:9" in (result.error or "")


async def test_the_reason_of_the_engine_is_in_the_result(settings: Any, engine: FakeEngine) -> None:
    reason = {"error": {"message": "unknown token 999"}}
    engine.reply = lambda body: web.json_response(reason, status=400)
    result = await only(settings(PlainTaskset), engine)
    assert (result.ok, result.error_type) == (False, "ProviderError")
    assert "HTTP 400" in (result.error or "") and "unknown token 999" in (result.error or "")


async def test_what_a_stop_raises_costs_its_rollout_only(settings: Any, engine: FakeEngine) -> None:
    for hook, expected in HOOKS.values():
        result = await only(settings(hooked("stop", hook)), engine)
        assert (result.ok, result.branches) == (False, [])
        assert expected in f"{result.error_type}: {result.error}"
    for task in FORGOTTEN:
        assert task.done() and "SystemExit" in str(task.exception())
    FORGOTTEN.clear()
