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
    ROUTES,
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
from prime_rl.wire.micro_batch import MEASURED

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SampleToPack:
    """A sample to pack, and where it comes from."""

    sample: Sample
    env: str
    rollout: int = 0
    """Number of its rollout in the batch. ``group`` is the number of its group."""
    group: int = 0


@dataclass(frozen=True)
class BatchToPack:
    """A batch to pack: its pieces, and what the losses that it feeds need."""

    pieces: Sequence[SampleToPack]
    bundles: Sequence[Sequence[int]]
    """Indices of the pieces that go into one row together."""
    needs: frozenset[str] = frozenset()
    """Columns that core computes for these losses; and ``ROUTES`` where the trainer replays them.
    """
    step: int = 0


def alone(samples: Sequence[Sample], envs: Sequence[str]) -> BatchToPack:
    """Samples of which each stands for itself; ``envs`` names each one's env."""
    pieces = [SampleToPack(sample, env) for sample, env in zip(samples, envs, strict=True)]
    return BatchToPack(pieces, [[number] for number in range(len(pieces))])


def batch_to_pack(
    step: int, rollouts: Sequence[Rollout], losses: Components, limit: int
) -> BatchToPack:
    """A batch, in bundles of what its losses see whole. Raises ``StreamError`` for a sample of more
    than ``limit`` tokens: samples are cut before they are scored, and never after."""
    group_numbers: dict[tuple[str, int], int] = {}
    pieces: list[SampleToPack] = []
    bundles: dict[tuple[int, ...], list[int]] = {}
    needs: set[str] = set()
    scopes: dict[int, int] = {}

    for number, rollout in enumerate(rollouts):
        group = group_numbers.setdefault((rollout.env, rollout.group_id), len(group_numbers))
        names = {n for s in rollout.samples for n in components(s) if members(s, n).any()}
        used = [losses[name] for name in sorted(names)]
        needs.update(*(component.needs for component in used))
        # The widest scope of its losses counts for the whole group: it is bundled in one way.
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

            pieces.append(SampleToPack(sample, rollout.env, rollout=number, group=group))

    if _has_several_ages(pieces):
        needs.add("policy_lag")  # the trainer's metrics are by age then
    pieces = _without_incomplete(pieces, losses)

    for index, piece in enumerate(pieces):
        key = (piece.group, piece.rollout, index)
        # A wider scope distinguishes bundles by fewer parts of the key: the group alone
        # for "group", the group and the rollout for "rollout", all three for a sample.
        num_parts = len(SCOPES) - scopes[piece.group]
        bundles.setdefault(key[:num_parts], []).append(index)

    return BatchToPack(pieces, [*bundles.values()], needs=frozenset(needs), step=step)


def _without_incomplete(pieces: Sequence[SampleToPack], losses: Components) -> list[SampleToPack]:
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
            # Weights of 0, and the sample stays: other components may train its tokens.
            no_weights = {f"{name}{WEIGHTS}": np.zeros(len(sample), np.float32)}
            without = sample_of(sample.columns | no_weights, sample.temperature)
            left[index] = replace(left[index], sample=without)

    return left


