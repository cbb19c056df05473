"""One step's numbers: kept on the device, fetched once, the same on every rank.

``loss/mean`` is the step's loss. ``loss/{median,std,min,max}`` are over its micro batches, of each
one's share times their number: their mean is the step's loss, too. ``entropy`` and ``mismatch_kl``
are over tokens. What losses report is a mean over sequences.

Shapes: M = metrics of a block, E = envs of a row.
"""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from prime_rl.trainer.counts import Counts, Ints
from prime_rl.trainer.loss import RowLoss
from prime_rl.trainer.loss_metrics import MetricSums
from prime_rl.trainer.reduction import (
    Columns,
    Description,
    Merged,
    gather,
    merge,
    statistics,
)
from prime_rl.trainer.row import Row
from prime_rl.trainer.transfer import to_device

Key: TypeAlias = tuple[tuple[str, ...], tuple[str, ...], str]
"""Names, envs and ``over_all`` of a block: blocks that agree on all three add up."""

SHARES = "loss"
"""The column with each micro batch's share of the loss."""


@dataclass(frozen=True, eq=False)
class ByEnv:
    """Tokens of a row, those of one env side by side."""

    tokens: Ints
    """[N] on the host: indices into the row."""
    counts: tuple[tuple[str, int], ...]
    """Env and number of its tokens, in their order."""

    def columns(self, name: str) -> Columns:
        """The labels of one value a token."""
        return tuple((f"{name}/{env}", number) for env, number in self.counts)


def by_env(row: Row, tokens: Ints) -> ByEnv:
    """Sort some of a row's tokens by their env."""
    env_ids = row.env_ids[tokens]
    numbers = np.bincount(env_ids, minlength=len(row.envs)).tolist()
    counts = tuple(pair for pair in zip(row.envs, numbers, strict=True) if pair[1])
    return ByEnv(tokens[np.argsort(env_ids, kind="stable")], counts)


class StepMetrics:
    """Sums, maxima and values of one optimizer step; only ``result`` waits for the device."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._device = torch.device("cpu")
        self._blocks: dict[Key, tuple[Tensor, Ints]] = {}
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._values: list[tuple[Tensor, Columns]] = []
        self._host_sums: dict[str, float] = {}
        self._host_maxima: dict[str, float] = {}

    def add(self, block: MetricSums) -> None:
        """Parts of means: sums, and over how many."""
        key = (block.names, block.envs, block.over_all)
        if key in self._blocks:
            sums, numbers = self._blocks[key]
            self._blocks[key] = (sums + block.sums, numbers + block.numbers)
        else:
            self._blocks[key] = (block.sums, block.numbers)

    def add_max(self, name: str, value: Tensor | float) -> None:
        """A candidate for a maximum, over ranks too."""
        if not isinstance(value, Tensor):
            self._host_maxima[name] = max(value, self._host_maxima.get(name, value))
            return
        known = self._maxima.get(name)
        self._maxima[name] = value if known is None else torch.maximum(known, value)

    def add_sum(self, name: str, value: Tensor | float) -> None:
        """A part of a sum, over ranks too."""
        if not isinstance(value, Tensor):
            self._host_sums[name] = self._host_sums.get(name, 0.0) + value
        else:
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    @torch.no_grad()
    def observe(self, row: Row, logprobs: Tensor, entropies: Tensor, loss: RowLoss) -> None:
        """Take in one micro batch: its losses, its entropy, and the gap between π and μ."""
        self._device = logprobs.device
        for name, part in loss.parts.items():
            self.add_sum(f"loss/{name}", part)
        if loss.parts:
            share = torch.stack(list(loss.parts.values())).sum()
            self._values.append((share[None], ((SHARES, 1),)))
        for block in loss.metrics:
            self.add(block)
        if len(row.ratio_tokens):
            sorted_tokens = by_env(row, row.ratio_tokens)
            tokens = to_device(sorted_tokens.tokens, np.int64, self._device)
            log_ratio = logprobs[tokens] - row.inference_logprobs[tokens]
            mismatch_kl = log_ratio.expm1() - log_ratio  # k3 estimator of KL(μ || π)
            self._values.append((mismatch_kl, sorted_tokens.columns("mismatch_kl")))
            self.add_max("logprob_gap/max", log_ratio.abs().max())
        if len(row.sampled_tokens):
            sorted_tokens = by_env(row, row.sampled_tokens)
            chosen = entropies[to_device(sorted_tokens.tokens, np.int64, self._device)]
            self._values.append((chosen, sorted_tokens.columns("entropy")))

    def result(self) -> dict[str, float]:
        """Every metric by name, over all ranks, each of which calls this once. Means over nothing
        are left out."""
        merged = merge(gather(self._description(), self._flat()))
        shares = merged.columns.pop(SHARES, np.zeros(0))
        means = {label: total / n for label, (total, n) in merged.means.items() if n}
        return (
            statistics(shares * len(shares), SHARES)
            | {"loss/mean": float(shares.sum())}
            | _distributions(merged)
            | means
            | merged.sums
            | merged.maxima
            | self._counts.metrics()
        )

    def _description(self) -> Description:
        means = []
        for (names, envs, over_all), (_, numbers) in self._blocks.items():
            for name, counts in zip(names, numbers.tolist(), strict=True):
                for env, number in zip(envs, counts, strict=True):
                    means.append(((over_all.format(name), f"{name}/{env}/mean"), number))
        return Description(
            means=tuple(means),
            sums=tuple(self._sums),
            maxima=tuple(self._maxima),
            columns=tuple(column for _, columns in self._values for column in columns),
            on_host=tuple(self._host_sums.items()),
            on_host_maxima=tuple(self._host_maxima.items()),
        )

    def _flat(self) -> Tensor:
        """Everything on the device, in the order of the description."""
        sums = [block for block, _ in self._blocks.values()]
        values = [tensor for tensor, _ in self._values]
        tensors = [*sums, *self._sums.values(), *self._maxima.values(), *values]
        flat = [tensor.detach().float().flatten() for tensor in tensors]
        return torch.cat([torch.zeros(0, device=self._device), *flat])


def _distributions(merged: Merged) -> dict[str, float]:
    """``entropy/{all|ENV}/...`` and ``mismatch_kl/{all|ENV}/...`` over tokens, and the ratio of
    their means."""
    metrics: dict[str, float] = {}
    for name in ("entropy", "mismatch_kl"):
        own = {key: column for key, column in merged.columns.items() if key.startswith(f"{name}/")}
        if own:
            metrics |= statistics(np.concatenate(list(own.values())), f"{name}/all")
        for label, column in own.items():
            metrics |= statistics(column, label)
    entropy, kl = metrics.get("entropy/all/mean"), metrics.get("mismatch_kl/all/mean")
    if entropy and kl is not None:
        metrics["kl_ent_ratio/mean"] = kl / entropy
    return metrics


def peak_memory(device: torch.device) -> float:
    """Most memory held so far, in GiB: the device's, or this process's on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20


