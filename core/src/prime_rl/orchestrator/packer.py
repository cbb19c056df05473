"""Lay samples end to end in rows of bounded length: best-fit decreasing.

Longest bundle first, each into the fullest row that still has room. A bundle is what a loss sees
whole: one sample, the samples of a rollout or those of a group (``Loss.scope``). Bundles of any mix
of algorithms share a row: a stream that some samples carry is filled for the others
(``streams.concatenate``).

``rank_balance`` spreads the bundles over several ranks, of equally many rows each.

Shapes: T = tokens of a row, S = its sequences.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from prime_rl.config.run import RunConfig
from prime_rl.errors import StreamError
from prime_rl.orchestrator.balance import ATTENTION_FLOPS, sample_costs, split_groups
from prime_rl.orchestrator.rank_balance import plan_ranks
from prime_rl.plugins.loss import SCOPES
from prime_rl.registry.components import Components
from prime_rl.registry.manager import Hooks
from prime_rl.rollout import Batch, Rollout, Sample, sample_of
from prime_rl.streams import (
    STREAMS,
    WEIGHTS,
    IntColumn,
    StreamColumn,
    components,
    concatenate,
    members,
    stream,
    stream_names,
)
from prime_rl.wire import MicroBatch, encode_batch

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Piece:
    """A sample to pack, and where it comes from."""

    sample: Sample
    env: str
    rollout: int = 0
    """Index of its rollout in the batch; ``group``, of its group."""
    group: int = 0


@dataclass(frozen=True)
class Packing:
    """A batch to pack: its pieces, and what the losses that it feeds need."""

    pieces: Sequence[Piece]
    bundles: Sequence[Sequence[int]]
    """Indices of the pieces that go into one row together."""
    needs: frozenset[str] = frozenset()
    """Columns that core computes for these losses."""
    step: int = 0


def alone(samples: Sequence[Sample], envs: Sequence[str]) -> Packing:
    """Samples of which each stands for itself; ``envs`` names each one's env."""
    pieces = [Piece(sample, env) for sample, env in zip(samples, envs, strict=True)]
    return Packing(pieces, [[number] for number in range(len(pieces))])


def packing_of(step: int, rollouts: Sequence[Rollout], losses: Components, limit: int) -> Packing:
    """A batch, in bundles of what its losses see whole. Raises ``StreamError`` for a sample of more
    than ``limit`` tokens: samples are cut before they are scored, and never after."""
    groups: dict[tuple[str, int], int] = {}
    pieces: list[Piece] = []
    bundles: dict[tuple[int, ...], list[int]] = {}
    needs: set[str] = set()
    scopes: dict[int, int] = {}
    for number, rollout in enumerate(rollouts):
        group = groups.setdefault((rollout.env, rollout.group_id), len(groups))
        names = {n for s in rollout.samples for n in components(s) if members(s, n).any()}
        used = [losses[name] for name in sorted(names)]
        needs.update(*(component.needs for component in used))
        scope = max((SCOPES.index(component.whole) for component in used), default=0)
        scopes[group] = max(scope, scopes.get(group, 0))
        for sample in rollout.samples:
            if len(sample) > limit:
                raise StreamError(
                    f"env {rollout.env!r}, group {rollout.group_id}: a sample has {len(sample)} "
                    f"tokens, and seq_len is {limit}. Rollouts are cut to seq_len before they are "
                    "scored, so a plugin has made this sample or made it longer: keep it within "
                    "host.seq_len."
                )
            pieces.append(Piece(sample, rollout.env, number, group))

    if _has_several_ages(pieces):
        needs.add("policy_lag")  # the trainer's metrics are by age then
    pieces = _without_incomplete(pieces, losses)
    for index, piece in enumerate(pieces):
        key = (piece.group, piece.rollout, index)
        # The wider the scope, the fewer parts of the key tell two bundles apart: the group alone
        # for "group", the group and the rollout for "rollout", all three for a sample.
        num_parts = len(SCOPES) - scopes[piece.group]
        bundles.setdefault(key[:num_parts], []).append(index)

    return Packing(pieces, [*bundles.values()], frozenset(needs), step)


