"""Generated tokens per CPU second of the embedded engine's whole server process.

    .venv/bin/python bench/engine.py [--runs 5]

Workload: Qwen3 with 0.66M parameters (128 wide, 4 layers, vocabulary 512) in float32, 64 requests
in flight, prompts of 48 tokens, 64 new tokens, logprobs on, one torch thread. HTTP and JSON are
included. The server is a child process on loopback; the client's CPU is not included. ``distinct``
sends a new prompt every time; ``groups`` sends each prompt 8 times, as GRPO does; ``top_p`` samples
with top_p 0.9.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from bench.records import record
from prime_rl_embedded.testing import serve, write_model

CONCURRENT = 64
ROUNDS = 3
PROMPT = 48
NEW = 64
VOCAB = 512
GOAL = 4000
MODEL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
}
WORKLOADS: dict[str, tuple[int, dict[str, float]]] = {
    "distinct": (1, {}),
    "groups": (8, {}),
    "top_p": (1, {"top_p": 0.9}),
}
"""Name -> (how often each prompt is sent, additional sampling parameters)."""


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Reply(msgspec.Struct):
    usage: _Usage


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, all threads (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def generate(url: str, workload: str, seed: int) -> int:
    """Send all requests with 64 in flight. Returns the number of generated tokens."""
    repeats, extra = WORKLOADS[workload]
    rng = random.Random(seed)
    total = CONCURRENT * ROUNDS
    prompts = [[rng.randrange(VOCAB) for _ in range(PROMPT)] for _ in range(total // repeats)]
    queue = iter([prompt for prompt in prompts for _ in range(repeats)])

    async def work(http: aiohttp.ClientSession) -> int:
        done = 0
        for prompt in queue:
            async with http.post("/inference/v1/generate", json=_body(prompt, extra)) as answer:
                answer.raise_for_status()
                reply = msgspec.json.decode(await answer.read(), type=_Reply)
                done += reply.usage.completion_tokens
        return done

    # Not httpx: it takes several milliseconds per request, so the engine would wait for the client.
    connector = aiohttp.TCPConnector(limit=CONCURRENT)
    async with aiohttp.ClientSession(url, connector=connector) as http:
        return sum(await asyncio.gather(*(work(http) for _ in range(CONCURRENT))))


def _body(prompt: list[int], extra: dict[str, float]) -> dict[str, Any]:
    params = {"temperature": 0.9, "max_tokens": NEW, "logprobs": 1, "ignore_eos": True, **extra}
    return {"token_ids": prompt, "sampling_params": params}


def measure(runs: int) -> dict[str, list[float]]:
    """Tokens per CPU second of each run, by workload. The workloads alternate."""
    rates: dict[str, list[float]] = {workload: [] for workload in WORKLOADS}
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), **MODEL)
        with serve(model, max_model_len=256) as served:
            url = served.url
            pid = served.process.pid
            asyncio.run(generate(url, "distinct", -1))  # warm-up
            for run in range(runs):
                for workload in WORKLOADS:
                    before = cpu_seconds(pid)
                    tokens = asyncio.run(generate(url, workload, run))
                    rates[workload].append(tokens / (cpu_seconds(pid) - before))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    print(f"embedded engine, {CONCURRENT} rows in flight, tokens per CPU second (goal {GOAL:,}):")
    for workload, rates in measure(runs).items():
        median = statistics.median(rates)
        record(f"engine.{workload}", median, "tokens per CPU second")
        spread = f"{min(rates):,.0f} to {max(rates):,.0f}"
        ratio = f"{median / GOAL:.1f}x the goal"
        print(f"  {workload:9} median {median:7,.0f}  ({spread} over {runs} runs)  {ratio}")


if __name__ == "__main__":
    main()
