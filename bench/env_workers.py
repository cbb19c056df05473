"""What environment workers cost and give.

    python -m bench env_workers

Table 1: CPU milliseconds of the orchestrator for one single-turn rollout, with its episodes in the
orchestrator (0) or in workers. Table 2: rollouts per second of an environment whose scoring blocks
its process. The engine is a process that answers at once (``bench.rollout``).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from bench.records import record
from bench.rollout import engine, run_batch
from prime_rl.config.run import RunConfig
from prime_rl.env.environment import Environment, SamplingSettings
from prime_rl.env.episode import EnvSettings, ModelEndpoint
from prime_rl_env_workers.environment import make_environment

SAMPLING = SamplingSettings(max_completion_tokens=12)
TASKSETS = Path(__file__).parent / "tasksets"
INFLIGHT = 64


def environment(workers: int, milliseconds: float, folder: Path) -> Environment:
    """The bench's env."""
    from renderers import Qwen3RendererConfig

    table = {
        "id": "busy_scoring",
        "args": {"task": {"milliseconds": milliseconds}},
        "harness": {"id": "in-process"},
        "env_workers": workers,
    }
    config = RunConfig.model_validate(
        {"model": {"name": "bench"}, "max_steps": 1, "orchestrator": {"train": {"env": [table]}}}
    )
    (env,) = config.orchestrator.train.env
    renderer = Qwen3RendererConfig(thinking_retention="all")
    settings = EnvSettings.of(env, renderer=renderer, tokenizer_path=folder)
    return make_environment(settings, env, config=config, run_dir=folder)


async def cpu(
    env: Environment, endpoint: ModelEndpoint, rollouts: int, repeats: int
) -> list[float]:
    """CPU milliseconds of this process per rollout."""
    figures = []
    await run_batch(env, endpoint, rollouts=rollouts, inflight=INFLIGHT)
    for _ in range(repeats):
        before = time.process_time()
        await run_batch(env, endpoint, rollouts=rollouts, inflight=INFLIGHT)
        figures.append((time.process_time() - before) / rollouts * 1e3)
    return figures


async def throughput(env: Environment, endpoint: ModelEndpoint, seconds: float) -> float:
    """Rollouts per second, always ``INFLIGHT`` at once."""
    await run_batch(env, endpoint, rollouts=8, inflight=INFLIGHT)
    done = 0
    end = time.monotonic() + seconds

    async def keep(place: int) -> None:
        nonlocal done
        while time.monotonic() < end:
            example = env.examples[place]
            counted = time.monotonic() < end
            (result,) = await env.run(
                example, model=endpoint, sampling=SAMPLING, cache_salt="0", seed=place
            )
            assert result.ok, result.error
            done += counted

    began = time.monotonic()
    await asyncio.gather(*(keep(place) for place in range(INFLIGHT)))
    return done / (time.monotonic() - began)


async def tables(endpoint: ModelEndpoint, asked: argparse.Namespace, folder: Path) -> None:
    print("workers  CPU ms per rollout in the orchestrator (median; range)", flush=True)
    medians = {}
    for workers in asked.workers:
        async with environment(workers, 0.0, folder) as env:
            figures = await cpu(env, endpoint, rollouts=asked.rollouts, repeats=asked.repeats)
        medians[workers] = statistics.median(figures)
        record(f"env_workers.{workers}.median", medians[workers], "CPU ms")
        record(f"env_workers.{workers}.min", min(figures), "CPU ms")
        record(f"env_workers.{workers}.max", max(figures), "CPU ms")
        spread = f"{min(figures):.2f}-{max(figures):.2f}"
        print(f"{workers:7}  {medians[workers]:.2f} ({spread})", flush=True)
    print("\nworkers  scoring blocks  rollouts/s", flush=True)
    for milliseconds in (50.0, 5.0):
        for workers in asked.workers:
            async with environment(workers, milliseconds, folder) as env:
                result = await throughput(env, endpoint, asked.seconds)
            record(f"env_workers.{workers}.blocked_{milliseconds:g}", result, "rollouts/s")
            print(f"{workers:7}  {milliseconds:11.0f} ms  {result:10.1f}", flush=True)


def main() -> int:
    from prime_rl_environments.tiny.tokenizer import build_tokenizer

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rollouts", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0)
    asked = parser.parse_args()
    sys.path.insert(0, str(TASKSETS))
    os.environ["PYTHONPATH"] = str(TASKSETS)
    with tempfile.TemporaryDirectory() as folder, engine(batches=True) as endpoint:
        build_tokenizer().save_pretrained(folder)
        asyncio.run(tables(endpoint, asked, Path(folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
