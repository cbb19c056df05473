"""How well the trainer uses its devices: operations of a row, share of the peak, memory.

The count is the work that the row's gradient needs: a shared prompt once; backward twice the
forward, or once for a frozen matrix, which needs no gradient of its own. Work that is repeated to
save memory does not count. With P = weights of the blocks' matrices (of a mixture's experts the
share that a token uses), U = tokens computed, N =
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
import resource
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from prime_rl import PluginConfig, TrainerObserver

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from prime_rl.trainer.loop import Trainer
    from prime_rl.trainer.packed_row import PackedRow
    from prime_rl.trainer.packing import Layout

logger = logging.getLogger("prime_rl.trainer.flops")

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


class DeviceUsage(TrainerObserver):
    """Reports ``perf/mfu``, the share of the devices' peak that the step's operations reach, in
    percent (left out where it is unknown), and ``perf/peak_memory`` in GiB."""

    name = "device_usage"

    def __init__(self, config: PluginConfig) -> None:
        super().__init__(config)
        self._flops = 0.0
        """Operations for this rank's rows in the step."""

    def started(self, trainer: Trainer, run_dir: Path) -> None:
        """Look up the model's operations and the device's peak."""
        self._device = trainer.device
        self._cost = model_cost(trainer.model)
        self._peak = peak_flops(trainer.device, trainer.dtype)

    def row_trained(self, step: int, *, row: PackedRow, **_: object) -> None:
        """Add the row's operations."""
        if self._cost is not None:
            self._flops += self._cost.of(row)

    def step_trained(self, step: int, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Over all ranks: the sum of the operations, and the largest memory. Ranks that compute a
        row together do its operations once."""
        from prime_rl.trainer import context, parallel

        usage = (self._flops, peak_memory(self._device))
        flops, memory = zip(*parallel.gather(usage), strict=True)
        self._flops = 0.0
        seconds = metrics["time/forward_backward"] * parallel.num_ranks()
        return mfu(sum(context.one_per_row(flops)), seconds, self._peak) | {
            "perf/peak_memory": max(memory)
        }


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
        """Operations of the row's forward and backward pass, without padding."""
        return (
            self.per_token * sum(num * queries for num, queries, _ in row.layout.runs)
            + self.per_target * len(row.targets)
            + sum(cost * num_pairs(row.layout, window) for window, cost in self.per_pair)
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
    from torch import nn

    config: Any = model.config
    if model._is_stateful:
        raise ValueError("it has recurrent layers")
    head = model.get_output_embeddings()
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    apart = {id(each) for module in (*tables, head) for each in module.parameters()}
    matrices = [
        each
        for name, each in model.named_parameters()
        # PEFT keeps what it replaced (modules_to_save) beside what takes its place.
        if id(each) not in apart and not name.endswith("bias") and ".original_module." not in name
    ]
    experts, used = _experts(config)
    stacked = _adapters_of_experts(model)
    of_experts = [
        each
        for each in matrices
        if id(each) in stacked or (each.dim() == 3 and len(each) == experts)
    ]
    if bool(experts) != bool(of_experts and used):
        raise ValueError("it has experts, of which a token uses only some")
    per_pair: Counter[int | None] = Counter()
    for window, width in _attention(config):
        per_pair[window] += 12 * width
    return Cost(
        per_token=float(
            sum(
                _share(each) * each.numel()
                for each in matrices
                if each.dim() == 2 and id(each) not in stacked
            )
            + sum(_share(each) * each.numel() * used / experts for each in of_experts)
        ),
        per_target=float(_share(head.weight) * head.weight.numel()),
        per_pair=tuple((window, float(cost)) for window, cost in per_pair.items()),
    )


def _adapters_of_experts(model: PreTrainedModel) -> set[int]:
    """Which parameters are PEFT's halves for all experts of a layer, in two dimensions."""
    wrappers: list[Any] = [each for each in model.modules() if hasattr(each, "parameter_name")]
    halves = (half for each in wrappers for half in (each.lora_A, each.lora_B))
    return {id(each) for half in halves for each in half.parameters()}


def _experts(config: Any) -> tuple[int, int]:
    """The experts of a layer, and how many of them a token uses; 0 for what is not there."""
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    sizes = [getattr(config, key, None) or 0 for key in keys]
    used = [getattr(config, key, None) or 0 for key in ("num_experts_per_tok", "top_k_experts")]
    return max(sizes), max(used)


def _share(weight: torch.Tensor) -> int:
    """Operations per weight and token."""
    return 6 if weight.requires_grad else 4


def _attention(config: Any) -> list[tuple[int | None, int]]:
    """Sliding window, and heads times head size, of every layer. Raises ``ValueError`` for another
    kind of layer."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    windows = {"sliding_attention": window, "full_attention": None}
    other = set(kinds or ()) - windows.keys()
    if other:
        raise ValueError(f"it has layers of another kind ({', '.join(sorted(other))})")
    layers = list(getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers)
    reach = [window] * len(layers) if kinds is None else [windows[kind] for kind in kinds]
    widths = []
    for layer in layers:  # Gemma 4's differ in it
        heads = layer.num_attention_heads
        size = getattr(layer, "head_dim", None) or layer.hidden_size // heads
        keys = getattr(layer, "qk_head_dim", None)
        if keys:  # DeepSeek's keys are wider than values
            size = (keys + layer.v_head_dim) / 2
        widths.append(int(heads * size))

    return list(zip(reach, widths, strict=True))


def num_pairs(layout: Layout, window: int | None) -> int:
    """Query-key pairs of all documents and their continuations."""
    return sum(num * _pairs(queries, keys, window) for num, queries, keys in layout.runs)


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
    import torch

    return peak_of(torch.cuda.get_device_name(device))


def peak_of(name: str) -> float | None:
    """By the device's name. Laptop GPUs share names with faster ones."""
    if "Laptop" in name:
        return None
    peaks = (peak for words, peak in PEAK_FLOPS.items() if re.search(rf"\b{words}\b", name))
    return next(peaks, None)


def mfu(flops: float, seconds: float, peak: float | None) -> dict[str, float]:
    """``perf/mfu`` in percent of the peak, if both are known. ``seconds``: of all devices."""
    return {"perf/mfu": 100 * flops / (seconds * peak)} if peak and flops else {}


def peak_memory(device: torch.device) -> float:
    """Most memory used so far, in GiB: on the device, or by this process on CPU."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20
