"""The orchestrator's CPU milliseconds for one single-turn rollout, by rollouts in flight.

    python -m bench rollout       (bench/rollout.py [--inflight 64 1000 10000] [--repeats 5])

A rollout includes everything from the example to its result: verifiers' episode, the harness,
rendering, the engine's HTTP request, scoring, and the columns for training. Eight rollouts share an
example. The engine is a separate process that answers immediately with the same seven tokens:
``in-process`` by the embedded engine's batch route, ``one request each`` as vLLM. ``bench-http`` is
the same chat loop via verifiers' loopback interception server, for comparison.
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
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from renderers import Qwen3RendererConfig

from bench.records import record
from prime_rl.env.environment import Environment, SamplingSettings
from prime_rl.env.episode import EnvSettings, ModelEndpoint, RolloutResult
from prime_rl_environments.tiny.tokenizer import build_tokenizer

REPLY_TOKENS = (20, 21, 22, 23, 24, 25, 2)
GROUP = 8


def serve(ready: Connection, batches: bool) -> None:
    """The engine: one fixed reply on a free loopback port. Sends the port to ``ready``."""
    import msgspec
    from aiohttp import web

    from prime_rl_engine_kit import batch

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

    async def generate_batch(request: web.Request) -> web.Response:
        asked = msgspec.msgpack.decode(await request.read(), type=batch.RequestBatch).requests
        answer = batch.Answer(
            index=0,
            token_ids=batch.ids_to_bytes(list(REPLY_TOKENS)),
            logprobs=batch.logprobs_to_bytes([-0.5] * len(REPLY_TOKENS)),
            finish_reason="stop",
            versions=[(0, 0, len(REPLY_TOKENS))],
        )
        answers = (msgspec.structs.replace(answer, index=i) for i in range(len(asked)))
        return web.Response(body=b"".join(map(batch.frame, answers)))

    async def models(request: web.Request) -> web.Response:
        card = {"id": "bench", "max_model_len": 2048, "generate_batch": batches}
        return web.json_response({"data": [card]})

    async def main() -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/v1/models", models)
        app.router.add_post("/inference/v1/generate", generate)
        app.router.add_post(batch.ROUTE, generate_batch)
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

    client = httpx.AsyncClient(timeout=None, trust_env=False)

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
    env: Environment, endpoint: ModelEndpoint, rollouts: int, inflight: int
) -> list[RolloutResult]:
    """``rollouts`` episodes, ``inflight`` at a time."""
    sampling = SamplingSettings(max_completion_tokens=12)
    room = asyncio.Semaphore(inflight)

    async def episode(i: int) -> list[RolloutResult]:
        async with room:
            example = env.examples[i // GROUP % len(env.examples)]
            return await env.run(example, model=endpoint, sampling=sampling, cache_salt="0", seed=i)

    done = [
        each
        for episodes in await asyncio.gather(*map(episode, range(rollouts)))
        for each in episodes
    ]
    assert all(result.ok for result in done), next(r.error for r in done if not r.ok)
    return done


async def measure(
    settings: EnvSettings, endpoint: ModelEndpoint, inflight: int, repeats: int, profile: bool
) -> list[float]:
    """CPU milliseconds per rollout, one figure per repeat, after a warm-up."""
    rollouts = max(512, inflight)
    figures = []
    async with Environment(settings) as env:
        await run_batch(env, endpoint, rollouts=64, inflight=inflight)
        for _ in range(repeats):
            before = time.process_time()
            await run_batch(env, endpoint, rollouts=rollouts, inflight=inflight)
            figures.append((time.process_time() - before) / rollouts * 1e3)
        if profile:
            profiler = cProfile.Profile()
            profiler.enable()
            await run_batch(env, endpoint, rollouts=rollouts, inflight=inflight)
            profiler.disable()
            pstats.Stats(profiler).sort_stats("tottime").print_stats(40)
    return figures


@contextmanager
def engine(batches: bool) -> Iterator[ModelEndpoint]:
    """A stub engine in a process of its own."""
    here, there = multiprocessing.Pipe()
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=serve, args=(there, batches), daemon=True)
    process.start()
    there.close()
    try:
        yield ModelEndpoint("bench", f"http://127.0.0.1:{here.recv()}/v1")
    finally:
        process.terminate()
        process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inflight", type=int, nargs="+", default=[64, 1000, 10_000])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    install_http_harness()
    with tempfile.TemporaryDirectory() as folder, engine(True) as new, engine(False) as old:
        build_tokenizer().save_pretrained(folder)
        asyncio.run(report(Path(folder), new, old=old, arguments=arguments))


async def report(
    folder: Path, new: ModelEndpoint, old: ModelEndpoint, arguments: argparse.Namespace
) -> None:
    """Measure and print, row by row."""
    rows = [("in-process", new, inflight) for inflight in arguments.inflight]
    rows += [("one request each", old, 64), ("bench-http", old, 64)]
    for name, endpoint, inflight in rows:
        settings = EnvSettings(
            id="reverse-text",
            harness={"id": "bench-http" if name == "bench-http" else "in-process"},
            renderer=Qwen3RendererConfig(thinking_retention="all"),
            tokenizer_path=folder,
        )
        repeats = arguments.repeats if inflight < 5000 else 2
        profile = arguments.profile and endpoint is new
        figures = await measure(
            settings, endpoint, inflight=inflight, repeats=repeats, profile=profile
        )
        key = f"rollout.{name.replace(' ', '_')}.{inflight}"
        for what, of in (("median", statistics.median), ("min", min), ("max", max)):
            record(f"{key}.{what}", of(figures), "CPU ms")
        spread = f"{min(figures):.2f}-{max(figures):.2f}"
        print(
            f"{name:16} {inflight:6,} in flight {statistics.median(figures):6.2f} ms CPU per "
            f"rollout (median; {spread})",
            flush=True,
        )


if __name__ == "__main__":
    main()
