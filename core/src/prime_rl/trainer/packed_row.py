"""A micro batch as tensors on the device, with the purpose of each token.

Sequences are sorted by length, longest first: neighbors of equal length share one attention call.

Shapes: T = tokens of the row, S = its sequences, N = its targets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prime_rl.registry.components import Components
from prime_rl.streams import (
    ROUTES,
    TOP_IDS,
    WEIGHTS,
    BoolColumn,
    LossComponent,
    StreamColumn,
    components,
    is_absent,
    members,
    stream,
    stream_names,
)
from prime_rl.trainer.device import to_device
from prime_rl.trainer.packing import Ints, Layout, Packing
from prime_rl.wire.micro_batch import MicroBatch

APART = Packing()


@dataclass(frozen=True, eq=False)
class Share:
    """The tokens of a row that train in one component."""

    mask: Tensor
    """[T] bool: member tokens."""
    weights: Tensor | None
    """[T]; None: 1.0."""
    sequences: list[int]
    """Indices of the sequences that have members."""
    tokens: Ints
    """On the host: positions of the members."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PackedRow:
    """One packed row, ready for the model."""

    layout: Layout
    """How the model computes the row."""
    lengths: tuple[int, ...]
    """[S] tokens of each sequence."""
    token_ids: Tensor
    """[T] int64"""
    sequence_ids: Tensor
    """[T] int64: the sequence of each token."""
    targets: Tensor
    """[N] int64: members of any component, without first tokens, which nothing predicts."""
    temperatures: Tensor | None
    """[N] of the targets; None: all are 1.0."""
    inference_logprobs: Tensor
    streams: Mapping[str, Tensor]
    """[T] or [T, k]: every stream but the weights of components."""
    absent: Mapping[str, BoolColumn]
    """[S] on the host: the sequences that lack a stream of others in the row."""
    shares: Mapping[LossComponent, Share]
    """Only of components that have members."""
    sampled_tokens: Ints
    """On the host: the targets that the policy sampled."""
    origins: Ints
    """[T] on the host: position of each token in the micro batch."""
    sequence_envs: Ints
    """[S] on the host: index into ``envs``."""
    env_ids: Ints
    """[T] the same, of each token."""
    envs: tuple[str, ...]
    of_sequences: Mapping[str, npt.NDArray[Any]]
    """[S] on the host: ``temperatures``, ``order`` (the position in the micro batch), and
    ``rollout_ids`` and ``group_ids`` where the batch has them."""
    top_ids: npt.NDArray[Any] | None
    """[N, k] on the host, where they are checked: the stream, of the targets."""
    policy_lag: Ints | None
    """[T] on the host: versions between the policy that sampled a token and the one in training,
    -1 for tokens that no policy sampled. None: the batch does not say."""
    ending: Ints | None = None
    """[E] on the host: the sequences of ``layout.ends``, those that have targets. None: no head
    reads the states at their ends."""


