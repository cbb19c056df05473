"""Which tokens of a row the model has to compute, and where each target finds its hidden state.

Rollouts of one group start from the same prompt, and a hidden state depends only on the tokens up
to it. So a prompt that several sequences share is computed once, their continuations attend to it,
and its gradient is the sum over all of them: the same numbers for less work. A sequence's last
token, which predicts nothing, and a sequence that trains nothing are not computed. A few tokens
more round the number of rows (``products.padded_rows``).

    row        prompt aaa | prompt bb | prompt cccc | other dd
    computed   prompt | other d | (more) | ccc | aa | b  (blocks, then what continues the first)

Shapes: T = tokens of the row, S = its sequences, N = its targets, U = tokens computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from prime_rl.trainer import context
from prime_rl.trainer.device import to_device
from prime_rl.trainer.packing import Ints, Layout
from prime_rl_kernels.attention import Continuation, Documents
from prime_rl_kernels.products import HAS_ONEDNN, padded_rows

Block: TypeAlias = tuple[int, list[int]]
"""(length, sequences that start with it): computed from position 0."""
Tail: TypeAlias = tuple[int, int, int]
"""(length, position it starts at, sequence): what follows a shared block."""


@dataclass(frozen=True, eq=False)
class RowLayout(Layout):
    """A row in one call."""

    position_ids: Tensor
    """[U] int64: the token's position in its own sequence."""
    documents: Documents

    @property
    def runs(self) -> list[tuple[int, int, int]]:
        """Documents, and what continues shared prefixes of them."""
        continued = self.documents.continuations
        return [*super().runs, *((run.num, run.num_queries, run.num_keys) for run in continued)]


def shared_layout(
    token_ids: Ints,
    sequence_ids: Ints,
    lengths: Ints,
    targets: Ints,
    device: torch.device,
    ends: Ints | None = None,
) -> RowLayout:
    """Shared prompts once, and nothing that no target depends on. Needs a target. ``ends`` [E]:
    last tokens of sequences with targets, which are computed too."""
    starts = np.cumsum(lengths) - lengths
    owners = sequence_ids[targets]
    before = targets - 1 - starts[owners]  # [N] the position that predicts each target
    # [S], [S] the first and the last position of each sequence that predicts a target; -1: none
    first = np.full(len(lengths), np.iinfo(np.int64).max)
    last = np.full(len(lengths), -1)
    np.minimum.at(first, owners, before)
    np.maximum.at(last, owners, before)
    at_end = np.zeros(0, np.int64) if ends is None else ends
    ending = sequence_ids[at_end]
    last[ending] = at_end - starts[ending]
    blocks, tails = _plan(token_ids, starts, first=first, last=last)
    num_blocks = len(blocks)
    total = sum(length for length, _ in blocks) + sum(length for length, _, _ in tails)
    part = context.padded(total) // context.num_parts()
    padding = (padded_rows(part) if HAS_ONEDNN else part) * context.num_parts() - total
    if padding:
        blocks.append((padding, []))  # no target reads it
    rows: list[Ints] = []  # which tokens of the row are computed, in order
    owners_of_rows: list[Ints] = []  # and how many sequences each is of
    head = np.zeros(len(lengths), np.int64)  # [S] computed index of position 0 ...
    split = np.zeros(len(lengths), np.int64)  # [S] ... for positions before this one,
    tail = np.zeros(len(lengths), np.int64)  # [S] and for those from it on
    offset = 0
    for length, sharing in blocks:
        rows.append(np.arange(length) + (starts[sharing[0]] if sharing else 0))
        owners_of_rows.append(np.full(length, len(sharing)))
        head[sharing] = tail[sharing] = offset
        offset += length

    continuations = []
    for (length, prefix), run in groupby(tails, key=lambda found: found[:2]):
        keys = []
        for _, _, sequence in run:
            rows.append(starts[sequence] + prefix + np.arange(length))
            owners_of_rows.append(np.ones(length, np.int64))
            keys += [head[sequence] + np.arange(prefix), offset + np.arange(length)]
            split[sequence] = prefix
            tail[sequence] = offset - prefix
            offset += length
        key_index = to_device(np.concatenate(keys), np.int64, device)
        continuations.append(
            Continuation(len(keys) // 2, length, num_keys=prefix + length, key_index=key_index)
        )

    chosen = np.concatenate(rows)
    num_owners = np.concatenate(owners_of_rows)

    def computed(positions: Ints, sequences: Ints) -> Tensor:
        """The computed tokens at positions of sequences."""
        offsets = np.where(positions < split[sequences], head[sequences], tail[sequences])
        return to_device(positions + offsets, np.int64, device)

    documents = Documents(tuple(length for length, _ in blocks), device, tuple(continuations))
    return RowLayout(
        token_ids=to_device(token_ids[chosen], np.int64, device),
        lengths=documents.lengths[:num_blocks],
        num_owners=to_device(num_owners, np.int64, device) if (num_owners != 1).any() else None,
        position_ids=to_device(chosen - starts[sequence_ids[chosen]], np.int64, device),
        documents=documents,
        sources=computed(before, owners),
        ends=None if ends is None else computed(last[ending], ending),
    )


def _plan(token_ids: Ints, starts: Ints, first: Ints, last: Ints) -> tuple[list[Block], list[Tail]]:
    """Blocks and tails, longest first so that neighbors of equal length share a call.

    A prompt ends with the first position that predicts a target.
    """
    by_prompt: dict[bytes, list[int]] = {}
    for sequence in np.flatnonzero(last >= 0).tolist():
        start = starts[sequence]
        prompt = token_ids[start : start + first[sequence] + 1].tobytes()
        by_prompt.setdefault(prompt, []).append(sequence)

    blocks: list[Block] = []
    tails: list[Tail] = []
    for sharing in by_prompt.values():
        end = int(first[sharing[0]]) + 1
        if len(sharing) == 1:
            blocks.append((int(last[sharing[0]]) + 1, sharing))
            continue
        blocks.append((end, sharing))
        tails += [(int(last[s]) + 1 - end, end, s) for s in sharing if last[s] >= end]

    return sorted(blocks, reverse=True), sorted(tails, reverse=True)
