"""Metrics of losses, reduced to sums and counts per env, which add up over micro batches and ranks.

A metric is a mean over sequences. Nothing here waits for the device.

Shapes: T = tokens of the row, S = its sequences, E = its envs, M = metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prime_rl.errors import PluginError
from prime_rl.plugins.loss import LossOutputs, TokenMetric
from prime_rl.trainer.device import to_device
from prime_rl.trainer.packed_row import PackedRow, Share
from prime_rl.trainer.packing import Ints


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """One call of a loss function."""

    outputs: LossOutputs
    tokens: slice | Ints = field(default_factory=lambda: slice(None))
    """Where in the row the tokens lie that it saw."""
    sequence: int | None = None
    """The sequence it saw, or the first of several; None: the whole row."""


@dataclass(frozen=True, eq=False)
class MetricSums:
    """Some metrics of some envs."""

    names: tuple[str, ...]
    envs: tuple[str, ...]
    sums: Tensor
    """[M, E]"""
    numbers: Ints
    """[M, E] on the host: over how many."""


def reduce_calls(calls: Sequence[RecordedCall], row: PackedRow, share: Share) -> MetricSums | None:
    """Sums over the sequences with members; None: the loss reports nothing."""
    if not any(call.outputs.metrics for call in calls):
        return None
    if calls[0].sequence is None:
        return _of_row(calls[0].outputs, row, share)
    return _of_sequences(calls, row)


def _of_row(outputs: LossOutputs, row: PackedRow, share: Share) -> MetricSums:
    """Means of each sequence's tokens [M, S] -> sums over the sequences with members [M, E]."""
    num_sequences = len(row.lengths)
    stacked = []
    for name, metric in outputs.metrics.items():
        if not isinstance(metric, TokenMetric):
            raise PluginError(
                f"loss metric {name!r}: a token_wise loss sees all sequences at once, so its "
                f"metrics have to be TokenMetric, got {type(metric).__name__}. Wrap it, or set "
                "token_wise = False."
            )
        stacked.append(metric)

    masks = torch.stack([metric.mask for metric in stacked])
    values = torch.stack([metric.values.detach().float() for metric in stacked])
    sums = values.new_zeros(len(stacked), num_sequences)
    # `where`, not a product with the mask: 0 times an infinite value would be NaN.
    sums.index_add_(1, row.sequence_ids, values.where(masks, values.new_zeros(())))
    sizes = torch.zeros_like(sums).index_add_(1, row.sequence_ids, masks.float())

    # Sequences without members are added to a last column, which is dropped. By index, not by a
    # matrix of zeros and ones: an infinite mean stays with its own env.
    rest = len(row.envs)
    columns = np.full(num_sequences, rest)
    owners = row.sequence_envs[share.sequences]
    columns[share.sequences] = owners
    by_env = values.new_zeros(len(stacked), rest + 1)
    by_env.index_add_(1, to_device(columns, np.int64, sums.device), sums / sizes.clamp(min=1))

    numbers = np.bincount(owners, minlength=rest)
    return MetricSums(
        names=tuple(outputs.metrics),
        envs=row.envs,
        sums=by_env[:, :rest],
        numbers=np.broadcast_to(numbers, (len(stacked), rest)),
    )


def _of_sequences(calls: Sequence[RecordedCall], row: PackedRow) -> MetricSums:
    """0-dim metrics count once per call, 1-D ones once per entry."""
    names = tuple(dict.fromkeys(name for call in calls for name in call.outputs.metrics))
    numbers = np.zeros((len(names), len(row.envs)), np.int64)
    places: list[int] = []
    values = []

    for call in calls:
        assert call.sequence is not None
        env = int(row.sequence_envs[call.sequence])
        for name, metric in call.outputs.metrics.items():
            value, number = _one_sequence(name, metric)
            place = (names.index(name), env)
            numbers[place] += number
            places.append(int(np.ravel_multi_index(place, numbers.shape)))
            values.append(value.to(row.token_ids.device))

    stacked = torch.stack(values)
    sums = stacked.new_zeros(numbers.size)
    sums.index_add_(0, to_device(np.array(places), np.int64, sums.device), stacked)
    return MetricSums(names, row.envs, sums=sums.view(numbers.shape), numbers=numbers)


def _one_sequence(name: str, metric: Any) -> tuple[Tensor, int]:
    """A sum, 0-dim, and over how many."""
    if isinstance(metric, TokenMetric):
        values = metric.values.detach().float().where(metric.mask, 0.0)
        return values.sum() / metric.mask.sum().clamp(min=1), 1

    if not isinstance(metric, Tensor) or metric.dim() > 1:
        actual = f"shape {tuple(metric.shape)}" if isinstance(metric, Tensor) else type(metric)
        raise PluginError(
            f"loss metric {name!r}: expected a 0-dim tensor (a figure of the sequence), a 1-D one "
            f"or a TokenMetric, got {actual}. Reduce or wrap it."
        )

    return metric.detach().float().sum(), metric.numel()
