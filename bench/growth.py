"""How costs grow with the size of a run: CPU microseconds per unit, which stay flat if a cost is
linear.

    python -m bench growth

Batches go the orchestrator's way (packing, spreading over ranks, encoding) and are decoded as a
rank does. Aborts are those of the embedded engine's scheduler, in random order. Rollouts in flight
are in ``bench rollout`` and ``bench many``.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from bench.records import record
from prime_rl.inference.client import EngineClient
from prime_rl.inference.engine import Replica
from prime_rl.inference.pool import EnginePool
from prime_rl.orchestrator.packer import batch_frames, batch_to_pack
from prime_rl.registry.components import installed_losses
from prime_rl.rollout import Rollout, Sample
from prime_rl.wire import decode_batch
from prime_rl_embedded.model import load_model
from prime_rl_embedded.requests import Request, SamplingParams
from prime_rl_embedded.scheduler import Scheduler
from prime_rl_embedded.testing import write_model

LOSSES = installed_losses()
TOKENS = 2**20
"""In the tables by length."""
ASKED = 20_000


def rollouts(number: int, length: int, envs: int = 1, group: int = 8) -> list[Rollout]:
    """Half of each sample is prompt."""
    rng = np.random.default_rng(0)
    mask = np.arange(length) >= length // 2
    return [
        Rollout(
            env=f"env-{i // group % envs}", example_id=i // group, group_id=i // group, reward=1.0,
            samples=[
                Sample(
                    token_ids=rng.integers(0, 50_000, length, dtype=np.int32), loss_mask=mask,
                    inference_logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
                    advantages=mask.astype(np.float32),
                )
            ],
        )
        for i in range(number)
    ]  # fmt: skip


def seconds(call: Callable[[], object], repeats: int = 3) -> float:
    """CPU seconds, the median."""
    seconds = []
    for _ in range(repeats):
        before = time.process_time()
        call()
        seconds.append(time.process_time() - before)
    return statistics.median(seconds)


def batch(given: list[Rollout], ranks: int = 1) -> float:
    """CPU seconds of a batch from rollouts to what every rank decodes."""
    capacity = max(8192, max(len(rollout.samples[0]) for rollout in given))

    def once() -> None:
        packing = batch_to_pack(1, given, losses=LOSSES, limit=capacity)
        for frame in batch_frames(packing, capacity, num_ranks=ranks, attention_flops=1e-4):
            decode_batch(frame)

    return seconds(once)


def choosing(number: int) -> float:
    """CPU seconds of choosing an engine, ``ASKED`` times, each time for another group."""
    pool = EnginePool([], None)
    engines: list[Any] = [
        SimpleNamespace(serving=True, running=0, asked=0, number=i) for i in range(number)
    ]
    pool.engines = engines

    async def ask() -> None:
        for key in range(ASKED):
            (await pool._choose(key, None)).asked += 1

    return seconds(lambda: asyncio.run(ask()))


def asking(number: int) -> float:
    """CPU seconds of so many requests, all in flight at once at one engine and answered one by
    one."""
    pool = EnginePool([], None)

    async def ask() -> None:
        engine = Replica(0, EngineClient("http://127.0.0.1:1", None))
        engine.serve()
        pool.engines = [engine]
        answers = [asyncio.Future[None]() for _ in range(number)]
        asked = [
            asyncio.create_task(pool._do(engine, lambda _, answer=answer: answer))  # type: ignore[misc]
            for answer in answers
        ]
        await asyncio.sleep(0)
        for answer, one in zip(answers, asked, strict=True):
            answer.set_result(None)
            await one

    return seconds(lambda: asyncio.run(ask()))


def aborting(number: int, slots: int) -> float:
    """CPU seconds of aborting so many requests, of which ``slots`` run and the others wait."""
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        model = load_model(write_model(Path(folder)), max_len=64)
        found = []
        for _ in range(3):
            scheduler = Scheduler(model, num_slots=slots or 1, max_model_len=64)
            requests = [Request([1, i % 250], SamplingParams(30)) for i in range(number)]
            for request in requests:
                scheduler.add(request)
            if slots:
                scheduler.step()
            random.Random(0).shuffle(requests)
            found.append(seconds(lambda: [*map(scheduler.abort, requests)], repeats=1))  # noqa: B023
            assert scheduler.stats.finished["abort"] == number
    return statistics.median(found)


def tables() -> Iterator[tuple[str, str, dict[int, float]]]:
    """What grows, the unit, and CPU microseconds per unit by size."""
    sizes = (128, 1024, 10_000, 100_000)
    yield "samples of 128 tokens", "sample", {n: batch(rollouts(n, 128)) / n for n in sizes}
    lengths = (128, 1024, 8192, 65_536)
    by_length = {n: batch(rollouts(TOKENS // n, n)) / TOKENS for n in lengths}
    yield "tokens of a sample", "token", by_length
    many = 8192
    envs = {n: batch(rollouts(many, 128, envs=n)) / many for n in (1, 8, 64)}
    yield f"envs of {many:,} samples", "sample", envs
    given = rollouts(many, 128)
    ranks = {n: batch(given, n) / many for n in (1, 8, 64, 1024)}
    yield f"ranks for {many:,} samples", "sample", ranks
    yield "engines", "group sent", {n: choosing(n) / ASKED for n in (1, 8, 64)}
    flights = {n: asking(n) / n for n in (64, 1024, 10_240)}
    yield "requests in flight at an engine", "request", flights
    waiting = {n: aborting(n, 0) / n for n in (100, 1000, 10_000, 100_000)}
    yield "requests that wait in the embedded engine", "abort", waiting
    running = {n: aborting(n, n) / n for n in (16, 64, 256, 1024)}
    yield "requests that run there", "abort", running


def main() -> int:
    for grows, unit, figures in tables():
        least = min(figures)
        print(f"{grows}: CPU microseconds per {unit}")
        name = grows.replace(" ", "_").replace(",", "")
        for size, cost in figures.items():
            print(f"  {size:9,}  {cost * 1e6:10.3f}  {cost / figures[least]:6.2f}x", flush=True)
            record(f"growth.{name}.{size}", cost * 1e6, f"CPU us per {unit}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
