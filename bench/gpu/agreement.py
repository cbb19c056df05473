"""Numbers: does the GPU compute what the CPU does, and how fast are attention and head alone?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from bench.gpu.device import Figures, clock, need, on_gpu
from bench.gpu.trainer import SHAPES, make_micro_batch, make_trainer
from prime_rl.config.trainer import TrainerConfig
from prime_rl.trainer import update
from prime_rl.trainer.parallel import full
from prime_rl_kernels import attention, gpu_check
from prime_rl_kernels.fused_head import fused_logprobs
from prime_rl_kernels.kernels import BLOCK_LOGITS

SIZES = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
ROW = 512
"""Tokens of a row of the parity check."""


@dataclass(frozen=True, eq=False)
class Step:
    """Of one training step, on the host in float32."""

    logprobs: Tensor
    """Of all targets."""
    gradients: dict[str, Tensor]
    packing: str


def parity() -> Figures:
    """The same step on CPU in float32, on the GPU in float32 and in bfloat16. Without a GPU: twice
    on the CPU, the second time one document after the other."""
    expected = take_step("cpu", "float32")
    if not on_gpu():
        alone = take_step("cpu", "float32", attention="mask")
        figures = {"float32": compare(expected, alone)}
    else:
        torch.backends.cuda.matmul.allow_tf32 = False
        full_step = take_step("cuda", "float32")
        half_step = take_step("cuda", "bfloat16")
        figures = {
            "float32": compare(expected, full_step),
            "bfloat16": compare(expected, half_step) | {"packing": half_step.packing},
        }
        need(figures["bfloat16"]["logprob_gap"] < 3e-2, "bfloat16 logprob_gap < 0.03", figures)
        need(figures["bfloat16"]["least_cosine"] > 0.995, "bfloat16 cosines > 0.995", figures)

    need(figures["float32"]["logprob_gap"] < 1e-4, "float32 logprob_gap < 1e-4", figures)
    need(figures["float32"]["largest_error"] < 1e-3, "float32 gradient errors < 1e-3", figures)
    return figures


def take_step(device: str, dtype: str, **settings: Any) -> Step:
    """Two packed rows. The weights are drawn on the CPU, so that they are the same everywhere."""
    torch.manual_seed(0)
    config = Qwen3Config(**SIZES, max_position_embeddings=1024, tie_word_embeddings=True)
    model = Qwen3ForCausalLM(config).eval().to(device)
    table = {"device": device, "dtype": dtype, "micro_batch_tokens": ROW, "compile": False}
    table["fused_lm_head"] = True
    trainer = make_trainer(model, TrainerConfig.model_validate(table | settings), num_steps=3)
    rows = [make_micro_batch("packed", ROW, SIZES["vocab_size"], seed) for seed in range(2)]

    logprobs = []
    with torch.no_grad():
        for micro_batch in rows:
            row, column, *_ = trainer.forward(micro_batch)
            ordered = np.empty(len(row.origins), np.float32)
            ordered[row.origins] = column.float().cpu().numpy()
            is_target = micro_batch.loss_mask & (micro_batch.position_ids > 0)
            logprobs.append(torch.from_numpy(ordered[is_target]))

    gradients: dict[str, Tensor] = {}
    take = update.BatchUpdate.optimizer_step

    def keep(self: Any, *arguments: Any) -> None:
        for name, parameter in trainer.model.named_parameters():
            gradients[name] = full(parameter.grad).float().cpu()
        take(self, *arguments)

    with mock.patch.object(update.BatchUpdate, "optimizer_step", keep):
        trainer.train_step(1, rows)

    return Step(torch.cat(logprobs), gradients, str(trainer.policy.packing))


def compare(expected: Step, step: Step) -> Figures:
    """The mean gap of log π; the largest relative error and the smallest cosine of a weight's
    gradient."""
    pairs = [(each, step.gradients[name]) for name, each in expected.gradients.items()]
    return {
        "logprob_gap": float((expected.logprobs - step.logprobs).abs().mean()),
        "largest_error": max(relative_error(each, found) for each, found in pairs),
        "least_cosine": min(
            float(torch.cosine_similarity(each.flatten(), found.flatten(), 0))
            for each, found in pairs
        ),
    }


def relative_error(expected: Tensor, found: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm().clamp(min=1e-12))


# -- kernels by themselves


def kernels() -> Figures:
    """The attention of a packed row in each way, beside one call for each document in float32:
    error, and milliseconds forward and of both passes. And the fused LM head, with and without the
    Triton kernels, all of which are compared with float64."""
    device = torch.device("cuda" if on_gpu() else "cpu")
    dtype = torch.bfloat16 if on_gpu() else torch.float32
    tokens, heads, groups, size = (16_384, 16, 8, 128) if on_gpu() else (512, 4, 2, 16)
    documents = attention.Documents(draw_lengths(tokens), device)
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(1, count, tokens, size, device=device, dtype=dtype, requires_grad=True)
        for count in (heads, groups, groups)
    )
    inputs = attention.Inputs(
        query, key, value=value, scaling=None, window=None, documents=documents
    )
    with torch.no_grad():
        wide = replace(inputs, query=query.float(), key=key.float(), value=value.float())
        expected = attention._varlen(wide)

    ways: dict[str, Callable[[attention.Inputs], Tensor]] = {
        "varlen": attention._varlen,
        "loop": loop,
    }
    if attention.has_flash_attention_3(device):
        ways["flash3"] = attention._flash3
    if tokens <= 4096:  # a mask of 16,384 x 16,384 would take longer than the stage
        ways["mask"] = attention._mask

    figures: Figures = {"documents": len(documents.lengths)}
    for name, way in ways.items():
        figures[name] = measure_attention(way, inputs, expected)
    figures["head"] = head_speed(device, triton=False)
    if on_gpu():
        figures["triton"] = {"fault": gpu_check.find_fault(device)}
        need(not figures["triton"]["fault"], "Triton kernels as exact as float64", figures)
        figures["triton_head"] = head_speed(device, triton=True)
    for name in ways:
        need(figures[name].get("error", 1) < 1e-2, f"an error of {name} below 0.01", figures[name])
    return figures


def draw_lengths(tokens: int) -> tuple[int, ...]:
    """Of documents that fill a row, longest first, as the trainer sorts them."""
    rng = np.random.default_rng(0)
    lengths: list[int] = []
    while left := tokens - sum(lengths):
        lengths.append(min(left, int(rng.integers(tokens // 64, tokens // 16))))
    return tuple(sorted(lengths, reverse=True))


def loop(inputs: attention.Inputs) -> Tensor:
    """The varlen attention without torch's kernel: a call for each run of equal lengths."""
    with mock.patch.object(attention, "_why_no_kernel", lambda query: "the bench asks for it"):
        return attention._varlen(inputs)


