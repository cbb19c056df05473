"""One step's numbers, summed on the device and fetched once.

Shapes: T = tokens of a row, E = envs of a row.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prime_rl.plugins.errors import RunError
from prime_rl.trainer.loss import RowLoss
from prime_rl.trainer.row import COMPONENTS, Counts, Row


class StepMetrics:
    """Sums, counts and maxima of one optimizer step; only ``result`` waits for the device."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._sums: dict[str, Tensor] = {}
        self._numbers: dict[str, float] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, name: str, total: Tensor, number: float) -> None:
        """A part of a mean: a sum, and over how many."""
        self._sums[name] = self._sums[name] + total if name in self._sums else total
        self._numbers[name] = self._numbers.get(name, 0) + number

    def add_max(self, name: str, value: Tensor) -> None:
        """A candidate for a maximum."""
        known = self._maxima.get(name)
        self._maxima[name] = value if known is None else torch.maximum(known, value)

    @torch.no_grad()
    def observe(self, row: Row, logprobs: Tensor, entropies: Tensor, loss: RowLoss) -> None:
        """Take in one micro batch: its losses, its entropy, and the gap between π and μ."""
        self._observe_loss(loss)
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
        present = [name for name, number in self._numbers.items() if number]
        means = torch.stack([self._sums[name].float() for name in present])
        maxima = torch.stack(
            [value.float() for value in self._maxima.values()] or [means.new_zeros(())]
        )
        values = torch.cat([means, maxima]).tolist()
        metrics = {n: v / self._numbers[n] for n, v in zip(present, values, strict=False)}
        metrics |= dict(zip(self._maxima, values[len(present) :], strict=False))
        metrics |= {f"tokens/{name}": float(self._counts[name]) for name in COMPONENTS}
        return metrics

    def _observe_loss(self, loss: RowLoss) -> None:
        for name, part in loss.parts.items():
            self._sum(f"loss/{name}", part)
            self._sum("loss/mean", part)
        for metric, (total, number) in loss.metrics.items():
            self.add(metric, total, number)

    def _sum(self, name: str, part: Tensor) -> None:
        """A plain sum: a mean over one."""
        self.add(name, part, 0)
        self._numbers[name] = 1

    def _by_env(self, name: str, row: Row, values: Tensor, tokens: npt.NDArray[np.int64]) -> None:
        """Mean of ``values``, which belong to ``tokens``, over every env and over all together."""
        env_ids = row.env_ids[tokens]
        sums = values.new_zeros(len(row.envs))
        sums.index_add_(0, torch.from_numpy(env_ids).to(values.device), values)
        self.add(f"{name}/all/mean", sums.sum(), len(tokens))
        numbers = np.bincount(env_ids, minlength=len(row.envs))
        for env, total, number in zip(row.envs, sums, numbers.tolist(), strict=True):
            self.add(f"{name}/{env}/mean", total, number)


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
