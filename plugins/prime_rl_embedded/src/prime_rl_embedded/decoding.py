"""Attention of decoding rows in float32 on CPU, by batched products.

    scores = keys x query        a row's own positions: one batched product for all rows
             prefix x queries    a long shared prompt: one oneDNN product for all rows that share it
    output = softmax(scores) x values, in the same two parts

A row whose prompt is long always computes these two parts, split at the same position, also if no
other row shares its prompt. So its result has the same bits whatever the other rows are.

Shapes: R = rows, G = key/value heads, M = query heads of one key/value head, P = positions of the
prefix, C = own positions, D = head dimension of queries and keys, E = head dimension of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from prime_rl_kernels.products import HAS_ONEDNN, independent_rows

LENGTH_BUCKET = 16
"""Decoding reads a multiple of 16 positions, so that its shapes change every 16 steps only."""
_CHUNK = 128
"""Positions of one product of shares and values."""
_SHORTEST_CHUNK = 64
"""Torch has another kernel, which sums in another order, for products of fewer than 400 terms: 16
positions of one head with 16 dimensions are 256."""
_PREFIX_BUCKET = 64
_SHORTEST_PREFIX = 960
"""With fewer positions, a row that shares with none would take much longer."""


@dataclass
class RowRun:
    """Adjacent rows of the cache with prefixes of equal length."""

    first: int
    end: int
    prefix: int
    """Positions of the prefix. 0: none."""
    context: int
    """Positions of the longest row, rounded up."""
    sharing: list[slice] = field(default_factory=list)
    """The rows of each prefix. Each of them holds a copy; the first one's is read."""


def prefix_length(prompt: int) -> int:
    """Positions of a prompt of ``prompt`` tokens that decoding reads as a prefix. Not the last
    token: a row that shares the prompt computes that one itself."""
    length = (prompt - 1) // _PREFIX_BUCKET * _PREFIX_BUCKET
    return length if HAS_ONEDNN and length >= _SHORTEST_PREFIX else 0


def row_runs(
    positions: Sequence[int], prefixes: Sequence[tuple[int, object]], capacity: int
) -> list[RowRun]:
    """Runs of rows 0, 1, ... ``prefixes``: the length, and an object that is the same for rows with
    equal keys and values there."""
    runs: list[RowRun] = []
    last = None
    for row, (position, (length, owner)) in enumerate(zip(positions, prefixes, strict=True)):
        context = min(length + _padded(position + 1 - length), capacity)
        if not runs or runs[-1].prefix != length:
            runs.append(RowRun(row, row, prefix=length, context=context))
            last = None

        run = runs[-1]
        run.end = row + 1
        run.context = max(run.context, context)
        if length and owner is last:
            run.sharing[-1] = slice(run.sharing[-1].start, row + 1)
        elif length:
            run.sharing.append(slice(row, row + 1))

        last = owner

    return runs


def _padded(own: int) -> int:
    """Own positions to read: a multiple of ``LENGTH_BUCKET`` whose last chunk is not too short."""
    rounded = -(-max(own, 1) // LENGTH_BUCKET) * LENGTH_BUCKET
    last_chunk = rounded % _CHUNK
    if 0 < last_chunk < _SHORTEST_CHUNK:
        rounded += _SHORTEST_CHUNK - last_chunk
    return rounded


def attend_run(run: RowRun, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Each row's newest token attends to its row of the cache.

    Args:
        query: [R, G, M, D] of all rows, scaled.
        keys, values: [R, G, at least context, D or E] of all rows.
        mask: [R, 1, 1, at least context], added to the scores.

    Returns:
        [rows of the run, G * M * E].
    """
    rows = slice(run.first, run.end)
    after_prefix = slice(run.prefix, run.context)
    count = run.end - run.first
    heads, group = query.shape[1:3]
    if count * heads == 1:  # alone, it may be summed in another order
        pair = RowRun(
            0,
            2,
            prefix=run.prefix,
            context=run.context,
            sharing=[slice(0, 2)] if run.sharing else [],
        )
        doubled = (x[rows].repeat(2, 1, 1, 1) for x in (query, keys, values, mask))
        return attend_run(pair, *doubled)[:1]

    queries = query[rows].flatten(0, 1).transpose(1, 2)
    products = torch.bmm(keys[rows, :, after_prefix].flatten(0, 1), queries)  # [R * G, C, M]
    products = products.view(count, heads, -1, group).transpose(2, 3)
    scores = query.new_empty(count, heads, group, run.context)
    torch.add(products, mask[rows, :, :, after_prefix], out=scores[..., run.prefix :])
    for each, here in _parts(run):
        scores[here, ..., : run.prefix] = _shared(query[each], keys[each.start, :, : run.prefix])
    shares = scores.softmax(-1)
    out = _weighted(
        shares[..., run.prefix :].flatten(0, 1), values[rows, :, after_prefix].flatten(0, 1)
    )
    out = out.view(count, heads, group, -1)
    for each, here in _parts(run):
        prefix = values[each.start, :, : run.prefix].transpose(1, 2)
        out[here] += _shared(shares[here, ..., : run.prefix], prefix)

    return out.view(count, -1)


def _parts(run: RowRun) -> list[tuple[slice, slice]]:
    """The rows of each prefix: in the cache, and in the run."""
    return [(each, slice(each.start - run.first, each.stop - run.first)) for each in run.sharing]


def _shared(x: Tensor, weight: Tensor) -> Tensor:
    """x [rows, G, M, K] times weight [G, N, K], transposed: [rows, G, M, N]."""
    by_head = x.transpose(0, 1).reshape(x.shape[1], -1, x.shape[-1])
    products = [independent_rows(*each) for each in zip(by_head, weight, strict=True)]
    return torch.stack(products).view(x.shape[1], len(x), x.shape[2], -1).transpose(0, 1)


def _weighted(shares: Tensor, values: Tensor) -> Tensor:
    """shares [B, M, C] @ values [B, C, E]. In chunks: how a longer product is summed depends on its
    length, which the longest row decides."""
    out = torch.bmm(shares[..., :_CHUNK], values[:, :_CHUNK])
    for first in range(_CHUNK, shares.shape[-1], _CHUNK):
        chunk = slice(first, first + _CHUNK)
        out += torch.bmm(shares[..., chunk], values[:, chunk])
    return out