def measure_attention(
    way: Callable[[attention.Inputs], Tensor], inputs: attention.Inputs, expected: Tensor
) -> Figures:
    """A way that fails says why, and the others are measured."""
    columns = (inputs.query, inputs.key, inputs.value)
    try:
        with torch.no_grad():
            error = relative_error(expected, way(inputs))
            forward = clock(lambda: way(inputs), 5)
        both = clock(lambda: torch.autograd.grad(way(inputs).sum(), columns), 5)
    except Exception as error_:
        return {"failed": f"{type(error_).__name__}: {error_}"[:200]}
    return {"error": error, "forward_ms": 1e3 * forward, "both_ms": 1e3 * both}


def head_speed(device: torch.device, triton: bool) -> Figures:
    """Both passes of the fused head at Qwen3-0.6B's vocabulary, and their TFLOP/s: 8 N D V."""
    shape = SHAPES["qwen3-0.6b" if on_gpu() else "tiny"]
    tokens = 16_384 if on_gpu() else 64
    width = shape["hidden_size"]
    vocab = shape["vocab_size"]
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device=device, requires_grad=True)
    weight = (0.02 * torch.randn(vocab, width, device=device)).requires_grad_()
    labels = torch.randint(vocab, (tokens,), device=device)

    def run() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu()):
            logprobs, _ = fused_logprobs(
                hidden,
                weight,
                bias=None,
                temperatures=None,
                labels=labels,
                block_logits=BLOCK_LOGITS[device.type],
                triton=triton,
            )
        torch.autograd.grad(logprobs.sum(), (hidden, weight))

    seconds = clock(run, 3)
    return {"both_ms": 1e3 * seconds, "rate_tflops": 8 * tokens * width * vocab / seconds / 1e12}
