"""The ranks among which tokens travel to the experts of a mixture, and those that share experts.

    experts 0 to 7, a copy of N = 4 ranks, groups of n = 2 (``trainer.expert_parallel``)

    rank          0          1          2          3
    holds         0 1        2 3        4 5        6 7
    computes      0 1 4 5    2 3 6 7    0 1 4 5    2 3 6 7
    for tokens    of 0, 1    of 0, 1    of 2, 3    of 2, 3

A group has all experts of a layer, so tokens stay within it: on one machine, if a group is one.
Ranks at the same place of their groups, here 0 and 2, compute the same experts. Each holds an equal
part of them. It gathers the others' before it computes, and its part of the gradients' sum comes
back after the backward pass (as FSDP does; Zhao et al. 2023, arXiv:2304.11277). A group of all N
ranks gathers nothing.

Rank r holds the r-th part of the experts, whatever the size of a group, and so it does where all
experts are gathered. Weights in files and checkpoints therefore fit groups of any size.

Shapes: E = experts of a layer, N = ranks that share a copy, n = ranks of a group, S = N / n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from prime_rl.trainer import parallel


@dataclass(frozen=True)
class ExpertRanks:
    """The groups of this rank."""

    num_ranks: int
    """n"""
    num_shards: int
    """S"""
    travel: Any
    """The process group of the n ranks among which tokens travel."""
    sharing: Any
    """That of the S ranks that compute the same experts."""
    reduces_in: torch.dtype
    """The type in which these sum gradients."""

    def places(self, chosen: Tensor, num_experts: int) -> Tensor:
        """For the numbers of experts ``chosen``, of any shape: how many experts come before each,
        where those of a group are counted rank by rank, in the order in which a rank has them."""
        if self.num_shards == 1:
            return chosen

        # The r-th part of the experts is that of rank r = shard * n + rank of the group.
        held = num_experts // (self.num_shards * self.num_ranks)
        part = chosen // held
        rank = part % self.num_ranks
        shard = part // self.num_ranks
        return (rank * self.num_shards + shard) * held + chosen % held


_ranks: ExpertRanks | None = None


def join(mesh: DeviceMesh, num_ranks: int, reduces_in: torch.dtype) -> None:
    """From now on groups of ``num_ranks`` exchange tokens. ``mesh``: that of the experts' weights.
    Every rank calls this."""
    global _ranks
    num_holders = mesh.shape[-1]
    num_shards = num_holders // num_ranks

    travel = sharing = mesh.get_group(mesh.ndim - 1)
    if num_shards > 1:
        num_copies = mesh.size() // num_holders
        groups = parallel.make_mesh(
            mesh.device_type, replicate=num_copies, shard=num_shards, expert=num_ranks
        )
        travel = groups.get_group("expert")
        sharing = groups.get_group("shard")

    _ranks = ExpertRanks(
        num_ranks=num_ranks,
        num_shards=num_shards,
        travel=travel,
        sharing=sharing,
        reduces_in=reduces_in,
    )


def current() -> ExpertRanks:
    """Those of the policy."""
    assert _ranks is not None
    return _ranks


class Here:
    """The experts that this rank computes."""

    def __init__(self, weights: Sequence[Tensor], arrived: Sequence[Tensor]) -> None:
        self.all = arrived
        self._by_weight = {id(weight): each for weight, each in zip(weights, arrived, strict=True)}

    def __call__(self, weight: Tensor) -> Tensor:
        """Of a weight in shards: that of the experts here, [E / n, ...]."""
        return self._by_weight[id(weight)]


class Gathering:
    """Weights [E, ...] in shards on their way to the ranks that compute with them, which get
    [E / n, ...] of each. Every rank of a group makes one, with the same weights, and waits for
    it."""

    def __init__(self, weights: Sequence[DTensor], dtype: torch.dtype | None = None) -> None:
        """``dtype``: the type in which they travel and arrive. None: their own."""
        self.ranks = current()
        self._weights = weights
        self._dtype = dtype
        self._parts = [weight.to_local() for weight in weights]
        self._wholes: list[Tensor] = []
        self._pending: list[Any] = []
        if self.ranks.num_shards == 1:
            return

        for part in self._parts:
            rounded = part.detach().to(dtype or part.dtype)
            whole = rounded.new_empty(self.ranks.num_shards * len(part), *part.shape[1:])
            work = parallel.all_gather(whole, rounded, group=self.ranks.sharing, async_op=True)
            self._wholes.append(whole)
            self._pending.append(work)

    def wait(self) -> Here:
        """What has arrived."""
        if self.ranks.num_shards == 1:
            arrived = [part.to(self._dtype or part.dtype) for part in self._parts]
        else:
            apply: Any = _Gathered.apply
            arrived = apply(self, *self._parts)
        return Here(self._weights, arrived)

    def finish(self) -> tuple[Tensor, ...]:
        """Without a way back for gradients."""
        for work in self._pending:
            work.wait()
        return tuple(self._wholes)


class _Gathered(torch.autograd.Function):
    """One node for all weights of a layer. So its collectives run in the same order on all ranks,
    whichever gradient a rank has first."""

    @staticmethod
    def forward(ctx: Any, gathering: Gathering, *parts: Tensor) -> tuple[Tensor, ...]:
        # Else autograd makes zeros as large as all frozen experts, which nothing reads.
        ctx.set_materialize_grads(False)
        ctx.ranks = gathering.ranks
        ctx.dtypes = [part.dtype for part in parts]
        wholes = gathering.finish()
        ctx.sizes = [whole.size() for whole in wholes]
        ctx.device = wholes[0].device
        trained = ctx.needs_input_grad[1:]
        ctx.mark_non_differentiable(
            *(whole for whole, trains in zip(wholes, trained, strict=True) if not trains)
        )
        return wholes

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ranks = ctx.ranks
        sums: list[Tensor | None] = []
        pending = []
        for grad, size, trains in zip(grads, ctx.sizes, ctx.needs_input_grad[1:], strict=True):
            if not trains:
                sums.append(None)
                continue
            if grad is None:  # of a weight that is not used here; the other ranks may have one
                rounded = torch.zeros(size, dtype=ranks.reduces_in, device=ctx.device)
            else:
                rounded = grad.to(ranks.reduces_in).contiguous()
            part = rounded.new_empty(len(rounded) // ranks.num_shards, *rounded.shape[1:])
            work = parallel.reduce_scatter(part, rounded, group=ranks.sharing, async_op=True)
            sums.append(part)
            pending.append(work)

        for work in pending:
            work.wait()
        of_parts = zip(sums, ctx.dtypes, strict=True)
        return None, *(None if part is None else part.to(dtype) for part, dtype in of_parts)