def _without_incomplete(pieces: Sequence[Piece], losses: Components) -> list[Piece]:
    """The pieces; where a loss cannot train what the batch has of a group (``Loss.completes``), the
    group's tokens are no longer members of it."""
    by_group: dict[tuple[int, str], list[int]] = {}
    for index, piece in enumerate(pieces):
        for name in components(piece.sample):
            if members(piece.sample, name).any() and losses[name].cls.scope == "group":
                by_group.setdefault((piece.group, name), []).append(index)

    left = list(pieces)
    for (_, name), indices in by_group.items():
        samples = [left[index].sample for index in indices]
        masks = [members(sample, name) for sample in samples]
        shared = set.intersection(*(set(stream_names(sample)) for sample in samples))
        streams = {
            each: np.concatenate(
                [sample.columns[each][mask] for sample, mask in zip(samples, masks, strict=True)]
            )
            for each in shared
        }
        if losses[name].cls.completes(streams):
            continue
        for index, sample in zip(indices, samples, strict=True):
            none = {f"{name}{WEIGHTS}": np.zeros(len(sample), np.float32)}
            without = sample_of(sample.columns | none, sample.temperature)
            left[index] = replace(left[index], sample=without)

    return left


def plan_rows(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of ``lengths`` by row, no row over ``capacity``. Raises ``StreamError`` if one alone
    is over it."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    if order and lengths[order[0]] > capacity:
        raise StreamError(
            f"sample {order[0]} has {lengths[order[0]]} tokens, a row holds {capacity}. Raise "
            "trainer.micro_batch_tokens."
        )

    rows: list[list[int]] = []
    rooms: list[int] = []  # the distinct amounts of room, ascending: few, so bisection stays cheap
    with_room: dict[int, list[int]] = {}  # amount of room -> rows that have it
    for index in order:
        length = lengths[index]
        at = bisect_left(rooms, length)
        if at == len(rooms):
            row = len(rows)
            room = capacity
            rows.append([])
        else:
            room = rooms[at]
            row = with_room[room].pop()
            if not with_room[room]:
                del rooms[at], with_room[room]

        rows[row].append(index)
        left = room - length
        if left:
            if left not in with_room:
                insort(rooms, left)
            with_room.setdefault(left, []).append(row)

    return rows


def pack(samples: Sequence[Sample], envs: Sequence[str], capacity: int) -> list[MicroBatch]:
    """Rows of at most ``capacity`` tokens; ``envs`` names each sample's env."""
    (rows,) = pack_ranks(alone(samples, envs), capacity)
    return rows


def pack_ranks(
    packing: Packing, capacity: int, num_ranks: int = 1, attention_flops: float = 0.0
) -> list[list[MicroBatch]]:
    """The rows of each rank, equally many. Raises ``StreamError`` for a bundle that fits no row."""
    pieces = packing.pieces
    bundles = packing.bundles
    lengths = [sum(len(pieces[i].sample) for i in bundle) for bundle in bundles]
    for bundle, length in zip(bundles, lengths, strict=True):
        if length > capacity and len(bundle) > 1:
            raise StreamError(
                f"env {pieces[bundle[0]].env!r}: {len(bundle)} samples with {length} tokens belong "
                "to one rollout or group, which a loss sees whole, so they go into one row, and a "
                f"row holds {capacity}. Raise trainer.micro_batch_tokens, or lower seq_len."
            )

    rows = plan_rows(lengths, capacity)
    ranks = [rows]
    if num_ranks > 1:
        costs = sample_costs([len(piece.sample) for piece in pieces], attention_flops)
        totals = np.array([costs[bundle].sum() for bundle in bundles])
        ranks = plan_ranks(rows, lengths, capacity, num_ranks, totals)

    return [
        [_row(packing, [i for bundle in row for i in bundles[bundle]]) for row in rows]
        for rows in ranks
    ]


def _row(packing: Packing, chosen: Sequence[int]) -> MicroBatch:
    """Some pieces end to end. None: one token that trains nothing, for a rank that is idle while
    the others train a row."""
    pieces = [packing.pieces[i] for i in chosen] or [_idle(packing.pieces[0])]
    samples = [piece.sample for piece in pieces]
    names = sorted({piece.env for piece in pieces})

    def joined(name: str) -> StreamColumn | None:
        return concatenate(((len(s), stream(s, name)) for s in samples), name)

    further = dict.fromkeys(name for sample in samples for name in sample.streams)
    streams = {name: column for name in further if (column := joined(name)) is not None}
    if "policy_lag" in packing.needs:
        streams["policy_lag"] = np.concatenate([_lag(sample, packing.step) for sample in samples])
    known: dict[str, Any] = {name: joined(name) for name in STREAMS}
    needs = packing.needs
    rollouts = [piece.rollout for piece in pieces] if "rollout_ids" in needs else None
    groups = [piece.group for piece in pieces] if "group_ids" in needs else None
    micro_batch = MicroBatch(
        token_ids=np.concatenate([s.token_ids for s in samples]),
        loss_mask=np.concatenate([s.loss_mask for s in samples]),
        inference_logprobs=np.concatenate([s.inference_logprobs for s in samples]),
        sequence_lengths=np.array([len(s) for s in samples], np.int32),
        temperatures=np.array([s.temperature for s in samples], np.float32),
        env_ids=np.array([names.index(piece.env) for piece in pieces], np.uint16),
        envs=tuple(names),
        streams=streams,
        rollout_ids=None if rollouts is None else np.array(rollouts, np.int32),
        group_ids=None if groups is None else np.array(groups, np.int32),
        **known,
    )
    micro_batch.check()
    return micro_batch


def _idle(piece: Piece) -> Piece:
    token = Sample(
        token_ids=piece.sample.token_ids[:1],
        loss_mask=np.zeros(1, np.bool_),
        inference_logprobs=np.zeros(1, np.float32),
    )
    return replace(piece, sample=token)


def _has_several_ages(pieces: Sequence[Piece]) -> bool:
    """Whether more than one version of the policy sampled the batch."""
    columns = [piece.sample.policy_versions for piece in pieces]
    known = [column for column in columns if column is not None]
    if not known:
        return False
    versions = np.concatenate(known)
    sampled = versions[versions >= 0]
    return bool(len(sampled) and sampled.min() != sampled.max())


def _lag(sample: Sample, step: int) -> IntColumn:
    """[T] versions between the policy that sampled a token and the one that step ``step`` trains;
    -1 where no policy sampled."""
    if sample.policy_versions is None:
        return np.full(len(sample), -1, np.int32)
    lag = (step - 1) - sample.policy_versions
    return np.where(sample.policy_versions >= 0, lag, -1).astype(np.int32)


class Packer:
    """Packs every batch of one run: in rows, spread over the ranks."""

    def __init__(self, config: RunConfig, num_ranks: int, hooks: Hooks, losses: Components) -> None:
        self._config = config
        self._num_ranks = num_ranks
        self._hooks = hooks
        self._losses = losses

    def pack(self, batch: Batch) -> list[bytes]:
        """The batch as one frame per trainer rank. Calls ``batch_packed`` first."""
        limit = self._config.seq_len
        packing = packing_of(batch.step, batch.kept, self._losses, limit)
        self._hooks.batch_packed(batch.step, [piece.sample for piece in packing.pieces])
        minibatches = self._config.trainer.minibatches
        return batch_frames(
            packing, self._config.row_tokens, self._num_ranks, ATTENTION_FLOPS, minibatches
        )


def batch_frames(
    packing: Packing,
    capacity: int,
    num_ranks: int = 1,
    attention_flops: float = 0.0,
    minibatches: int = 1,
) -> list[bytes]:
    """A batch as it goes on the wire: one frame per trainer rank. Each rank has equally many rows
    of a minibatch."""
    costs = sample_costs([len(piece.sample) for piece in packing.pieces], attention_flops)
    owners = [packing.pieces[bundle[0]].group for bundle in packing.bundles]
    totals = np.array([costs[bundle].sum() for bundle in packing.bundles])
    parts = split_groups(owners, totals, minibatches)
    if len(parts) < minibatches:
        log.warning(
            "step %d: the batch has %d groups, which are not split, so it has %d minibatches "
            "instead of %d (trainer.minibatches)",
            packing.step,
            len(parts),
            len(parts),
            minibatches,
        )

    ranks: list[list[MicroBatch]] = [[] for _ in range(num_ranks)]
    for number, part in enumerate(parts):
        minibatch = replace(packing, bundles=[packing.bundles[i] for i in part])
        packed = pack_ranks(minibatch, capacity, num_ranks, attention_flops)
        for rank, rows in zip(ranks, packed, strict=True):
            rank += [replace(row, minibatch=number) for row in rows]

    return [encode_batch(packing.step, rows) for rows in ranks]
