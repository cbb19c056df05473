"""One step's numbers, summed on the device and fetched once.

Shapes: M = metrics of a block, E = envs of a row.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from prime_rl.plugins.errors import RunError
from prime_rl.trainer.counts import Counts, Ints
from prime_rl.trainer.loss import RowLoss
from prime_rl.trainer.loss_metrics import MetricSums
from prime_rl.trainer.row import Row

Key: TypeAlias = tuple[tuple[str, ...], tuple[str, ...], str]
"""Names, envs and ``over_all`` of a block: blocks that agree on all three add up."""


class StepMetrics:
    """Sums, counts and maxima of one optimizer step; only ``result`` waits for the device."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._blocks: dict[Key, tuple[Tensor, Ints]] = {}
        self._plain: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, block: MetricSums) -> None:
        """Parts of means: sums, and over how many."""
        key = (block.names, block.envs, block.over_all)
        if key in self._blocks:
            sums, numbers = self._blocks[key]
            self._blocks[key] = (sums + block.sums, numbers + block.numbers)
        else:
            self._blocks[key] = (block.sums, block.numbers)

    def add_max(self, name: str, value: Tensor) -> None:
        """A candidate for a maximum."""
        known = self._maxima.get(name)
        self._maxima[name] = value if known is None else torch.maximum(known, value)

    @torch.no_grad()
    def observe(self, row: Row, logprobs: Tensor, entropies: Tensor, loss: RowLoss) -> None:
        """Take in one micro batch: its losses, its entropy, and the gap between π and μ."""
        for name, part in loss.parts.items():
            self._add_plain(f"loss/{name}", part)
            self._add_plain("loss/mean", part)
        for block in loss.metrics:
            self.add(block)
        if len(row.ratio_tokens):
            tokens = torch.from_numpy(row.ratio_tokens).to(logprobs.device)
            log_ratio = logprobs[tokens] - row.inference_logprobs[tokens]
            mismatch_kl = log_ratio.expm1() - log_ratio  # k3 estimator of KL(μ || π)
            self._by_env("mismatch_kl", row, mismatch_kl, row.ratio_tokens)
            self.add_max("mismatch_kl/all/max", mismatch_kl.max())
            self.add_max("logprob_gap/max", log_ratio.abs().max())
        if len(row.sampled_tokens):
            tokens = torch.from_numpy(row.sampled_tokens).to(logprobs.device)
            self._by_env("entropy", row, entropies[tokens], row.sampled_tokens)

    def result(self) -> dict[str, float]:
        """Every metric by name. Means over nothing are left out."""
        sums = [block for block, _ in self._blocks.values()]
        singles = {**self._plain, **self._maxima}
        tensors = [tensor.float().flatten() for tensor in (*sums, *singles.values())]
        values = torch.cat(tensors).tolist() if tensors else []
        metrics = {"loss/mean": 0.0} | self._means(values)
        metrics |= dict(zip(singles, values[len(values) - len(singles) :], strict=True))
        return metrics | self._counts.metrics()

    def _means(self, values: Sequence[float]) -> dict[str, float]:
        """Of the blocks, whose sums ``values`` begins with: over all envs, and each by itself."""
        means: dict[str, list[float]] = {}
        start = 0
        for (names, envs, over_all), (_, numbers) in self._blocks.items():
            for name, counts in zip(names, numbers.tolist(), strict=True):
                for env, number in zip(envs, counts, strict=True):
                    for label in (over_all.format(name), f"{name}/{env}/mean"):
                        mean = means.setdefault(label, [0.0, 0.0])
                        mean[0], mean[1] = mean[0] + values[start], mean[1] + number
                    start += 1
        return {label: total / number for label, (total, number) in means.items() if number}

    def _add_plain(self, name: str, part: Tensor) -> None:
        self._plain[name] = self._plain[name] + part if name in self._plain else part

    def _by_env(self, name: str, row: Row, values: Tensor, tokens: Ints) -> None:
        """Mean of ``values``, which belong to ``tokens``, over every env and over all together."""
        env_ids = row.env_ids[tokens]
        sums = values.new_zeros(len(row.envs))
        sums.index_add_(0, torch.from_numpy(env_ids).to(values.device), values)
        numbers = np.bincount(env_ids, minlength=len(row.envs))
        self.add(MetricSums((name,), row.envs, sums[None], numbers[None], "{}/all/mean"))


def peak_memory(device: torch.device) -> float:
    """Most memory held so far, in GiB: the device's, or this process's on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20


class MetricsFile:
    """``<run>/trainer.jsonl``: one line a step, on disk before the step's weights are announced."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write step ``step``'s line. Raises ``RunError`` if the disk refuses."""
        finite = {name: v if math.isfinite(v) else None for name, v in metrics.items()}
        line = json.dumps({"step": step, "time": time.time(), "metrics": finite})
        try:
            with self.path.open("a") as file:
                file.write(line + "\n")
        except OSError as error:
            raise RunError(f"step {step}: cannot write metrics to {self.path}: {error}") from error