def plan_rows(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of ``lengths`` by row, no row over ``capacity``. Raises ``StreamError`` if one alone
    is over it."""
    # Longest first: short samples fill what the long ones leave.
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
        # Best fit: the smallest room that is large enough.
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
    packing: BatchToPack, capacity: int, num_ranks: int = 1, attention_flops: float = 0.0
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

    # Several ranks need these rows too: their number is what the ranks share.
    rows = plan_rows(lengths, capacity)
    ranks = [rows]

    if num_ranks > 1:
        costs = sample_costs([len(piece.sample) for piece in pieces], attention_flops)
        totals = np.array([costs[bundle].sum() for bundle in bundles])
        ranks = plan_ranks(rows, lengths, capacity=capacity, num_ranks=num_ranks, costs=totals)

    def packed(row: Sequence[int]) -> MicroBatch:
        return _row(packing, [index for bundle in row for index in bundles[bundle]])

    return [[packed(row) for row in rows] for rows in ranks]


def _row(packing: BatchToPack, chosen: Sequence[int]) -> MicroBatch:
    """Some pieces end to end. None: one token that trains nothing, for a rank that is idle while
    the others train a row."""
    pieces = [packing.pieces[i] for i in chosen] or [_idle(packing.pieces[0])]
    samples = [piece.sample for piece in pieces]

    # Sorted, so that one batch always makes the same bytes.
    names = sorted({piece.env for piece in pieces})

    def joined(name: str) -> StreamColumn | None:
        return concatenate(((len(s), stream(s, name)) for s in samples), name)

    # A dict instead of a set keeps the order: one batch always makes the same bytes.
    stream_names_in_row = dict.fromkeys(name for sample in samples for name in sample.streams)
    streams: dict[str, StreamColumn] = {}
    for name in stream_names_in_row:
        column = joined(name)
        if column is not None:
            streams[name] = column

    if "policy_lag" in packing.needs:
        streams["policy_lag"] = np.concatenate([_lag(sample, packing.step) for sample in samples])

    if ROUTES in packing.needs:
        routes = concatenate(((len(s), s.routed_experts) for s in samples), ROUTES)
        if routes is not None:
            streams[ROUTES] = routes

    rollout_ids = None
    if "rollout_ids" in packing.needs:
        rollout_ids = np.array([piece.rollout for piece in pieces], np.int32)

    group_ids = None
    if "group_ids" in packing.needs:
        group_ids = np.array([piece.group for piece in pieces], np.int32)

    core_streams: dict[str, Any] = {name: joined(name) for name in STREAMS}
    micro_batch = MicroBatch(
        token_ids=np.concatenate([s.token_ids for s in samples]),
        loss_mask=np.concatenate([s.loss_mask for s in samples]),
        inference_logprobs=np.concatenate([s.inference_logprobs for s in samples]),
        sequence_lengths=np.array([len(s) for s in samples], np.int32),
        temperatures=np.array([s.temperature for s in samples], np.float32),
        env_ids=np.array([names.index(piece.env) for piece in pieces], np.uint16),
        envs=tuple(names),
        streams=streams,
        rollout_ids=rollout_ids,
        group_ids=group_ids,
        **core_streams,
    )
    micro_batch.check()
    return micro_batch


def _idle(piece: SampleToPack) -> SampleToPack:
    # Ranks gather the weights of each block together, so one without a row has to compute too.
    token = Sample(
        token_ids=piece.sample.token_ids[:1],
        loss_mask=np.zeros(1, np.bool_),
        inference_logprobs=np.zeros(1, np.float32),
    )
    return replace(piece, sample=token)


def _has_several_ages(pieces: Sequence[SampleToPack]) -> bool:
    """Whether more than one version of the policy sampled the batch."""
    columns = [piece.sample.policy_versions for piece in pieces]
    recorded = [column for column in columns if column is not None]
    if not recorded:
        return False

    versions = np.concatenate(recorded)
    sampled = versions[versions >= 0]  # -1: no policy sampled the token
    return bool(len(sampled) and sampled.min() != sampled.max())


def _lag(sample: Sample, step: int) -> IntColumn:
    """[T] versions between the policy that sampled a token and the one that step ``step`` trains;
    -1 where no policy sampled."""
    if sample.policy_versions is None:
        return np.full(len(sample), -1, np.int32)
    lag = (step - 1) - sample.policy_versions  # batch n is for the weights of version n - 1
    return np.where(sample.policy_versions >= 0, lag, -1).astype(np.int32)


class Packer:
    """Packs every batch of one run: in rows, spread over the ranks."""

    def __init__(
        self,
        config: RunConfig,
        num_ranks: int,
        hooks: Hooks,
        losses: Components,
        one_env_per_row: bool = False,
    ) -> None:
        """``one_env_per_row``: the optimizer weighs envs (``OptimizerMaker.weighs_envs``)."""
        self._config = config
        self._num_ranks = num_ranks
        self._one_env_per_row = one_env_per_row
        self._hooks = hooks
        self._losses = losses
        self._stream_shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
        """By stream: the env that wrote it first, and the shape of its values per token."""

    def pack(self, batch: Batch) -> list[bytes]:
        """The batch as one frame per trainer rank. Calls ``batch_packed`` first."""
        limit = self._config.seq_len
        self._check_streams(batch.kept)
        packing = batch_to_pack(batch.step, batch.kept, losses=self._losses, limit=limit)

        if self._config.trainer.router_replay:
            check_routes([*batch.kept, *batch.measured])
            packing = replace(packing, needs=packing.needs | {ROUTES})

        self._hooks.batch_packed(batch.step, [piece.sample for piece in packing.pieces])

        minibatches = self._config.trainer.minibatches
        measured = None
        if batch.measured:
            measured = batch_to_pack(batch.step, batch.measured, losses=self._losses, limit=limit)
            # Routes are replayed in every row or in none.
            measured = replace(measured, needs=measured.needs | (packing.needs & {ROUTES}))

        ranks_of_a_row = self._config.trainer.context_parallel
        frames = batch_frames(
            packing,
            self._config.row_tokens,
            num_ranks=self._num_ranks // ranks_of_a_row,
            attention_flops=ATTENTION_FLOPS,
            minibatches=minibatches,
            measured=measured,
            one_env_per_row=self._one_env_per_row,
        )
        # Ranks that share a row get the same frame: each takes its part of the tokens.
        return [frame for frame in frames for _ in range(ranks_of_a_row)]

    def _check_streams(self, rollouts: Sequence[Rollout]) -> None:
        """Raises ``StreamError`` if two envs of the run write one stream in two shapes: each loss
        would read what was written for the other."""
        # `_stream_shapes` outlives the batch: the two envs may never meet in one batch.
        for rollout in rollouts:
            for sample in rollout.samples:
                for name, column in sample.streams.items():
                    written = (rollout.env, column.shape[1:])
                    env, shape = self._stream_shapes.setdefault(name, written)
                    if shape != column.shape[1:]:
                        readers = ", ".join(self._losses.readers(name)) or "no loss"
                        raise StreamError(
                            f"env {rollout.env!r}, group {rollout.group_id}: the stream {name!r} "
                            f"has {_row_words(column.shape[1:])}, and env {env!r} writes it with "
                            f"{_row_words(shape)}. A stream means one thing in a run (it is read "
                            f"by {readers}). Rename it in one of the algorithms, and in Loss.reads."
                        )


def check_routes(rollouts: Sequence[Rollout]) -> None:
    """Raises ``StreamError`` for a rollout of the policy whose engine has not recorded the experts:
    it would train by other ones, and nothing would show it."""
    for rollout in rollouts:
        if rollout.is_live and any(s.routed_experts is None for s in rollout.samples):
            raise StreamError(
                f"env {rollout.env!r}, group {rollout.group_id}: a rollout of the policy has no "
                "routed_experts, and trainer.router_replay is true. Expected them in each reply of "
                "the engine. An engine that runs elsewhere has to be started with them (vLLM: "
                "--enable-return-routed-experts), and a harness has to use the tokens of the "
                "engine's replies. Or set trainer.router_replay to false."
            )


def batch_frames(
    packing: BatchToPack,
    capacity: int,
    num_ranks: int = 1,
    attention_flops: float = 0.0,
    minibatches: int = 1,
    measured: BatchToPack | None = None,
    one_env_per_row: bool = False,
) -> list[bytes]:
    """A batch as it goes on the wire: one frame per trainer rank. Each rank has equally many rows
    of a minibatch. ``one_env_per_row``: also equally many of each env, in the order of their names.
    ``measured``: what the trainer measures, in rows of its own."""
    costs = sample_costs([len(piece.sample) for piece in packing.pieces], attention_flops)

    # Minibatches take whole groups: credit compares siblings, so their gradients belong together.
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
        # An optimizer that weighs envs needs rows of a single env.
        packings = _by_env(minibatch) if one_env_per_row else [minibatch]
        for each in packings:
            packed = pack_ranks(
                each, capacity, num_ranks=num_ranks, attention_flops=attention_flops
            )
            for rank, rows in zip(ranks, packed, strict=True):
                rank += [replace(row, minibatch=number) for row in rows]

    # Measured samples get rows of their own: the trainer computes their loss after the step.
    if measured is not None:
        packed = pack_ranks(
            measured, capacity, num_ranks=num_ranks, attention_flops=attention_flops
        )
        for rank, rows in zip(ranks, packed, strict=True):
            rank += [replace(row, minibatch=MEASURED) for row in rows]

    return [encode_batch(packing.step, rows) for rows in ranks]


def _by_env(packing: BatchToPack) -> list[BatchToPack]:
    """The pieces of each env by themselves. A bundle is of one group, so of one env."""
    pieces: dict[str, list[SampleToPack]] = {}
    bundles: dict[str, list[list[int]]] = {}

    for bundle in packing.bundles:
        env = packing.pieces[bundle[0]].env
        env_pieces = pieces.setdefault(env, [])
        first = len(env_pieces)
        env_pieces += [packing.pieces[index] for index in bundle]
        # Each env has its own list of pieces, so the indices of its bundles start at 0.
        bundles.setdefault(env, []).append([*range(first, len(env_pieces))])

    return [replace(packing, pieces=pieces[env], bundles=bundles[env]) for env in sorted(pieces)]


def _row_words(shape: tuple[int, ...]) -> str:
    return f"{shape[0]} values per token" if shape else "one value per token"