def disk_metrics(folder: Path) -> dict[str, float]:
    """``system/ckpt_disk_...`` of the disk that weights and checkpoints go to, in GiB; nothing if
    it does not tell."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return {}
    name = "system/ckpt_disk"
    sizes = {"free": usage.free, "used": usage.used, "total": usage.total}
    found = {f"{name}_{key}_gib": size / 2**30 for key, size in sizes.items()}
    return found | {f"{name}_free_ratio": usage.free / usage.total if usage.total else 0.0}


def console_line(step: int, max_steps: int, metrics: Mapping[str, float]) -> str:
    """``Step 3/180 | 0.71s | Loss ...``: one step for the trainer's log."""
    mfu = metrics.get("perf/mfu")
    return " | ".join(
        [
            f"Step {step}/{max_steps}",
            f"{metrics['time/step']:.2f}s",
            f"Loss {metrics['loss/mean']:.4f}",
            f"Entropy {metrics.get('entropy/all/mean', math.nan):.4f}",
            f"Mismatch KL {metrics.get('mismatch_kl/all/mean', math.nan):.2e}",
            f"Grad. Norm {metrics['optim/grad_norm']:.4f}",
            f"LR {metrics['optim/lr']:.2e}",
            f"Throughput {metrics['perf/throughput']:.0f} tokens/s",
            *([] if mfu is None else [f"MFU {mfu:.1f}%"]),
            f"Peak Mem. {metrics['perf/peak_memory']:.1f} GiB",
        ]
    )


class MetricsFile:
    """``<run>/trainer.jsonl``: one line a step, on disk before the step's weights are announced."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write step ``step``'s line. Raises ``OSError`` if the disk refuses; what it took of the
        line is gone again, so that trying again adds it once."""
        finite = {name: v if math.isfinite(v) else None for name, v in metrics.items()}
        line = json.dumps({"step": step, "time": time.time(), "metrics": finite})
        size = self.path.stat().st_size if self.path.exists() else 0
        try:
            with self.path.open("a") as file:
                file.write(line + "\n")
        except OSError as error:
            with suppress(OSError):
                os.truncate(self.path, size)
            raise OSError(f"cannot write metrics to {self.path}: {error}") from error
