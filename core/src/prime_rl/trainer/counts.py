"""Which tokens each loss component trains, and how many they are over one optimizer step.

Shapes: T = tokens of a row, C = components, E = envs of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import torch

from prime_rl.plugins.base import LossComponent
from prime_rl.rollout import BoolColumn
from prime_rl.wire.micro_batch import MicroBatch

COMPONENTS: tuple[LossComponent, ...] = get_args(LossComponent)

Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Counts:
    """Member tokens of one optimizer step: the loss's denominators."""

    envs: tuple[str, ...]
    """Of all ranks, sorted."""
    table: Ints
    """[C, E]"""

    @property
    def totals(self) -> Mapping[LossComponent, int]:
        """Members of each component, over all envs."""
        return dict(zip(COMPONENTS, self.table.sum(1).tolist(), strict=True))

    def of_env(self, component: LossComponent, env: str) -> int:
        """Members of one component that one env brought."""
        return int(self.table[COMPONENTS.index(component), self.envs.index(env)])

    def metrics(self) -> dict[str, float]:
        """``tokens/<component>``, and ``tokens/<component>/<env>`` where there are any."""
        named = {f"tokens/{name}": float(total) for name, total in self.totals.items()}
        for name, row in zip(COMPONENTS, self.table.tolist(), strict=True):
            pairs = zip(self.envs, row, strict=True)
            named |= {f"tokens/{name}/{env}": float(number) for env, number in pairs if number}
        return named


def members(micro_batch: MicroBatch, component: LossComponent) -> BoolColumn:
    """[T] the tokens a component trains: those its weight stream does not leave at zero.

    Without a stream, rl trains every sampled token and the others nothing.
    """
    weights = getattr(micro_batch, f"{component}_weights")
    if component == "rl":
        return micro_batch.loss_mask if weights is None else micro_batch.loss_mask & (weights != 0)
    return np.zeros(len(micro_batch), np.bool_) if weights is None else weights != 0


def count_members(micro_batches: Sequence[MicroBatch]) -> Counts:
    """The counts of a step, over all its micro batches and all ranks.

    Ranks may hold different envs: they agree on the columns first, then add up the whole table in
    one collective.
    """
    envs = _agree({env for micro_batch in micro_batches for env in micro_batch.envs})
    table = np.zeros((len(COMPONENTS), len(envs)), np.int64)
    for micro_batch in micro_batches:
        columns = np.array([envs.index(env) for env in micro_batch.envs])[micro_batch.env_ids]
        starts = np.cumsum(micro_batch.sequence_lengths) - micro_batch.sequence_lengths
        for number, name in enumerate(COMPONENTS):
            mask = members(micro_batch, name).astype(np.int64)
            np.add.at(table[number], columns, np.add.reduceat(mask, starts))
    if _several_ranks():
        torch.distributed.all_reduce(torch.from_numpy(table))  # in place
    return Counts(envs, table)


def _agree(envs: set[str]) -> tuple[str, ...]:
    """Every rank's envs, in one order for all."""
    if _several_ranks():
        gathered: list[set[str]] = [set()] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(gathered, envs)
        envs = set().union(*gathered)
    return tuple(sorted(envs))


def _several_ranks() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
