"""Lay samples end to end in rows of bounded length: best-fit decreasing.

Longest sample first, each into the fullest row that still has room; rows are kept by their room, so
one is found by bisection over the distinct amounts. Samples of any mix of algorithms share a row: a
stream that some member carries is filled for the others with what its absence means (rl 1.0,
everything else 0.0).

For several ranks, samples are spread over as many rows for each, so that all take about as long:
``balance.py``.

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
"""What an absent stream means where a neighbour carries it; every other stream means 0.0."""


def plan_rows(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of ``lengths`` by row, no row over ``capacity``. Raises ``StreamError`` if one alone
    is over it."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    if order and lengths[order[0]] > capacity:
        raise StreamError(
            f"sample {order[0]} has {lengths[order[0]]} tokens, a row holds {capacity}. Raise "
            "seq_len or "
            "trainer.micro_batch_tokens, or truncate before packing."
        )
    rows: list[list[int]] = []
    frees: list[int] = []  # the distinct amounts of room, ascending
    with_room: dict[int, list[int]] = {}  # amount of room -> rows that have it
    for index in order:
        length = lengths[index]
        at = bisect_left(frees, length)
        if at == len(frees):
            row, free = len(rows), capacity - length
            rows.append([index])
        else:
            free = frees[at]
            row = with_room[free].pop()
            if not with_room[free]:
                del frees[at], with_room[free]
            rows[row].append(index)
            free -= length
        if free:
            if free not in with_room:
                insort(frees, free)
            with_room.setdefault(free, []).append(row)
    return rows


def pack(samples: Sequence[Sample], envs: Sequence[str], capacity: int) -> list[MicroBatch]:
    """Rows of at most ``capacity`` tokens; ``envs`` names each sample's env. Columns stay aligned
    (asserted). Raises ``StreamError`` for rl tokens without advantages and ref_kl tokens without
    reference."""
    (rows,) = pack_ranks(samples, envs, capacity)
    return rows


def pack_ranks(
    samples: Sequence[Sample],
    envs: Sequence[str],
    capacity: int,
    num_ranks: int = 1,
    attention_flops: float = 0.0,
) -> list[list[MicroBatch]]:
    """The rows of each rank, as many for one as for another. Raises as ``pack``."""
    for sample, env in zip(samples, envs, strict=True):
        _check_complete(sample, env)
    lengths = [len(sample) for sample in samples]
    rows = plan_rows(lengths, capacity)
    if num_ranks == 1:
        ranks = [rows]
    else:
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


def _check_complete(sample: Sample, env: str) -> None:
    """Nothing trains on a guess: the fill is for tokens on which no component reads the stream."""
    if (missing := missing_stream(sample)) is not None:
        component, stream, number = missing
        raise StreamError(
            f"env {env!r}: {number} tokens of a sample train in the {component} component, but it "
            f"has no stream {stream!r}. The env's algorithm has to assign it, or to leave the "
            f"tokens out of {component}."
        )


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
    """A row for a rank that has nothing to do while the others train: one token of no component."""
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
    return np.concatenate(
        [
            np.full(len(sample), fill, np.float32) if column is None else column
            for sample, column in zip(samples, columns, strict=True)
        ]
    )


def cut_samples(rollouts: Sequence[Rollout], limit: int) -> tuple[list[Sample], list[str]]:
    """Every sample of a batch, cut to ``limit`` tokens, and the env of each."""
    pairs = [(sample, rollout.env) for rollout in rollouts for sample in rollout.samples]
    return [truncate(sample, limit) for sample, _ in pairs], [env for _, env in pairs]


class Packer:
    """Packs every batch of one run: cut to ``seq_len``, laid in rows, spread over the ranks."""

    def __init__(self, config: RunConfig, num_ranks: int, hooks: Hooks) -> None:
        self._config, self._num_ranks, self._hooks = config, num_ranks, hooks
        self._num_truncated = 0

    def pack(self, batch: Batch) -> list[bytes]:
        """The batch as one frame per trainer rank. Plugins see its samples first."""
        limit = self._config.seq_len
        lengths = (len(sample) for rollout in batch.kept for sample in rollout.samples)
        self._num_truncated += sum(length > limit for length in lengths)
        samples, envs = cut_samples(batch.kept, limit)
        self._hooks.batch_packed(batch.step, samples)
        flops = self._config.trainer.attention_flops
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
    """A batch as it goes on the wire: one frame a trainer rank."""
    ranks = pack_ranks(samples, envs, capacity, num_ranks, attention_flops)
    return [encode_batch(step, rows) for rows in ranks]


def truncate(sample: Sample, limit: int) -> Sample:
    """The first ``limit`` tokens of a sample, every column alike."""
    if len(sample) <= limit:
        return sample
    cut: dict[str, Any] = {
        name: None if (column := getattr(sample, name)) is None else column[:limit]
        for name in COLUMNS
    }
    return Sample(**cut, temperature=sample.temperature)
