"""Floating-point operations of a row, and the share of the device's peak that the trainer reaches.

The count is the work that the row's gradient needs: a shared prompt once; backward twice the
forward, or once for a frozen matrix, which needs no gradient of its own. Work that is repeated to
save memory does not count. With P = weights of the blocks' matrices, U = tokens computed, N =
targets, and pairs = queries times the keys each one sees (causal, within its own document and its
sliding window)::

    matrices    6 P U          (4 P U frozen)
    LM head     6 D V N        (4 D V N frozen)
    attention   12 * heads * head size * pairs, each layer

so that packed short documents do not count as one long one. Upstream counts 12 * layers * hidden *
T * T instead, without the causal half; for Qwen3-0.6B, whose heads together are twice the hidden
size, both come to the same.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from prime_rl.trainer.attention import Documents
from prime_rl.trainer.packed_row import PackedRow

logger = logging.getLogger(__name__)

PEAK_FLOPS: dict[str, float] = {
    "B200": 2250e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "RTX A6000": 154.8e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "RTX 5090": 209.5e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
}
"""Dense bfloat16 operations per second, sums in float32, by words of the device's name; the first
match counts. From the makers' data sheets."""


@dataclass(frozen=True)
class Cost:
    """Operations of a model's row, per unit."""

    per_token: float
    """6 P, or less where matrices are frozen."""
    per_target: float
    """6 D V, or 4 D V."""
    per_pair: tuple[tuple[int | None, float], ...]
    """Sliding window (None: all before), and 12 * heads * head size summed over its layers."""

    def of(self, row: PackedRow) -> float:
        """Operations of the row's forward and backward pass."""
        documents = row.layout.documents
        return (
            self.per_token * len(row.layout.token_ids)
            + self.per_target * len(row.targets)
            + sum(cost * num_pairs(documents, window) for window, cost in self.per_pair)
        )


def model_cost(model: PreTrainedModel) -> Cost | None:
    """None, with a line in the log, for a model whose operations this module cannot count."""
    try:
        return _cost(model)
    except Exception as error:  # configs raise all sorts of errors; none may stop a run
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        logger.info("no perf/mfu for %s: %s", type(model).__name__, reason)
        return None


def _cost(model: PreTrainedModel) -> Cost:
    config: Any = model.config
    experts = ("num_experts", "num_local_experts", "n_routed_experts")
    if any(getattr(config, name, None) for name in experts):
        raise ValueError("it has experts, of which a token uses only some")
    if model._is_stateful:
        raise ValueError("it has recurrent layers")
    head = model.get_output_embeddings()
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    apart = {id(each) for module in (*tables, head) for each in module.parameters()}
    matrices = [
        each
        for name, each in model.named_parameters()
        # PEFT keeps what it replaced (modules_to_save) beside what takes its place.
        if each.dim() == 2 and id(each) not in apart and ".original_module." not in name
    ]
    per_pair: Counter[int | None] = Counter()
    for window, width in _attention(config):
        per_pair[window] += 12 * width
    return Cost(
        per_token=float(sum(_share(each) * each.numel() for each in matrices)),
        per_target=float(_share(head.weight) * head.weight.numel()),
        per_pair=tuple((window, float(cost)) for window, cost in per_pair.items()),
    )


def _share(weight: torch.Tensor) -> int:
    """Operations per weight and token."""
    return 6 if weight.requires_grad else 4


def _attention(config: Any) -> list[tuple[int | None, int]]:
    """Sliding window, and heads times head size, of every layer. Raises ``ValueError`` for another
    kind of layer."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    windows = {"sliding_attention": window, "full_attention": None}
    if other := set(kinds or ()) - windows.keys():
        raise ValueError(f"it has layers of another kind ({', '.join(sorted(other))})")
    layers = list(getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers)
    reach = [window] * len(layers) if kinds is None else [windows[kind] for kind in kinds]
    widths = []
    for layer in layers:  # Gemma 4's differ in it
        heads = layer.num_attention_heads
        size = getattr(layer, "head_dim", None) or layer.hidden_size // heads
        widths.append(int(heads * size))
    return list(zip(reach, widths, strict=True))


def num_pairs(documents: Documents, window: int | None) -> int:
    """Query-key pairs of all documents and their continuations."""
    whole = sum(num * _pairs(length, length, window) for num, length in documents.runs)
    return whole + sum(
        run.num * _pairs(run.num_queries, run.num_keys, window) for run in documents.continuations
    )


def _pairs(queries: int, keys: int, window: int | None) -> int:
    """The queries are the last of the keys; each sees those up to its own, at most ``window``."""
    first = keys - queries + 1  # keys that the first query sees
    if window is None or window >= keys:
        return queries * (first + keys) // 2
    growing = max(0, window - first)  # queries that see less than the window
    return growing * (first + window - 1) // 2 + (queries - growing) * window


def peak_flops(device: torch.device, dtype: Literal["float32", "bfloat16"]) -> float | None:
    """The device's peak in operations per second; None if it is unknown."""
    if device.type != "cuda" or dtype != "bfloat16":
        return None
    return peak_of(torch.cuda.get_device_name(device))


def peak_of(name: str) -> float | None:
    """By the device's name. Laptop GPUs share names with faster ones."""
    if "Laptop" in name:
        return None
    found = (peak for words, peak in PEAK_FLOPS.items() if re.search(rf"\b{words}\b", name))
    return next(found, None)


def perf_metrics(
    num_tokens: int, flops: float, seconds: float, num_ranks: int, peak: float | None
) -> dict[str, float]:
    """``perf/throughput`` (tokens per second of forward, backward and clipping, over all ranks),
    the same per rank, and ``perf/mfu`` in percent of the peak, if both are known."""
    metrics = {
        "perf/throughput": num_tokens / seconds,
        "perf/throughput_per_gpu": num_tokens / seconds / num_ranks,
    }
    if peak and flops:
        metrics["perf/mfu"] = 100 * flops / (seconds * num_ranks * peak)
    return metrics
