"""Which tokens each loss component trains, and how many they are over one optimizer step.

Shapes: T = tokens of a row, C = components, E = envs of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from prime_rl.rollout import COMPONENTS, LossComponent, members
from prime_rl.trainer import parallel
from prime_rl.wire.micro_batch import MicroBatch

Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Counts:
    """Member tokens of one optimizer step: the loss's denominators."""

    envs: tuple[str, ...]
    """Of all ranks, sorted."""
    table: Ints
    """[C, E]"""
    num_tokens: int = 0
    """All tokens of all ranks' rows, members or not."""

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


def count_members(micro_batches: Sequence[MicroBatch]) -> Counts:
    """The counts of a step, over all its micro batches and all ranks: one exchange a step."""
    own = _count(micro_batches)
    if not parallel.several_ranks():
        return own
    told = parallel.gather((own.envs, own.table.tolist(), own.num_tokens))
    return _add([Counts(tuple(envs), np.array(table), number) for envs, table, number in told])


def _count(micro_batches: Sequence[MicroBatch]) -> Counts:
    """Of this rank."""
    envs = tuple(sorted({env for micro_batch in micro_batches for env in micro_batch.envs}))
    table = np.zeros((len(COMPONENTS), len(envs)), np.int64)
    for micro_batch in micro_batches:
        columns = np.array([envs.index(env) for env in micro_batch.envs])[micro_batch.env_ids]
        starts = np.cumsum(micro_batch.sequence_lengths) - micro_batch.sequence_lengths
        for number, name in enumerate(COMPONENTS):
            mask = members(micro_batch, name).astype(np.int64)
            np.add.at(table[number], columns, np.add.reduceat(mask, starts))
    return Counts(envs, table, sum(map(len, micro_batches)))


def _add(parts: Sequence[Counts]) -> Counts:
    """Ranks may hold different envs: the sum has the columns of all."""
    envs = tuple(sorted({env for part in parts for env in part.envs}))
    table = np.zeros((len(COMPONENTS), len(envs)), np.int64)
    for part in parts:
        table[:, [envs.index(env) for env in part.envs]] += part.table
    return Counts(envs, table, sum(part.num_tokens for part in parts))
