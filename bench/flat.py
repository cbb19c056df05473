"""What the embedded engine holds after thousands of requests: memory, descriptors, log and queue.

    python -m bench flat

A server process with a tiny model answers 30,000 requests of random prompts, 64 at a time, each on
a connection of its own in every tenth batch. Then 5,000 requests wait while it is paused and their
clients leave. Resident memory and open descriptors have to be flat from the thousandth request on.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench.records import record
from prime_rl.rundir.processes import raise_file_limit
from prime_rl_embedded.testing import Served, serve, write_model

MARKS = (1_000, 10_000, 30_000)
AT_ONCE = 64
CANCELLED = 5_000
ROUTE = "/inference/v1/generate"
WAITING = "vllm:num_requests_waiting"
SETTLE_SECONDS = 30.0
GROWTH = 1.1
"""Most memory after the last mark, over that after the first."""


def request(chance: random.Random) -> dict[str, object]:
    """A prompt of up to 100 tokens, and up to 4 sampled ones."""
    prompt = [chance.randrange(1, 32) for _ in range(chance.randrange(1, 101))]
    return {"token_ids": prompt, "sampling_params": {"max_tokens": chance.randrange(1, 5)}}


async def answer(served: Served, number: int, chance: random.Random) -> None:
    """Send so many requests, and check every answer."""
    options: dict[str, Any] = {"base_url": served.url, "timeout": None, "trust_env": False}
    shared = httpx.AsyncClient(**options)
    for batch in range(number // AT_ONCE + 1):
        size = min(AT_ONCE, number - batch * AT_ONCE)
        fresh = httpx.AsyncClient(**options) if batch % 10 == 0 else shared
        replies = await asyncio.gather(
            *(fresh.post(ROUTE, json=request(chance)) for _ in range(size))
        )
        assert all(reply.status_code == 200 for reply in replies)
        if fresh is not shared:
            await fresh.aclose()
    await shared.aclose()


async def leave(served: Served) -> float:
    """Requests whose clients leave while they wait; seconds until the queue is empty."""
    served.post("/pause", admin=True)
    host, _, port = served.url.removeprefix("http://").partition(":")
    chance = random.Random(1)
    writers = []
    for number in range(1, CANCELLED + 1):
        data = json.dumps(request(chance)).encode()
        head = f"POST {ROUTE} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode() + data)
        writers.append(writer)
        while number % 500 == 0 and served.metric(WAITING) < number:
            await asyncio.sleep(0.05)
    began = time.monotonic()
    for writer in writers:
        writer.close()
    while served.metric(WAITING):
        await asyncio.sleep(0.01)
    took = time.monotonic() - began
    served.post("/resume", admin=True)
    return took


def measure(served: Served, title: str) -> tuple[float, int]:
    """Print and return MiB and descriptors of the server, which has seen that its clients left."""
    process = psutil.Process(served.process.pid)
    deadline = time.monotonic() + SETTLE_SECONDS
    while len(process.net_connections()) > 2 and time.monotonic() < deadline:
        time.sleep(0.1)  # it listens, and the client of ``served`` has a connection
    size = process.memory_info().rss / 2**20
    files = process.num_fds()
    print(f"{title:<32} {size:7.1f} MiB  {files:4d} descriptors", flush=True)
    return size, files


def main() -> None:
    raise_file_limit()
    chance = random.Random(0)
    done = 0
    sizes = []
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model")
        with serve(model, num_slots=AT_ONCE) as served:
            for mark in MARKS:
                asyncio.run(answer(served, mark - done, chance))
                done = mark
                sizes.append(measure(served, f"after {mark:,} requests"))
                record(f"flat.{mark}.memory", sizes[-1][0], "MiB")
                record(f"flat.{mark}.files", sizes[-1][1], "descriptors")

            took = asyncio.run(leave(served))
            record("flat.cancelled.queue", took, "s")
            print(f"{CANCELLED:,} cancelled requests left the queue in {took:.2f} s")
            asyncio.run(answer(served, 1_000, chance))
            sizes.append(measure(served, "after 1,000 more"))
            record("flat.cancelled.memory", sizes[-1][0], "MiB")
            record("flat.cancelled.files", sizes[-1][1], "descriptors")

    first, files = sizes[0]
    last, left = sizes[len(MARKS) - 1]
    assert last <= GROWTH * first, f"{first:.0f} MiB grew to {last:.0f}"
    assert left <= files + 8 and sizes[-1][1] <= files + 8, sizes


if __name__ == "__main__":
    main()
