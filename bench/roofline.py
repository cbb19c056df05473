"""Where the time of the trainer's step goes on an H100, by the ledger of ``prime-rl plan``: nothing
runs on a GPU here.

    python -m bench roofline [--model Qwen3-0.6B] [--tokens 16384] [--seq-len 256] [--top 12]
                             [--only compiled]

One row and the weights' update, activations recomputed, with decoder blocks as they are, with
Triton kernels, compiled, and compiled with attention's output kept. ``least`` is the sum over
operations of their arithmetic at the peak rate or their bytes at the memory's bandwidth, whichever
is longer; ``arithmetic`` is that of products and attention alone. Their ratio says how far a step
is from its arithmetic, however well its kernels run.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Any

import torch

from bench.records import record
from prime_rl_plan import measure
from prime_rl_plan.devices import parse
from prime_rl_plan.ledger import NETWORK

LAYERS = (3, 5)
"""Measured; the rest is extrapolated."""
Key = tuple[str, str]
"""Operation, dtype."""
DEFAULTS = ("Qwen3-0.6B", 16_384)
"""Model, and tokens of a row: these figures are recorded."""
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"compile": False, "triton_kernels": False},
    "triton": {"compile": False},
    "compiled": {"compile": True},
    "kept": {"compile": True, "keep_attention": True},
}
"""Of computing the blocks: settings of ``[trainer]``."""


def request(model: str, tokens: int, seq_len: int, settings: dict[str, Any]) -> dict[str, Any]:
    """For ``prime_rl_plan.measure``: one full row of sequences of ``seq_len``."""
    table = json.loads((files("prime_rl_plan") / "models" / f"{model}.json").read_text("utf-8"))
    trainer = {"activation_checkpointing": 1, "loss": {"type": "default"}, **settings}
    return {
        "gpu": True,
        "memory": parse("1xH100-80").memory,
        "half": True,
        "ranks": 1,
        "rows": 2,
        "component": "rl",
        "row_tokens": tokens,
        "seq_len": seq_len,
        "model": table,
        "trainer": trainer | {"micro_batch_tokens": tokens},
    }


def seconds(costs: Iterable[Sequence[Any]]) -> tuple[Counter[Key], Counter[Key]]:
    """Least seconds, and those of the arithmetic, by operation."""
    gpu = parse("1xH100-80")
    least: Counter[Key] = Counter()
    arithmetic: Counter[Key] = Counter()
    for _, name, dtype, flops, moved, number in costs:
        if dtype == "host" or dtype.startswith(NETWORK):
            continue
        peak = gpu.bfloat16 if dtype == "bfloat16" else gpu.float32
        least[name, dtype] += number * max(flops / peak, moved / gpu.bandwidth)
        arithmetic[name, dtype] += number * flops / peak
    return least, arithmetic


def whole(model: str, tokens: int, seq_len: int, settings: dict[str, Any]) -> list[Counter[Key]]:
    """``seconds`` of all layers: on the line through two measurements."""
    asked = request(model, tokens, seq_len=seq_len, settings=settings)
    first, second = (seconds(measure.step(asked, layers)["costs"]) for layers in LAYERS)
    factor = (asked["model"]["num_hidden_layers"] - LAYERS[0]) / (LAYERS[1] - LAYERS[0])
    return [
        Counter({key: a[key] + factor * (b[key] - a[key]) for key in a | b})
        for a, b in zip(first, second, strict=True)
    ]


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Print a table for each way; the ratio of least seconds to arithmetic of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEFAULTS[0])
    parser.add_argument("--tokens", type=int, default=DEFAULTS[1], help="of a row")
    parser.add_argument("--seq-len", type=int, help="of a sequence (default: the row)")
    parser.add_argument("--top", type=int, default=12, help="operations that are listed")
    parser.add_argument("--only", choices=list(WAYS), action="append", help="default: all ways")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    length = chosen.seq_len or chosen.tokens
    ratios = {}
    for name in chosen.only or WAYS:
        least, arithmetic = whole(chosen.model, chosen.tokens, length, WAYS[name])
        total = sum(least.values())
        floor = sum(arithmetic.values())
        ratios[name] = total / floor
        prefix = f"roofline.{'whole' if length == chosen.tokens else f'of_{length}'}.{name}"
        if (chosen.model, chosen.tokens) == DEFAULTS:
            record(f"{prefix}.least", 1e3 * total, "ms")
            record(f"{prefix}.arithmetic", 1e3 * floor, "ms")
        print(
            f"{chosen.model}, {chosen.tokens} tokens of {length}, blocks {name}: least "
            f"{1e3 * total:.0f} ms, arithmetic {1e3 * floor:.0f} ms, {total / floor:.2f}x",
            flush=True,
        )
        for (operation, dtype), spent in least.most_common(chosen.top):
            print(f"    {operation:<44}{dtype:<10}{1e3 * spent:8.1f} ms")
    return ratios


if __name__ == "__main__":
    main()