def make_row(
    micro_batch: MicroBatch,
    device: torch.device,
    packing: Packing = APART,
    with_ends: bool = False,
    with_routes: bool = False,
) -> PackedRow:
    """Sort the sequences by length and move them over, for a model that computes them by
    ``packing``. ``with_ends``: a head reads the states at the ends of sequences. ``with_routes``:
    the experts of the sampler are replayed."""
    # Descending lengths: `batch_sizes` relies on them.
    order = np.argsort(-micro_batch.sequence_lengths, kind="stable")
    bounds = np.cumsum([0, *micro_batch.sequence_lengths])
    # [T]: where each token of the row lies in the micro batch.
    tokens = np.concatenate([np.arange(bounds[each], bounds[each + 1]) for each in order])

    lengths = micro_batch.sequence_lengths[order].astype(np.int64)
    temperatures = np.repeat(micro_batch.temperatures[order], lengths)
    sequence_envs = micro_batch.env_ids[order].astype(np.int64)
    sequence_ids = np.repeat(np.arange(len(lengths)), lengths)
    positions = np.arange(len(tokens)) - (np.cumsum(lengths) - lengths)[sequence_ids]  # [T]

    shares = _shares(micro_batch, tokens, sequence_ids=sequence_ids, device=device)
    trained = _union([each.tokens for each in shares.values()])
    targets = trained[positions[trained] > 0]  # nothing predicts a first token

    streams = {}
    for name in stream_names(micro_batch):
        if name.endswith(WEIGHTS) or name == ROUTES:
            continue
        column = stream(micro_batch, name)
        if column is not None:
            streams[name] = column[tokens]

    # A sequence has a stream for all of its tokens or for none: its first token tells.
    absent = {name: is_absent(column[positions == 0]) for name, column in streams.items()}

    ids: dict[str, npt.NDArray[Any]] = {
        "temperatures": micro_batch.temperatures,
        "order": np.arange(len(order)),
    }
    for name in ("rollout_ids", "group_ids"):
        column = getattr(micro_batch, name)
        if column is not None:
            ids[name] = column

    ending = np.unique(sequence_ids[targets]) if with_ends else None
    ends = None if ending is None else np.cumsum(lengths)[ending] - 1
    chosen = temperatures[targets]
    token_ids = micro_batch.token_ids[tokens].astype(np.int64)

    # `of_tokens` are token ids, or numbers that stand for a token with its experts.
    def lay_out(of_tokens: Ints) -> Layout:
        # By position: a plugin's packing may call its parameters otherwise.
        return packing.lay_out(of_tokens, sequence_ids, lengths, targets, device, ends)

    routes = micro_batch.streams.get(ROUTES) if with_routes else None
    if routes is None:
        layout = lay_out(token_ids)
    else:
        layout = _routed_layout(lay_out, token_ids, routes=routes[tokens], device=device)

    return PackedRow(
        layout=layout,
        lengths=tuple(lengths.tolist()),
        token_ids=to_device(token_ids, np.int64, device),
        sequence_ids=to_device(sequence_ids, np.int64, device),
        targets=to_device(targets, np.int64, device),
        # None spares a division of all logits.
        temperatures=None if (chosen == 1).all() else to_device(chosen, np.float32, device),
        inference_logprobs=to_device(micro_batch.inference_logprobs[tokens], np.float32, device),
        streams={n: to_device(c, c.dtype.type, device) for n, c in streams.items()},
        # A stream that no sequence lacks needs no mask in the loss.
        absent={name: lacking for name, lacking in absent.items() if lacking.any()},
        shares=shares,
        sampled_tokens=targets[micro_batch.loss_mask[tokens][targets]],
        origins=tokens,
        sequence_envs=sequence_envs,
        env_ids=np.repeat(sequence_envs, lengths),
        envs=micro_batch.envs,
        of_sequences={name: column[order] for name, column in ids.items()},
        top_ids=streams[TOP_IDS][targets] if TOP_IDS in streams else None,
        policy_lag=streams.get("policy_lag"),
        ending=ending,
    )


def _routed_layout(
    lay_out: Callable[[Ints], Layout],
    token_ids: Ints,
    routes: StreamColumn,
    device: torch.device,
) -> Layout:
    """A layout with the experts of each computed token. ``routes``: [T, layers, k].

    A packing shares what is equal, so it sees numbers that are equal for equal tokens with equal
    experts. They also say which token of the row each computed one is.
    """
    absent = is_absent(routes)
    parts = [token_ids[:, None].view(np.uint8), routes.reshape(len(routes), -1).view(np.uint8)]
    keys = np.ascontiguousarray(np.concatenate(parts, axis=1))
    # Each row of bytes becomes one value, so that `np.unique` compares whole rows.
    rows = keys.view(np.dtype((np.void, keys.shape[1]))).ravel()
    _, first, numbers = np.unique(rows, return_index=True, return_inverse=True)

    layout = lay_out(numbers.astype(np.int64))
    at = to_device(first, np.int64, device)[layout.token_ids]  # [U]
    chosen = to_device(routes, np.uint8 if routes.dtype == np.uint8 else np.int32, device)[at]
    has_none = to_device(absent, np.bool_, device)[at]
    return replace(
        layout,
        token_ids=to_device(token_ids, np.int64, device)[at],
        routes=chosen.to(torch.int64).masked_fill(has_none[:, None, None], -1),
    )


def _shares(
    micro_batch: MicroBatch, tokens: Ints, sequence_ids: Ints, device: torch.device
) -> dict[LossComponent, Share]:
    """``tokens`` [T]: positions in the micro batch, in the order of the row."""
    shares = {}
    for name in components(micro_batch):
        mask = members(micro_batch, name)[tokens]
        if mask.any():
            column = stream(micro_batch, f"{name}{WEIGHTS}")  # None: 1.0
            shares[name] = Share(
                mask=to_device(mask, np.bool_, device),
                weights=None if column is None else to_device(column[tokens], np.float32, device),
                sequences=np.unique(sequence_ids[mask]).tolist(),
                tokens=np.flatnonzero(mask),
            )

    return shares


def ratio_tokens(row: PackedRow, losses: Components) -> Ints:
    """Positions of the members of losses that compare π with μ."""
    compares = {name: losses[name].cls.compares_with_sampler for name in row.shares}
    return _union([share.tokens for name, share in row.shares.items() if compares[name]])


def _union(parts: Sequence[Ints]) -> Ints:
    """Sorted, each position once."""
    if len(parts) == 1:
        return parts[0]  # sorted and unique already
    return np.unique(np.concatenate([np.zeros(0, np.int64), *parts]))
