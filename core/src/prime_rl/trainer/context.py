"""Rows that several ranks compute together, so that a row may be longer than one rank's memory.

    rank            0        1        2        3      trainer.context_parallel = 2
    row             a        a        b        b
    its tokens      first    second   first    second half
    its targets     first    second   first    second half

Neighboring ranks hold the same row. Each computes the hidden states of an equal part of its tokens.
Attention is between tokens of all parts, so for it the ranks exchange tokens for heads and back
(Ulysses; Jacobs et al. 2023, arXiv:2309.14509). The ranks then have all hidden states, and each
computes log π of an equal part of the targets. So heads, losses and streams see the whole row.

Every rank of a row has the whole loss, and its gradient is a share of it: see ``share_of_loss``.
The gradients that FSDP sums over all ranks then are those of one rank per row.

A collective needs all ranks of a row, in the same order: forward, and in the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from prime_rl.trainer import parallel

Value = TypeVar("Value")

_group: dist.ProcessGroup | None = None
"""The ranks of this rank's row. None: it computes its row alone."""


def join_ranks(size: int) -> None:
    """From now on ``size`` neighbors compute a row together. Every rank calls this."""
    global _group
    _group = None
    if size > 1:
        make: Any = dist.new_subgroups
        _group, _ = make(group_size=size, timeout=parallel.limit())  # not torch's ten minutes


def num_parts() -> int:
    """How many ranks compute a row."""
    return dist.get_world_size(_group) if _group else 1


def _part() -> int:
    return dist.get_rank(_group) if _group else 0


def one_per_row(values: Sequence[Value]) -> Sequence[Value]:
    """From a value per rank, in order of rank, the values of one rank per row."""
    return values[:: num_parts()]


def is_first() -> bool:
    """Whether this rank speaks for its row where a row counts once, as in a file of all rows."""
    return _part() == 0


def share_of_loss() -> float:
    """What the loss of a row is multiplied by before the backward pass of each of its ranks: they
    compute it as often as they are many, and gradients are summed over all ranks."""
    return 1.0 / num_parts()


def padded(length: int) -> int:
    """The least number of tokens from ``length`` on that splits into equal parts."""
    return -(-length // num_parts()) * num_parts()


def part_of_tokens(column: Tensor) -> Tensor:
    """This rank's part of [U, ...]: U / parts."""
    return column.chunk(num_parts())[_part()]


def part_of_targets(num_targets: int, device: torch.device) -> Tensor | None:
    """[ceil(N / parts)] int64: the targets whose log π this rank computes. None: all of them. The
    last ranks may repeat the last target, so that all have equally many."""
    if _group is None:
        return None

    size = -(-num_targets // num_parts())
    first = _part() * size
    return torch.arange(first, first + size, device=device).clamp_(max=num_targets - 1)


def gather_parts(part: Tensor, length: int | None = None) -> Tensor:
    """The parts of all ranks, end to end: [parts * U, ...], of which the first ``length`` are
    kept. Its gradient is summed over the ranks."""
    if _group is None:
        return part

    gather: Any = _GatherParts.apply
    rows: Tensor = gather(part, _group)
    return rows[:length]


class _GatherParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        size = dist.get_world_size(group)
        rows = part.new_empty(size * len(part), *part.shape[1:])
        parallel.all_gather(rows, part.contiguous(), group=group)
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        size = dist.get_world_size(ctx.group)
        # Each rank's loss reads all parts, so the gradient of a part is the sum over ranks.
        part = grad.new_empty(len(grad) // size, *grad.shape[1:])
        parallel.reduce_scatter(part, grad.contiguous(), group=ctx.group)
        return part, None


@torch.no_grad()
def total(number: Tensor) -> Tensor:
    """The sum of what a row's ranks have, of any shape."""
    if _group is not None:
        # `all_reduce` adds in place, and the caller still uses its own part.
        number = number.clone()
        dist.all_reduce(number, group=_group)
    return number


def heads_for_tokens(column: Tensor) -> Tensor:
    """[1, H, U / parts, D], all heads of this rank's tokens -> [1, H / parts, U, D], this rank's
    heads of all tokens."""
    _, heads, tokens, size = column.shape
    parts = num_parts()
    # Rank i gets the i-th part of the heads, from each rank those of its tokens.
    by_rank = column[0].reshape(parts, heads // parts, tokens, size)
    # [parts, H / parts, U / parts, D]: tokens by rank
    received = parallel.exchange(by_rank, _group)
    return received.transpose(0, 1).reshape(1, heads // parts, parts * tokens, size)


def tokens_for_heads(output: Tensor) -> Tensor:
    """[1, U, H / parts, D], this rank's heads of all tokens -> [1, U / parts, H, D]."""
    _, tokens, heads, size = output.shape
    parts = num_parts()
    # Back: rank i gets the i-th part of the tokens, from each rank its heads.
    by_rank = output[0].reshape(parts, tokens // parts, heads, size)
    received = parallel.exchange(by_rank, _group)  # [parts, U / parts, H / parts, D], by rank
    return received.transpose(0, 1).reshape(1, tokens // parts, parts * heads, size)
