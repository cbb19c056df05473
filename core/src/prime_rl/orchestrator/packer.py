"""Lay samples end to end in rows of bounded length: best-fit decreasing.

Longest sample first, each into the fullest row that still has room. Samples of any mix of
algorithms share a row: a stream that some of them carry is filled for the others with what its
absence means (rl 1.0, everything else 0.0).

``balance`` spreads the samples over several ranks: equally many rows and about equal work for each.

Shapes: T = tokens of a row, S = its sequences.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from prime_rl.config.run import RunConfig
from prime_rl.errors import StreamError
from prime_rl.orchestrator.balance import plan_ranks
from prime_rl.orchestrator.buffer import Batch
from prime_rl.plugins.manager import Hooks
from prime_rl.rollout import COLUMNS, STREAMS, Rollout, Sample, missing_stream
from prime_rl.wire import MicroBatch, encode_batch

FILL = {"rl_weights": 1.0}
"""The value of an absent stream that a sample of the same row carries; 0.0 for every other."""


def plan_rows(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of ``lengths`` by row, no row over ``capacity``. Raises ``StreamError`` if one alone
    is over it."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    if order and lengths[order[0]] > capacity:
        raise StreamError(
            f"sample {order[0]} has {lengths[order[0]]} tokens, a row holds {capacity}. Raise "
            "seq_len or trainer.micro_batch_tokens, or truncate before packing."
        )
    rows: list[list[int]] = []
    rooms: list[int] = []  # the distinct amounts of room, ascending: few, so bisection stays cheap
    with_room: dict[int, list[int]] = {}  # amount of room -> rows that have it
    for index in order:
        length = lengths[index]
        at = bisect_left(rooms, length)
        if at == len(rooms):
            row, room = len(rows), capacity
            rows.append([])
        else:
            room = rooms[at]
            row = with_room[room].pop()
            if not with_room[room]:
                del rooms[at], with_room[room]
        rows[row].append(index)
        if left := room - length:
            if left not in with_room:
                insort(rooms, left)
            with_room.setdefault(left, []).append(row)
    return rows


def pack(samples: Sequence[Sample], envs: Sequence[str], capacity: int) -> list[MicroBatch]:
    """Rows of at most ``capacity`` tokens; ``envs`` names each sample's env. Raises ``StreamError``
    for rl tokens without advantages and ref_kl tokens without reference."""
    (rows,) = pack_ranks(samples, envs, capacity)
    return rows


def pack_ranks(
    samples: Sequence[Sample],
    envs: Sequence[str],
    capacity: int,
    num_ranks: int = 1,
    attention_flops: float = 0.0,
) -> list[list[MicroBatch]]:
    """The rows of each rank, equally many. Raises as ``pack``."""
    for sample, env in zip(samples, envs, strict=True):
        if (missing := missing_stream(sample)) is not None:
            component, stream, number = missing
            raise StreamError(
                f"env {env!r}: {number} tokens of a sample train in the {component} component, but "
                f"it has no stream {stream!r}. The env's algorithm has to assign it, or to leave "
                f"the tokens out of {component}."
            )
    lengths = [len(sample) for sample in samples]
    rows = plan_rows(lengths, capacity)
    ranks = [rows]
    if num_ranks > 1:
        ranks = plan_ranks(rows, lengths, capacity, num_ranks, attention_flops)
    return [
        [
            _row([samples[i] for i in row], [envs[i] for i in row])
            if row
            else _idle_row(samples[0], envs[0])
            for row in own
        ]
        for own in ranks
    ]


def _row(samples: Sequence[Sample], envs: Sequence[str]) -> MicroBatch:
    names = sorted(set(envs))
    micro_batch = MicroBatch(
        token_ids=np.concatenate([s.token_ids for s in samples]),
        loss_mask=np.concatenate([s.loss_mask for s in samples]),
        inference_logprobs=np.concatenate([s.inference_logprobs for s in samples]),
        sequence_lengths=np.array([len(s) for s in samples], np.int32),
        temperatures=np.array([s.temperature for s in samples], np.float32),
        env_ids=np.array([names.index(env) for env in envs], np.uint16),
        envs=tuple(names),
        **{name: _stream(samples, name) for name in STREAMS},
    )
    micro_batch.check()
    return micro_batch


def _idle_row(sample: Sample, env: str) -> MicroBatch:
    """One token of no component: for a rank that is idle while the others train a row."""
    idle = Sample(
        token_ids=sample.token_ids[:1],
        loss_mask=np.zeros(1, np.bool_),
        inference_logprobs=np.zeros(1, np.float32),
    )
    return _row([idle], [env])


def _stream(samples: Sequence[Sample], name: str) -> npt.NDArray[Any] | None:
    columns = [getattr(sample, name) for sample in samples]
    if all(column is None for column in columns):
        return None
    fill = np.float32(FILL.get(name, 0.0))
    pairs = zip(samples, columns, strict=True)
    return np.concatenate([np.full(len(s), fill) if c is None else c for s, c in pairs])


def cut_samples(rollouts: Sequence[Rollout], limit: int) -> tuple[list[Sample], list[str]]:
    """Every sample of a batch, cut to ``limit`` tokens, and the env of each."""
    pairs = [(sample, rollout.env) for rollout in rollouts for sample in rollout.samples]
    return [truncate(sample, limit) for sample, _ in pairs], [env for _, env in pairs]


class Packer:
    """Packs every batch of one run: cut to ``seq_len``, in rows, spread over the ranks."""

    def __init__(self, config: RunConfig, num_ranks: int, hooks: Hooks) -> None:
        self._config, self._num_ranks, self._hooks = config, num_ranks, hooks
        self._num_truncated = 0

    def pack(self, batch: Batch) -> list[bytes]:
        """The batch as one frame per trainer rank. Calls ``batch_packed`` first."""
        limit, flops = self._config.seq_len, self._config.trainer.attention_flops
        lengths = (len(sample) for rollout in batch.kept for sample in rollout.samples)
        self._num_truncated += sum(length > limit for length in lengths)
        samples, envs = cut_samples(batch.kept, limit)
        self._hooks.batch_packed(batch.step, samples)
        capacity = self._config.row_tokens
        return batch_frames(batch.step, samples, envs, capacity, self._num_ranks, flops)

    def take_metrics(self) -> dict[str, float]:
        """Samples that were cut to ``seq_len`` since the last call."""
        found, self._num_truncated = self._num_truncated, 0
        return {"batch/truncated_samples": float(found)}


def batch_frames(
    step: int,
    samples: Sequence[Sample],
    envs: Sequence[str],
    capacity: int,
    num_ranks: int = 1,
    attention_flops: float = 0.0,
) -> list[bytes]:
    """A batch as it goes on the wire: one frame per trainer rank."""
    ranks = pack_ranks(samples, envs, capacity, num_ranks, attention_flops)
    return [encode_batch(step, rows) for rows in ranks]


def truncate(sample: Sample, limit: int) -> Sample:
    """The first ``limit`` tokens of a sample, in every column."""
    if len(sample) <= limit:
        return sample
    columns = {name: column for name in COLUMNS if (column := getattr(sample, name)) is not None}
    cut = {name: column[:limit] for name, column in columns.items()}
    return Sample(**cut, temperature=sample.temperature)
