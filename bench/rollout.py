"""The orchestrator's CPU milliseconds for one single-turn rollout, by harness.

    python bench/rollout.py [--rollouts 256] [--repeats 7] [--profile]

A rollout includes everything from the example to its result: verifiers' episode, the harness,
rendering, the engine's HTTP request, scoring, and the columns for training. The engine is a
separate process that answers immediately with the same seven tokens. ``http`` is the same chat loop
via verifiers' loopback interception server, for comparison.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import multiprocessing
import pstats
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from prime_rl.env.environment import Environment, SamplingSettings
from prime_rl.env.episode import EnvSettings, ModelEndpoint, RolloutResult

REPLY_TOKENS = (20, 21, 22, 23, 24, 25, 2)
INFLIGHT = 64


def serve(ready: Connection) -> None:
    """The engine: one fixed reply on a free loopback port. Sends the port to ``ready``."""
    from aiohttp import web

    entries = [{"token": f"token_id:{t}", "token_id": t, "logprob": -0.5} for t in REPLY_TOKENS]
    choice = {
        "index": 0,
        "token_ids": REPLY_TOKENS,
        "finish_reason": "stop",
        "logprobs": {"content": entries},
        "weight_versions": [{"version": 0, "start": 0, "end": len(REPLY_TOKENS)}],
    }
    body = json.dumps({"request_id": "r", "choices": [choice]}).encode()

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=body, content_type="application/json")

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "bench", "max_model_len": 2048}]})

    async def main() -> None:
        app = web.Application()
        app.router.add_get("/v1/models", models)
        app.router.add_post("/inference/v1/generate", generate)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        ready.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(main())


def install_http_harness() -> None:
    """Install a harness ``http`` for comparison: verifiers' usual chat loop over loopback HTTP."""
    import httpx
    import verifiers.v1 as vf

    client = httpx.AsyncClient(timeout=None)

    class HttpHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self,
            ctx: Any,
            trace: Any,
            runtime: Any,
            endpoint: str,
            secret: str,
            urls: Any,
            data: Any,
        ) -> vf.ProgramResult:
            reply = await client.post(
                f"{endpoint}/chat/completions",
                json={"model": ctx.model, "messages": [{"role": "user", "content": data.prompt}]},
                headers={"Authorization": f"Bearer {secret}"},
            )
            return vf.ProgramResult(0 if reply.status_code == 200 else 1, "", reply.text)

    module = ModuleType("http")
    module.HttpHarness = HttpHarness  # type: ignore[attr-defined]
    module.__all__ = ["HttpHarness"]  # type: ignore[attr-defined]
    sys.modules["bench_http"] = module


async def run_batch(
    env: Environment, endpoint: ModelEndpoint, rollouts: int
) -> list[RolloutResult]:
    """``rollouts`` episodes, ``INFLIGHT`` at a time."""
    sampling = SamplingSettings(max_completion_tokens=12)
    done: list[RolloutResult] = []
    for start in range(0, rollouts, INFLIGHT):
        episodes = [
            env.run(env.examples[i], model=endpoint, sampling=sampling, cache_salt="0", seed=i)
            for i in range(start, min(start + INFLIGHT, rollouts))
        ]
        for results in await asyncio.gather(*episodes):
            done += results
    assert all(result.ok for result in done), next(r.error for r in done if not r.ok)
    return done


async def measure(
    settings: EnvSettings, endpoint: ModelEndpoint, rollouts: int, repeats: int, profile: bool
) -> list[float]:
    """CPU milliseconds per rollout, one figure per repeat, after a warm-up batch."""
    figures = []
    async with Environment(settings) as env:
        await run_batch(env, endpoint, 8)
        await run_batch(env, endpoint, rollouts)
        for _ in range(repeats):
            before = time.process_time()
            await run_batch(env, endpoint, rollouts)
            figures.append((time.process_time() - before) / rollouts * 1e3)
        if profile:
            profiler = cProfile.Profile()
            profiler.enable()
            await run_batch(env, endpoint, rollouts)
            profiler.disable()
            pstats.Stats(profiler).sort_stats("tottime").print_stats(40)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()

    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(there,), daemon=True)
    process.start()
    try:
        endpoint = ModelEndpoint("bench", f"http://127.0.0.1:{here.recv()}/v1")
        asyncio.run(report(endpoint, arguments))
    finally:
        process.terminate()
        process.join()


async def report(endpoint: ModelEndpoint, arguments: argparse.Namespace) -> None:
    """Measure both harnesses and print medians and their ratio."""
    from renderers import Qwen3RendererConfig

    from prime_rl_environments.tiny.tokenizer import build_tokenizer

    install_http_harness()
    medians = {}
    with tempfile.TemporaryDirectory() as folder:
        build_tokenizer().save_pretrained(folder)
        for harness in ("bench-http", "in-process"):
            settings = EnvSettings(
                id="reverse-text",
                harness={"id": harness},
                renderer=Qwen3RendererConfig(thinking_retention="all"),
                tokenizer_path=Path(folder),
            )
            profile = arguments.profile and harness == "in-process"
            figures = await measure(
                settings, endpoint, arguments.rollouts, arguments.repeats, profile
            )
            medians[harness] = statistics.median(figures)
            spread = f"{min(figures):.2f}-{max(figures):.2f}"
            print(f"{harness:12} {medians[harness]:6.2f} ms CPU per rollout (median; {spread})")
    print(f"ratio        {medians['bench-http'] / medians['in-process']:6.1f}x")


if __name__ == "__main__":
    main()
