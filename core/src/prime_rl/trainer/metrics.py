"""An optimizer step's metrics: summed on the device, fetched once, the same on every rank.

    sums, maxima and values on the device -> one flat float32 tensor per rank, and entries that
    describe it -> all_gather of the entries (names differ by rank), then of the tensors, padded
    -> merged on the host

``loss/mean`` is the step's loss. ``loss/{median,std,min,max}`` are over its micro batches, of each
one's share times their number, so that their mean is the step's loss. ``entropy`` and
``mismatch_kl`` are over tokens. A value that a loss reports is a mean over sequences.
``policy_lag/N/...`` are means over the tokens that a policy N versions behind sampled; a batch of
one age has none.

Values are gathered whole, so that medians are exact over all ranks. That takes 8 bytes per trained
token and step (entropy and mismatch KL), 32 MB at four million tokens.

Shapes: M = metrics of a block, E = envs of a row.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prime_rl.errors import RunError
from prime_rl.plugins.loss import TokenMetric
from prime_rl.registry.calls import take_logged, weighted_means
from prime_rl.rundir.attempts import check_current
from prime_rl.trainer import context, parallel
from prime_rl.trainer.device import to_device
from prime_rl.trainer.loss import Counts, RowLoss
from prime_rl.trainer.loss_metrics import MetricSums
from prime_rl.trainer.packed_row import PackedRow
from prime_rl.trainer.packing import Ints

PAIRS = ("plugin/", "policy_lag/", "router/")
"""Metrics whose values are pairs: a mean, and its weight."""
Floats: TypeAlias = npt.NDArray[np.float64]
Entry: TypeAlias = tuple[Literal["mean", "sum", "max", "values"], str, str, int]
"""Kind, metric, env, and a number: the divisor of a mean, or how many elements the values have.
Every other kind has one element."""


@dataclass(kw_only=True)
class _Merged:
    """All ranks' entries."""

    means: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Sum and number by label."""
    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    values: dict[str, dict[str, list[Floats]]] = field(default_factory=dict)
    """By metric and env."""


class StepMetrics:
    """Sums, maxima and values of one optimizer step; only ``result`` waits for the device."""

    def __init__(self, counts: Counts) -> None:
        self.counts = counts
        self._device = torch.device("cpu")
        # Tensors stay on the device: fetching each number would make the host wait for every row.
        self._blocks: dict[tuple[tuple[str, ...], ...], tuple[Tensor, Ints]] = {}
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._values: list[tuple[Tensor, list[Entry]]] = []

    def add(self, block: MetricSums) -> None:
        """Parts of means: sums, and over how many."""
        key = (block.names, block.envs)
        if key not in self._blocks:
            self._blocks[key] = (block.sums, block.numbers)
            return

        sums, numbers = self._blocks[key]
        self._blocks[key] = (sums + block.sums, numbers + block.numbers)

    def add_max(self, name: str, value: Tensor) -> None:
        """A candidate for a maximum, over ranks too."""
        self._maxima[name] = torch.maximum(value, self._maxima.get(name, value))

    def add_sum(self, name: str, value: Tensor) -> None:
        """A part of a sum, over ranks too."""
        self._sums[name] = self._sums.get(name, 0.0) + value

    def add_mean(self, name: str, total: Tensor, number: Tensor) -> None:
        """A part of a mean over all rows and ranks: a sum, 0-dim, and over how many."""
        pair = torch.stack([total / number.clamp(min=1), number])
        self._values.append((pair, [("values", name, "", 2)]))

    @torch.no_grad()
    def observe(
        self, row: PackedRow, logprobs: Tensor, entropies: Tensor, loss: RowLoss, compared: Ints
    ) -> None:
        """Add one micro batch: its losses, its entropy, and the gap between π and μ at the tokens
        ``compared``."""
        self._device = logprobs.device
        for name, part in loss.parts.items():
            self.add_sum(f"loss/{name}", part)

        if loss.parts:
            share = torch.stack(list(loss.parts.values())).sum()
            self._values.append((share[None], [("values", "loss", "", 1)]))

        for block in loss.metrics:
            self.add(block)

        if len(compared):
            tokens, entries = self._by_env("mismatch_kl", row, compared)
            log_ratio = logprobs[tokens] - row.inference_logprobs[tokens]
            mismatch_kl = log_ratio.expm1() - log_ratio  # k3 estimator of KL(μ || π)
            self._values.append((mismatch_kl, entries))
            self.add_max("logprob_gap/max", log_ratio.abs().max())

        if row.policy_lag is not None:
            self._observe_lag(row, row.policy_lag, logprobs=logprobs, loss=loss, compared=compared)

        if len(row.sampled_tokens):
            tokens, entries = self._by_env("entropy", row, row.sampled_tokens)
            # Values and not their sum, because a median over all ranks is wanted, too.
            self._values.append((entropies[tokens], entries))

    def _observe_lag(
        self, row: PackedRow, lag: Ints, logprobs: Tensor, loss: RowLoss, compared: Ints
    ) -> None:
        """By versions between the policy that sampled a token and the one in training: the ratio of
        π to μ, their gap, and the share that the loss leaves out."""
        log_ratio = logprobs - row.inference_logprobs
        columns = {
            "importance_ratio": log_ratio.exp(),
            "mismatch_kl": log_ratio.expm1() - log_ratio,
        }

        for name, values in columns.items():
            self._add_by_lag(
                name, lag, tokens=compared, values=values, weights=torch.ones_like(values)
            )

        calls = [(call, call.outputs.metrics.get("is_masked")) for call in loss.calls]
        masked = [(call, metric) for call, metric in calls if isinstance(metric, TokenMetric)]
        if not masked:
            return

        places = np.arange(len(lag))
        tokens = np.concatenate([places[call.tokens] for call, _ in masked])
        at = to_device(tokens, np.int64, self._device)
        member = torch.cat([metric.mask for _, metric in masked])
        is_masked = torch.cat([metric.values for _, metric in masked])
        is_masked = is_masked.detach().to(logprobs.dtype)

        # Several losses may have seen one token: its values add up, as do its weights.
        weights = torch.zeros_like(logprobs)
        weights.index_add_(0, at, member.to(logprobs.dtype))
        values = torch.zeros_like(logprobs)
        values.index_add_(0, at, is_masked.where(member, 0.0))
        self._add_by_lag("is_masked", lag, tokens=np.unique(tokens), values=values, weights=weights)

    def _add_by_lag(
        self, name: str, lag: Ints, tokens: Ints, values: Tensor, weights: Tensor
    ) -> None:
        """The mean of ``values`` [T] at some tokens, by lag, and the sum of their ``weights``."""
        tokens = tokens[lag[tokens] >= 0]
        if not len(tokens):
            return

        lags, places = np.unique(lag[tokens], return_inverse=True)
        at = to_device(tokens, np.int64, self._device)
        place = to_device(places, np.int64, self._device)
        sums = values.new_zeros(len(lags)).index_add_(0, place, values[at])
        numbers = weights.new_zeros(len(lags)).index_add_(0, place, weights[at])

        # With its weight beside each mean, means of rows and ranks of any size can be averaged.
        pairs = torch.stack([sums / numbers.clamp(min=1), numbers], dim=1)
        names = [f"policy_lag/{each}/{name}" for each in lags.tolist()]
        self._values.append((pairs, [("values", each, "", 2) for each in names]))

    def _by_env(self, name: str, row: PackedRow, tokens: Ints) -> tuple[Tensor, list[Entry]]:
        """Some of a row's tokens, sorted by env, with the entries of one value per token."""
        env_ids = row.env_ids[tokens]
        numbers = np.bincount(env_ids, minlength=len(row.envs)).tolist()
        entries: list[Entry] = [
            ("values", name, env, n) for env, n in zip(row.envs, numbers, strict=True) if n
        ]
        # Entries are runs of elements, so the tokens of one env have to stand together.
        ordered = tokens[np.argsort(env_ids, kind="stable")]
        return to_device(ordered, np.int64, self._device), entries

    def result(self) -> dict[str, float]:
        """Every metric by name, over all ranks, all of which call this. Means over nothing are
        left out."""
        return summarize([self])

    @property
    def reported(self) -> set[str]:
        """Names of the metrics that losses report on any rank."""
        return {name for part, _ in self.gathered for kind, name, *_ in part if kind == "mean"}

    @cached_property
    def gathered(self) -> list[tuple[Sequence[Entry], Floats]]:
        """Every rank's entries and their elements on the host: two collectives, one transfer."""
        # What plugins have logged in this process since the step before joins its metrics here.
        for name, *pair in take_logged():  # a value, then its weight
            for x in pair:
                tensor = x if isinstance(x, Tensor) else torch.full((), x, device=self._device)
                self._values.append((tensor.to(self._device), [("values", name, "", 1)]))

        entries: list[Entry] = []
        for (names, envs), (_, numbers) in self._blocks.items():
            pairs = [(name, env) for name in names for env in envs]
            for (name, env), number in zip(pairs, numbers.ravel().tolist(), strict=True):
                entries.append(("mean", name, env, number))

        entries += [("sum", name, "", 1) for name in self._sums]
        entries += [("max", name, "", 1) for name in self._maxima]
        entries += [entry for _, columns in self._values for entry in columns]

        # In the order of the entries. Without any tensor, torch.cat needs an empty one.
        tensors = [torch.zeros(0, device=self._device)]
        tensors += [sums for sums, _ in self._blocks.values()]
        tensors += [*self._sums.values(), *self._maxima.values()]
        tensors += [values for values, _ in self._values]
        flat = torch.cat([tensor.detach().float().flatten() for tensor in tensors])
        if not parallel.several_ranks():
            return [(entries, flat.cpu().double().numpy())]

        # Ranks have different numbers of elements, and all_gather wants equal ones.
        described = parallel.gather((entries, len(flat)))
        longest = max(length for _, length in described)
        padded = torch.nn.functional.pad(flat, (0, longest - len(flat)))
        gathered = [torch.empty_like(padded) for _ in described]
        torch.distributed.all_gather(gathered, padded)

        rows = torch.stack(gathered).cpu().double().numpy()
        of_ranks: list[tuple[Sequence[Entry], Floats]] = [
            (entries, row) for (entries, _), row in zip(described, rows, strict=True)
        ]
        return [*context.one_per_row(of_ranks)]


