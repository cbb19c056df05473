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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
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


def join(modules: Sequence[nn.Module], num_ranks: int, reduces_in: torch.dtype) -> None:
    """Give modules of experts, whose weights are in shards of whole experts, their groups of
    ``num_ranks``. Every rank calls this."""
    weight = cast(DTensor, next(modules[0].parameters()))
    mesh = weight.device_mesh
    num_holders = mesh.shape[-1]
    num_shards = num_holders // num_ranks

    travel = sharing = mesh.get_group(mesh.ndim - 1)
    if num_shards > 1:
        num_copies = mesh.size() // num_holders
        sizes = {"shard": num_shards, "expert": num_ranks}
        mesh = parallel.make_mesh(mesh.device_type, replicate=num_copies, **sizes)
        travel = mesh.get_group("expert")
        sharing = mesh.get_group("shard")

    ranks = ExpertRanks(
        num_ranks=num_ranks,
        num_shards=num_shards,
        travel=travel,
        sharing=sharing,
        reduces_in=reduces_in,
    )
    for module in modules:
        module.prime_rl_ranks = ranks  # type: ignore[assignment]  # no tensor


def ranks_of(module: nn.Module) -> ExpertRanks | None:
    """The groups of a module of experts. None: it has all its experts here."""
    return getattr(module, "prime_rl_ranks", None)


class Gathering:
    """The weights [E / n, ...] that this rank computes with, on their way from those that share
    them. Every rank makes one and waits for it, with the same weights, in the same order."""

    def __init__(
        self, ranks: ExpertRanks, weights: Mapping[str, DTensor], dtype: torch.dtype | None
    ) -> None:
        """``dtype``: the type in which they travel and are used. None: their own."""
        self.ranks = ranks
        self._dtype = dtype
        self._parts = {name: weight.to_local() for name, weight in weights.items()}
        self.num_here = ranks.num_shards * len(next(iter(self._parts.values())))
        """E / n"""
        self.num_experts = ranks.num_ranks * self.num_here
        """E"""
        self._wholes: list[Tensor] = []
        self._pending: list[Any] = []
        if ranks.num_shards == 1:
            return

        for part in self._parts.values():
            rounded = part.detach().to(dtype or part.dtype)
            whole = rounded.new_empty(ranks.num_shards * len(part), *part.shape[1:])
            work = parallel.all_gather(whole, rounded, group=ranks.sharing, async_op=True)
            self._wholes.append(whole)
            self._pending.append(work)

    def wait(self) -> dict[str, Tensor]:
        """The weights by name."""
        if self.ranks.num_shards == 1:
            return {name: part.to(self._dtype or part.dtype) for name, part in self._parts.items()}

        apply: Any = _Gathered.apply
        return dict(zip(self._parts, apply(self, *self._parts.values()), strict=True))

    def arrived(self) -> tuple[Tensor, ...]:
        for work in self._pending:
            work.wait()
        return tuple(self._wholes)


class _Gathered(torch.autograd.Function):
    """One node for all weights of a layer: its collectives then run in the same order on all ranks,
    whichever gradient a rank has first."""

    @staticmethod
    def forward(ctx: Any, gathering: Gathering, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.ranks = gathering.ranks
        ctx.dtypes = [part.dtype for part in parts]
        return gathering.arrived()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ranks = ctx.ranks
        sums = []
        pending = []
        for grad in grads:
            rounded = grad.to(ranks.reduces_in).contiguous()
            part = rounded.new_empty(len(grad) // ranks.num_shards, *grad.shape[1:])
            work = parallel.reduce_scatter(part, rounded, group=ranks.sharing, async_op=True)
            sums.append(part)
            pending.append(work)

        for work in pending:
            work.wait()
        return None, *(part.to(dtype) for part, dtype in zip(sums, ctx.dtypes, strict=True))
