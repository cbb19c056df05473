"""What losses report, reduced to sums and counts by env: a mean over sequences is theirs to divide.

Nothing here waits for the device. Sums and counts add up over micro batches, and over ranks.

Shapes: T = tokens of the row, S = its sequences, E = its envs, M = metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prime_rl.errors import PluginError
from prime_rl.plugins.loss import LossOutputs, TokenMetric
from prime_rl.trainer.counts import Ints
from prime_rl.trainer.row import Component, Row
from prime_rl.trainer.transfer import to_device


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a loss function: which tokens it saw, and what it gave back."""

    outputs: LossOutputs
    start: int = 0
    """Index in the row of the first of them."""
    sequence: int | None = None
    """The one sequence they are; None: they are the whole row."""


@dataclass(frozen=True, eq=False)
class MetricSums:
    """Some metrics of some envs."""

    names: tuple[str, ...]
    envs: tuple[str, ...]
    sums: Tensor
    """[M, E]"""
    numbers: Ints
    """[M, E] on the host: over how many."""
    over_all: str = "{}"
    """What the mean over all envs is called; one env's is ``<name>/<env>/mean``."""


def reduce_calls(calls: Sequence[Call], row: Row, component: Component) -> MetricSums | None:
    """Sums over the sequences with members; None: the loss reports nothing."""
    if calls[0].sequence is None:
        return _of_row(calls[0].outputs, row, component)
    return _of_sequences(calls, row)


def _of_row(outputs: LossOutputs, row: Row, component: Component) -> MetricSums | None:
    """Means of each sequence's tokens [M, S] -> sums over the sequences with members [M, E]."""
    stacked = [_token_metric(name, metric) for name, metric in outputs.metrics.items()]
    if not stacked:
        return None
    masks = torch.stack([metric.mask for metric in stacked])
    values = torch.stack([metric.values.detach().float() for metric in stacked])
    sums = values.new_zeros(len(stacked), row.num_sequences)
    sums.index_add_(1, row.sequence_ids, values.where(masks, values.new_zeros(())))
    sizes = torch.zeros_like(sums).index_add_(1, row.sequence_ids, masks.float())
    # By index, not by a matrix of zeros and ones: an infinite mean stays with its own env.
    nobody = len(row.envs)
    columns = np.full(row.num_sequences, nobody)
    owners = row.sequence_envs[component.sequences]
    columns[component.sequences] = owners
    by_env = values.new_zeros(len(stacked), nobody + 1)
    by_env.index_add_(1, to_device(columns, np.int64, sums.device), sums / sizes.clamp(min=1))
    numbers = np.bincount(owners, minlength=nobody)
    return MetricSums(
        names=tuple(outputs.metrics),
        envs=row.envs,
        sums=by_env[:, :nobody],
        numbers=np.broadcast_to(numbers, (len(stacked), nobody)),
    )


def _token_metric(name: str, metric: Any) -> TokenMetric:
    if not isinstance(metric, TokenMetric):
        raise PluginError(
            f"loss metric {name!r}: a token_wise loss sees all sequences at once, so its "
            f"metrics have to be TokenMetric, got {type(metric).__name__}. Wrap it, or set "
            "token_wise = False."
        )
    return metric


def _of_sequences(calls: Sequence[Call], row: Row) -> MetricSums | None:
    """0-dim metrics count once a sequence, 1-D ones once an entry."""
    names = tuple(dict.fromkeys(name for call in calls for name in call.outputs.metrics))
    if not names:
        return None
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
    return MetricSums(names, row.envs, sums.view(numbers.shape), numbers)


def _one_sequence(name: str, metric: Any) -> tuple[Tensor, int]:
    """A sum, 0-dim, and over how many."""
    if isinstance(metric, TokenMetric):
        values = metric.values.detach().float().where(metric.mask, 0.0)
        return values.sum() / metric.mask.sum().clamp(min=1), 1
    if not isinstance(metric, Tensor) or metric.dim() > 1:
        found = f"shape {tuple(metric.shape)}" if isinstance(metric, Tensor) else type(metric)
        raise PluginError(
            f"loss metric {name!r}: expected a 0-dim tensor (a figure of the sequence), a 1-D one "
            f"or a TokenMetric, got {found}. Reduce or wrap it."
        )
    return metric.detach().float().sum(), metric.numel()