def summarize(steps: Sequence[StepMetrics], epochs: int = 1) -> dict[str, float]:
    """The metrics of one or several optimizer steps of a batch. Losses are means over the steps, as
    each has denominators of its own; tokens are counted in the first of the ``epochs``."""
    # Every rank merges the same parts, so all have the same metrics without a further exchange.
    merged = _merge([part for step in steps for part in step.gathered])
    number = len(steps)
    # Taken out, so that `_distributions` sees values of tokens only.
    shares = np.concatenate(merged.values.pop("loss", {}).get("", [np.zeros(0)]))

    names = [name for name in merged.values if name.startswith(PAIRS)]
    logged = {name: np.concatenate(merged.values.pop(name)[""]) for name in names}
    lags = {name.split("/")[1] for name in names if name.startswith("policy_lag/")}
    if len(lags) == 1:  # a loss reads the policy lag of a batch in which all tokens have the same
        logged = {
            name: pairs for name, pairs in logged.items() if not name.startswith("policy_lag/")
        }

    weighted = [
        (name, value, weight)
        for name, pairs in logged.items()
        for value, weight in pairs.reshape(-1, 2)
    ]

    tokens: Counter[str] = Counter()
    for step in steps[: number // epochs]:
        tokens.update(step.counts.metrics())

    # A micro batch has a share of its step's loss. Times their number it is comparable with it.
    metrics = statistics(shares * (len(shares) / number), "loss")
    metrics["loss/mean"] = float(shares.sum()) / number
    # A mean over nothing has no number: 0.0 would look as if it had been measured.
    metrics |= _distributions(merged.values)
    metrics |= {label: total / count for label, (total, count) in merged.means.items() if count}
    metrics |= {name: total / number for name, total in merged.sums.items()}
    metrics |= merged.maxima
    metrics |= weighted_means(weighted)
    return metrics | tokens


def _merge(parts: Sequence[tuple[Sequence[Entry], Floats]]) -> _Merged:
    """Sums add up, maxima compete, values are joined."""
    merged = _Merged()
    for entries, elements in parts:
        start = 0
        for kind, name, env, number in entries:
            end = start + (number if kind == "values" else 1)
            values = elements[start:end]
            start = end

            if kind == "values":
                merged.values.setdefault(name, {}).setdefault(env, []).append(values)
                continue

            value = float(values[0])
            if kind == "mean":
                # Over all envs, and of this one.
                for label in (name, f"{name}/{env}/mean"):
                    total, count = merged.means.get(label, (0.0, 0))
                    merged.means[label] = (total + value, count + number)
            elif kind == "sum":
                merged.sums[name] = merged.sums.get(name, 0.0) + value
            else:  # NaN wins, as in torch.maximum
                merged.maxima[name] = float(np.maximum(merged.maxima.get(name, -np.inf), value))

    return merged


def _distributions(values: Mapping[str, Mapping[str, Sequence[Floats]]]) -> dict[str, float]:
    """``entropy/{all|ENV}/...`` and ``mismatch_kl/{all|ENV}/...`` over tokens, and the ratio of
    their means."""
    metrics: dict[str, float] = {}
    for name, by_env in values.items():
        columns = {env: np.concatenate(parts) for env, parts in by_env.items()}
        metrics |= statistics(np.concatenate(list(columns.values())), f"{name}/all")
        for env, column in columns.items():
            metrics |= statistics(column, f"{name}/{env}")

    entropy = metrics.get("entropy/all/mean")
    kl = metrics.get("mismatch_kl/all/mean")
    if entropy and kl is not None:
        metrics["kl_ent_ratio/mean"] = kl / entropy
    return metrics


def statistics(values: Floats, name: str) -> dict[str, float]:
    """``name/{mean,median,std,min,max}`` of some values (std: of the population); nothing of
    none."""
    if not len(values):
        return {}
    with np.errstate(all="ignore"):  # values that are not finite stay so, and are seen
        moments = {
            "mean": values.mean(),
            "median": np.median(values),
            "std": values.std(),
            "min": values.min(),
            "max": values.max(),
        }

    return {f"{name}/{key}": float(value) for key, value in moments.items()}


def append_metrics(path: Path, step: int, metrics: Mapping[str, float]) -> None:
    """Append a step's line to ``<run>/trainer.jsonl``. Raises ``RunError`` if the disk refuses."""
    finite = {
        name: value if math.isfinite(value) else None  # JSON has no NaN
        for name, value in metrics.items()
    }

    append_row(path, {"step": step, "time": time.time(), "metrics": finite})


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Append a line about ``row["step"]`` to a file of the run. Raises ``RunError`` if the disk
    refuses."""
    check_current()

    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    except OSError as error:
        raise RunError(
            f"cannot write the metrics of step {row['step']} to {path}: {error}. Free some space, "
            "then go on with --resume."
        ) from error
