"""The embedded engine, and weights on their way to it."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

import httpx
import torch

from bench.gpu.device import Figures, Skip, need, on_gpu
from bench.gpu.trainer import SHAPES, make_model
from prime_rl.rundir.launch import READY
from prime_rl.trainer.device import choose_device
from prime_rl.weights.tensors import header_of
from prime_rl_broadcast.connection import connect
from prime_rl_broadcast.group import BroadcastGroup
from prime_rl_devkit.engines.models import write_tokenizer
from prime_rl_embedded.testing import Served, serve

NUM_WEIGHTS = 16
SIDE = 4096
"""``NUM_WEIGHTS`` matrices of ``SIDE`` x ``SIDE``: 0.5 GiB in bfloat16."""


def engine() -> Figures:
    """Tokens/s at Qwen3-0.6B's shape, 128 requests of 128 + 256 tokens at once; and the GiB of the
    GPU that the engine gives back while it sleeps."""
    shape = SHAPES["qwen3-0.6b" if on_gpu() else "tiny"]
    count, prompt, new = (128, 128, 256) if on_gpu() else (8, 8, 8)
    figures: Figures = {}
    with tempfile.TemporaryDirectory() as folder:
        model = write_random(Path(folder), "qwen3-0.6b" if on_gpu() else "tiny")
        for dtype in ("bfloat16", "float32") if on_gpu() else ("float32",):
            with serve(model, max_model_len=prompt + new, dtype=dtype) as served:
                prompts = [
                    [(7 * number + place) % shape["vocab_size"] for place in range(prompt)]
                    for number in range(count)
                ]
                asyncio.run(generate(served.url, prompts, new))  # the first compiles
                started = time.perf_counter()
                asyncio.run(generate(served.url, prompts, new))
                rate = count * new / (time.perf_counter() - started)
                figures[dtype] = {"rate_tokens_per_s": rate} | sleeping(served)
                print(dtype, figures[dtype], flush=True)

    return figures


def write_random(folder: Path, shape: str) -> Path:
    """Random weights of a shape, created on the device, and the tokenizer of the tiny models."""
    folder.mkdir(parents=True, exist_ok=True)
    device = choose_device("auto")
    make_model(shape, device, tokens=4096).bfloat16().save_pretrained(folder)
    write_tokenizer(folder)
    (folder / READY).touch()
    return folder


async def generate(url: str, prompts: list[list[int]], new: int) -> None:
    """All requests at once. Raises if one fails."""
    sampling = {"temperature": 1.0, "max_tokens": new, "logprobs": 1, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=url, timeout=300, trust_env=False) as http:
        replies = await asyncio.gather(
            *(
                http.post(
                    "/inference/v1/generate", json={"token_ids": ids, "sampling_params": sampling}
                )
                for ids in prompts
            )
        )
    for reply in replies:
        reply.raise_for_status()


def sleeping(served: Served) -> Figures:
    """Seconds to fall asleep and to wake up, and what is free on the GPU in between."""
    awake = free_gib()
    started = time.perf_counter()
    served.post("/sleep", admin=True).raise_for_status()
    asleep = time.perf_counter()
    freed = free_gib() - awake
    woken = time.perf_counter()
    served.post("/wake_up", admin=True).raise_for_status()
    figures = {"sleep_s": asleep - started, "wake_up_s": time.perf_counter() - woken}
    if on_gpu():
        figures["freed_gib"] = freed
        need(freed > 0.5, "at least 0.5 GiB freed", figures)
    return figures


def free_gib() -> float:
    """Free memory of the GPU, beside all its processes."""
    return torch.cuda.mem_get_info()[0] / 2**30 if on_gpu() else 0.0


def broadcast() -> Figures:
    """NCCL with one member: connecting and sending 0.5 GiB, then sending again. Two members cannot
    share a GPU."""
    if not on_gpu():
        raise Skip("NCCL needs a GPU")
    with tempfile.TemporaryDirectory() as folder:
        group = BroadcastGroup(
            directory=folder,
            group=folder,
            backend="nccl",
            rank=0,
            world_size=1,
            timeout=20.0,
            loopback=True,
        )
        tensors = {
            f"weight_{number}": torch.randn(SIDE, SIDE, device="cuda")
            for number in range(NUM_WEIGHTS)
        }
        header = header_of(tensors, dict.fromkeys(tensors, torch.bfloat16))
        seconds = []
        started = time.perf_counter()
        connection = connect(group, torch.device("cuda", 0))
        for _ in range(2):
            connection.send(header, iter(tensors.values()))
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
            started = time.perf_counter()
        connection.close()
        return {"first_s": seconds[0], "again_s": seconds[1]}
