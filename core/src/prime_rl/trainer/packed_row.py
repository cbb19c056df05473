"""A micro batch as tensors on the device, with what each token is for.

Sequences are sorted by length, longest first: neighbors of equal length share one attention call.

Shapes: T = tokens of the row, S = its sequences, N = its targets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prime_rl.errors import StreamError
from prime_rl.rollout import COMPONENTS, LossComponent, members, missing_stream
from prime_rl.trainer.device import to_device
from prime_rl.trainer.prefix_sharing import Layout, plain_layout, shared_layout
from prime_rl.wire.micro_batch import MicroBatch


@dataclass(frozen=True, eq=False)
class Component:
    """One loss component's share of a row."""

    mask: Tensor
    """[T] bool: member tokens."""
    weights: Tensor | None
    """[T]; None: 1.0."""
    sequences: list[int]
    """Indices of the sequences that have members."""


@dataclass(frozen=True, eq=False)
class PackedRow:
    """One packed row, ready for the model."""

    layout: Layout
    """What the model computes of it."""
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
    advantages: Tensor | None
    ref_logprobs: Tensor | None
    components: dict[LossComponent, Component]
    """Only those that have members."""
    ratio_tokens: npt.NDArray[np.int64]
    """On the host: members of rl or ref_kl, which compare π with μ."""
    sampled_tokens: npt.NDArray[np.int64]
    """On the host: the targets that the policy sampled."""
    origins: npt.NDArray[np.int64]
    """[T] on the host: position of each token in the micro batch."""
    sequence_envs: npt.NDArray[np.int64]
    """[S] on the host: index into ``envs``."""
    env_ids: npt.NDArray[np.int64]
    """[T] the same, of each token."""
    envs: tuple[str, ...]


def make_row(micro_batch: MicroBatch, device: torch.device, *, share: bool = True) -> PackedRow:
    """Sort the sequences by length and move them over; ``share``: compute shared prompts once.

    Raises ``StreamError`` if a component has members but lacks the stream it needs.
    """
    if (missing := missing_stream(micro_batch)) is not None:
        raise StreamError(
            f"micro batch: {missing[2]} tokens are members of the {missing[0]} component, but the "
            f"stream {missing[1]!r} is absent (envs: {', '.join(micro_batch.envs)}). Their "
            "algorithm has to assign it."
        )
    order = np.argsort(-micro_batch.sequence_lengths, kind="stable")
    bounds = np.cumsum([0, *micro_batch.sequence_lengths])
    tokens = np.concatenate([np.arange(bounds[each], bounds[each + 1]) for each in order])
    lengths = micro_batch.sequence_lengths[order].astype(np.int64)
    temperatures = np.repeat(micro_batch.temperatures[order], lengths)
    sequence_envs = micro_batch.env_ids[order].astype(np.int64)
    sequence_ids = np.repeat(np.arange(len(lengths)), lengths)
    positions = np.arange(len(tokens)) - (np.cumsum(lengths) - lengths)[sequence_ids]
    masks = {name: members(micro_batch, name)[tokens] for name in COMPONENTS}
    targets = np.flatnonzero(np.logical_or.reduce(list(masks.values())) & (positions > 0))

    def tensor(column: npt.NDArray[Any] | None, dtype: type = np.float32) -> Tensor | None:
        return None if column is None else to_device(column[tokens], dtype, device)

    components = {}
    for name, mask in masks.items():
        if mask.any():
            weights = tensor(getattr(micro_batch, f"{name}_weights"))
            owners = np.unique(sequence_ids[mask]).tolist()
            components[name] = Component(to_device(mask, np.bool_, device), weights, owners)
    chosen = temperatures[targets]
    token_ids = micro_batch.token_ids[tokens].astype(np.int64)
    if share and len(targets):
        layout = shared_layout(token_ids, sequence_ids, lengths, targets, device)
    else:
        layout = plain_layout(token_ids, positions, lengths, targets, device)
    return PackedRow(
        layout=layout,
        lengths=tuple(lengths.tolist()),
        token_ids=to_device(token_ids, np.int64, device),
        sequence_ids=to_device(sequence_ids, np.int64, device),
        targets=to_device(targets, np.int64, device),
        temperatures=None if (chosen == 1).all() else to_device(chosen, np.float32, device),
        inference_logprobs=to_device(micro_batch.inference_logprobs[tokens], np.float32, device),
        advantages=tensor(micro_batch.advantages),
        ref_logprobs=tensor(micro_batch.ref_logprobs),
        components=components,
        ratio_tokens=np.flatnonzero(masks["rl"] | masks["ref_kl"]),
        sampled_tokens=targets[micro_batch.loss_mask[tokens][targets]],
        origins=tokens,
        sequence_envs=sequence_envs,
        env_ids=np.repeat(sequence_envs, lengths),
        envs=micro_batch.envs,
    )
