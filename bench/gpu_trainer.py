"""The trainer's step at the shape of Qwen3-0.6B, random weights, bfloat16: tokens/s, MFU and peak
memory, for one long sequence per micro batch and for packed short ones.

    python -m bench.gpu_trainer                        on a GPU
    python -m bench.gpu_trainer --shape tiny --tokens 256    anywhere

A step is two micro batches of 16,384 tokens, as in upstream's measurement, from micro batches on
the host to updated weights. Upstream's published figures for one H100 and one long sequence are
11,896 tokens/s, 11.1 % MFU, 12.5 GiB, with recomputed activations (``--recompute 1``) and
offloading. Here each setting is a separate line. In "long", every token after a sequence's first is
a target, as upstream; in "packed", half of each sequence. Figures are medians of the timed steps.
The first steps, which compile and reserve memory, are not timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from bench.train_step import PolicyGradient
from prime_rl import PluginConfig
from prime_rl.config.trainer import TrainerConfig
from prime_rl.plugins.hookspecs import TRAINER_GROUP
from prime_rl.registry.components import installed_losses
from prime_rl.registry.manager import load_plugins
from prime_rl.registry.offers import make_kernel
from prime_rl.trainer.device import choose_device
from prime_rl.trainer.loop import Trainer
from prime_rl.wire import MicroBatch
from prime_rl_observers.device_usage import mfu, model_cost, peak_flops, peak_memory

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "tiny": {
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    },
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recompute": {"activation_checkpointing": 1},
    "compile": {"compile": True},
    "compile, recompute": {"compile": True, "activation_checkpointing": 1},
}
MICRO_BATCHES = 2


def make_model(shape: str, device: torch.device, tokens: int) -> PreTrainedModel:
    """Random weights and tied embeddings, created on the device."""
    torch.manual_seed(0)
    config = Qwen3Config(
        **SHAPES[shape], max_position_embeddings=max(tokens, 64), tie_word_embeddings=True
    )
    with torch.device(device):
        model = Qwen3ForCausalLM(config).eval()
    return model


def lengths_of(mix: str, tokens: int, rng: np.random.Generator) -> list[int]:
    """``long``: one sequence. ``packed``: a full row of short ones, 1/32 to 1/8 of the row each."""
    if mix == "long":
        return [tokens]
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(min(left, int(rng.integers(max(tokens // 32, 2), max(tokens // 8, 3)))))
    return lengths


def make_micro_batch(mix: str, tokens: int, vocab: int, seed: int) -> MicroBatch:
    """One full row. Targets: the second half of each sequence in ``packed``, all tokens but the
    first in ``long``."""
    rng = np.random.default_rng(seed)
    lengths = np.array(lengths_of(mix, tokens, rng), np.int32)
    mask = np.concatenate(
        [np.arange(each) >= (1 if mix == "long" else each // 2) for each in lengths]
    )
    return MicroBatch(
        token_ids=rng.integers(1, vocab, tokens).astype(np.int32),
        loss_mask=mask,
        inference_logprobs=np.where(mask, -np.log(vocab), 0.0).astype(np.float32),
        sequence_lengths=lengths,
        temperatures=np.ones(len(lengths), np.float32),
        env_ids=np.zeros(len(lengths), np.uint16),
        envs=("bench",),
        advantages=mask.astype(np.float32),
    )


def measure(
    shape: str, mix: str, tokens: int, settings: dict[str, Any], steps: int, warmup: int
) -> dict[str, float]:
    """Medians over ``steps``, after ``warmup`` steps."""
    device = choose_device("auto")
    config = TrainerConfig(dtype="bfloat16", micro_batch_tokens=tokens, **settings)
    model = make_model(shape, device, tokens)
    trainer = Trainer(
        model,
        installed_losses().with_rl(PolicyGradient(PluginConfig())),
        config,
        warmup + steps + 1,
        kernel=make_kernel(config, load_plugins(TRAINER_GROUP)),
    )
    vocab = SHAPES[shape]["vocab_size"]
    batch = [make_micro_batch(mix, tokens, vocab, seed) for seed in range(MICRO_BATCHES)]
    cost = model_cost(model)
    assert cost is not None
    with torch.no_grad():
        flops = sum(cost.of(trainer.forward(each)[0]) for each in batch)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = [timed(trainer, step, batch) for step in range(1, warmup + steps + 1)][warmup:]
    median, num_tokens = statistics.median(seconds), tokens * MICRO_BATCHES
    return mfu(flops, median, peak_flops(device, "bfloat16")) | {
        "perf/throughput": num_tokens / median,
        "step_seconds": median,
        "slowest_over_median": max(seconds) / median,
        "tflops": flops / median / 1e12,
        "peak_gib": peak_memory(device),
    }


def timed(trainer: Trainer, step: int, batch: Sequence[MicroBatch]) -> float:
    """Seconds of one step, including the weight update."""
    started = time.perf_counter()
    trainer.train_step(step, batch)
    if trainer.device.type == "cuda":
        torch.cuda.synchronize(trainer.device)
    return time.perf_counter() - started


def line(name: str, found: dict[str, float]) -> str:
    mfu = f"{found['perf/mfu']:.1f} % MFU" if "perf/mfu" in found else "MFU unknown here"
    return (
        f"{name:<28}{found['perf/throughput']:>10.0f} tokens/s  {mfu}, "
        f"{found['peak_gib']:.1f} GiB, {found['step_seconds']:.3f} s per step"
    )


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
    """Measure every mix with every setting. Prints a line for each, and JSON at the end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--tokens", type=int, default=16_384, help="per micro batch")
    parser.add_argument("--mixes", nargs="+", choices=("long", "packed"))
    parser.add_argument("--settings", nargs="+", choices=SETTINGS)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    chosen = parser.parse_args(arguments)
    device = choose_device("auto")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(
        f"{chosen.shape} on {name}, {MICRO_BATCHES} x {chosen.tokens} tokens per step", flush=True
    )
    figures = {}
    for mix in chosen.mixes or ("long", "packed"):
        for setting in chosen.settings or SETTINGS:
            label = f"{mix}, {setting}"
            table, counts = SETTINGS[setting], (chosen.steps, chosen.warmup)
            try:
                figures[label] = measure(chosen.shape, mix, chosen.tokens, table, *counts)
                print(line(label, figures[label]), flush=True)
            except torch.OutOfMemoryError as error:
                print(f"{label:<28} out of memory: {str(error).splitlines()[0]}", flush=True)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    print(json.dumps({"device": name, "torch": torch.__version__, "figures": figures}))
    return figures


if __name__ == "__main__":
    main()
