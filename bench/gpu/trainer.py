"""The trainer's step at the shape of Qwen3-0.6B, random weights, bfloat16: tokens/s, MFU and peak
memory, for one long sequence per micro batch and for packed short ones.

A step is two micro batches of 16,384 tokens, as in upstream's measurement, from micro batches on
the host to updated weights. Upstream's published figures for one H100 and one long sequence are
11,896 tokens/s, 11.1 % MFU, 12.5 GiB, with recomputed activations and offloading. In "long", every
token after a sequence's first is a target, as upstream; in "packed", half of each sequence. Figures
are medians of the timed steps. The first steps, which compile and reserve memory, are not timed.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from bench.gpu.device import Figures, Skip, finish, need, on_gpu
from bench.plan import gpu_request, planned
from bench.train_step import PolicyGradient
from prime_rl import PluginConfig
from prime_rl.config.trainer import TrainerConfig
from prime_rl.plugins.hookspecs import TRAINER_GROUP
from prime_rl.registry.components import installed_losses
from prime_rl.registry.manager import load_plugins
from prime_rl.registry.offers import make_kernel
from prime_rl.trainer.device import Precision, choose_device
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
        "vocab_size": 272,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    },
}
SETTINGS: dict[str, dict[str, Any]] = {
    "recompute": {"compile": False, "activation_checkpointing": 1},
    "plain": {"compile": False},
}
MICRO_BATCHES = 2
PLAN_ERROR = 0.15
"""Share by which a measured peak may differ from the planned one."""


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


def make_trainer(
    model: PreTrainedModel, config: TrainerConfig, num_steps: int, colocated: bool = False
) -> Trainer:
    """With a minimal loss, so that the bench measures the step."""
    return Trainer(
        model,
        installed_losses().with_rl(PolicyGradient(PluginConfig())),
        config,
        num_steps,
        kernel=make_kernel(config, load_plugins(TRAINER_GROUP)),
        colocated=colocated,
    )


def measure(
    shape: str, mix: str, tokens: int, settings: dict[str, Any], steps: int, warmup: int
) -> Figures:
    """Medians over ``steps``, after ``warmup`` steps, which take ``first_steps_s``."""
    device = choose_device("auto")
    dtype: Precision = "bfloat16"
    config = TrainerConfig(dtype=dtype, micro_batch_tokens=tokens, **settings)
    model = make_model(shape, device, tokens)
    trainer = make_trainer(model, config, num_steps=warmup + steps + 2)
    vocab = SHAPES[shape]["vocab_size"]
    batch = [make_micro_batch(mix, tokens, vocab=vocab, seed=seed) for seed in range(MICRO_BATCHES)]
    cost = model_cost(model)
    assert cost is not None
    with torch.no_grad():
        flops = sum(cost.of(trainer.forward(each)[0]) for each in batch)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)

    seconds = [timed(trainer, step, batch) for step in range(1, warmup + steps + 1)]
    median = statistics.median(seconds[warmup:])
    figures = {
        "rate_tokens_per_s": tokens * MICRO_BATCHES / median,
        "step_s": median,
        "first_steps_s": sum(seconds[:warmup]),
        "slowest_over_median": max(seconds[warmup:]) / median,
        "rate_tflops": flops / median / 1e12,
        "peak_gib": peak_memory(device),
    }
    share = mfu(flops, median, peak_flops(device, dtype))
    if share:  # the peak of the device is known
        figures["mfu_percent"] = share["perf/mfu"]
    if device.type == "cuda":
        figures["busy_percent"] = busy(trainer, warmup + steps + 1, batch)
    return figures


def busy(trainer: Trainer, step: int, batch: Sequence[MicroBatch]) -> float:
    """Percent of a step in which the GPU computes. The rest of the time it waits for the host,
    which starts its kernels. The log gets the kernels that take longest."""
    finish()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        seconds = timed(trainer, step, batch)
    averages = profile.key_averages()
    table = averages.table("self_cuda_time_total", row_limit=40, max_name_column_width=80)
    print(table, flush=True)

    on_device = (e for e in profile.events() if e.device_type.name == "CUDA")
    spans = sorted((each.time_range.start, each.time_range.end) for each in on_device)
    return union(spans) / 1e6 / seconds * 100


def union(spans: Iterable[tuple[float, float]]) -> float:
    """What sorted spans cover together: streams overlap."""
    covered = 0.0
    end = -math.inf
    for first, last in spans:
        covered += max(0.0, last - max(first, end))
        end = max(end, last)
    return covered


def timed(trainer: Trainer, step: int, batch: Sequence[MicroBatch]) -> float:
    """Seconds of one step, including the weight update."""
    started = time.perf_counter()
    trainer.train_step(step, batch)
    finish()
    return time.perf_counter() - started


# -- stages


def trainer() -> Figures:
    """Both mixes with and without recomputing; on a GPU, the peak of the recomputed long row beside
    that of ``prime-rl plan``, which is computed meanwhile."""
    shape, tokens = size()
    counts = (5, 2) if on_gpu() else (1, 1)
    figures: Figures = {}
    with ThreadPoolExecutor(1) as executor:
        request = gpu_request("Qwen3-0.6B", 1, tokens, SETTINGS["recompute"])
        plan = executor.submit(planned, request) if on_gpu() else None
        for mix in ("long", "packed"):
            figures[mix] = {
                name: measure_or_say(shape, mix, tokens, table, *counts)
                for name, table in SETTINGS.items()
            }
        if plan is not None:
            figures["planned_gib"] = plan.result()

    if on_gpu():
        peak = figures["long"]["recompute"].get("peak_gib", 0.0)
        ratio = peak / figures["planned_gib"]
        need(abs(ratio - 1) < PLAN_ERROR, f"a peak within {PLAN_ERROR:.0%} of plan's", figures)
    return figures


def size() -> tuple[str, int]:
    """The shape, and tokens of a row."""
    return ("qwen3-0.6b", 16_384) if on_gpu() else ("tiny", 256)


def measure_or_say(*arguments: Any) -> Figures:
    """``measure``; a setting that needs too much memory says so, and the others are measured."""
    try:
        figures = measure(*arguments)
    except torch.OutOfMemoryError as error:
        figures = {"failed": str(error).splitlines()[0][:100]}
    print(*arguments, figures, flush=True)
    gc.collect()  # graphs in cycles hold activations
    if on_gpu():
        torch.cuda.empty_cache()
    return figures


def compiled() -> Figures:
    """``trainer.compile`` on packed, recomputed rows."""
    if not on_gpu():
        raise Skip("compiling for the CPU says nothing of a GPU")
    shape, tokens = size()
    settings = {"compile": True, "activation_checkpointing": 1}
    return measure(shape, "packed", tokens, settings, steps=5, warmup=3)


def offload() -> Figures:
    """Taking turns: seconds to move weights and moments to the host and back, in three steps; and
    what is left on the GPU."""
    shape, _ = size()
    tokens = 2048 if on_gpu() else 128
    config = TrainerConfig(micro_batch_tokens=tokens, activation_checkpointing=1, compile=False)
    model = make_model(shape, torch.device("cpu"), tokens)
    trainer = make_trainer(model, config, num_steps=4, colocated=True)
    rows = [make_micro_batch("packed", tokens, SHAPES[shape]["vocab_size"], seed=0)]
    figures: Figures = {}
    for step in (1, 2, 3):
        loaded = trainer.memory.load()
        trainer.self_check()
        trainer.train_step(step, rows)
        figures[f"step_{step}"] = {"load_s": loaded, "unload_s": trainer.memory.unload()}

    devices = sorted({parameter.device.type for parameter in trainer.policy.parameters()})
    figures["weights_on"] = " ".join(devices)
    need(devices == ["cpu"], "weights on the host", figures)
    if on_gpu():
        figures["left_gib"] = torch.cuda.memory_allocated() / 2**30
        need(figures["left_gib"] < 0.1, "less than 0.1 GiB left", figures)
    return figures
