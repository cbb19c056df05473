"""The products of a mixture's experts: in autocast's dtype, and with experts on several ranks.

transformers computes all experts of a layer by ``grouped_mm``, which is not on autocast's lists and
casts its input to the weight's dtype: float32. Inside autocast our version hands it the weights
rounded, as autocast does for linear layers; gradients arrive in the weights' own dtype.

Where the experts stay on their ranks (``trainer.expert_parallel``), each token travels to those of
its experts and the result back, by one all-to-all each; the backward pass takes the same two in
reverse (Lepikhin et al. 2020, "GShard", arXiv:2006.16668; without their capacity: no token is
dropped).

    tokens, by expert -> [to the experts' ranks] -> grouped products -> [back] -> weighted sum

Shapes: T = tokens of this rank, k = experts per token, D = hidden size, E = experts of a layer, N =
ranks that share them, R = rows that this rank receives.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from prime_rl.trainer import parallel


class _Weights:
    """The experts of a layer that lie here, with parameters in ``dtype`` (None: their own)."""

    num_experts: int

    def __init__(self, experts: nn.Module, dtype: torch.dtype | None) -> None:
        self._experts = experts
        self._dtype = dtype

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._experts, name)
        if isinstance(attribute, DTensor):
            attribute = attribute.to_local()
        rounds = isinstance(attribute, Tensor) and attribute.is_floating_point()
        return attribute.to(self._dtype) if rounds and self._dtype is not None else attribute


def grouped_mm(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The experts' output [T, D] for hidden states [T, D], the experts chosen for each token [T, k]
    and their weights [T, k]."""
    kind = hidden.device.type
    dtype = None
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        hidden = hidden.to(dtype)

    first = next(experts.parameters(recurse=False), None)
    here = experts if dtype is None else _Weights(experts, dtype)
    if isinstance(first, DTensor):
        return _over_ranks(_Weights(experts, dtype), first, hidden, chosen=chosen, weights=weights)
    output: Tensor = grouped_mm_experts_forward(here, hidden, chosen, weights)
    return output


def _over_ranks(
    here: _Weights, shards: DTensor, hidden: Tensor, chosen: Tensor, weights: Tensor
) -> Tensor:
    """The same for experts of which each rank of a replica has E / N."""
    mesh = shards.device_mesh
    group = mesh.get_group(mesh.ndim - 1)
    num_ranks = mesh.shape[-1]
    num_here = len(shards.to_local())
    num_tokens, k = chosen.shape

    expert_ids, order = torch.sort(chosen.reshape(-1), stable=True)  # by expert, so by rank too
    received, sent_sizes, received_sizes = exchange_counts(
        expert_ids, num_ranks=num_ranks, num_here=num_here, group=group
    )
    rows = parallel.exchange(hidden[order // k], group, sent=sent_sizes, received=received_sizes)
    ids_here = torch.arange(num_here, device=hidden.device).repeat(num_ranks)
    ids_here = ids_here.repeat_interleave(received, output_size=len(rows))  # [R]
    here.num_experts = num_here
    computed = _computed(here, rows, ids_here)
    results = parallel.exchange(computed, group, sent=received_sizes, received=sent_sizes)

    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    results = results[place].view(num_tokens, k, -1)
    return (results * weights[..., None]).sum(1).to(hidden.dtype)


def exchange_counts(
    expert_ids: Tensor, num_ranks: int, num_here: int, group: Any
) -> tuple[Tensor, list[int], list[int]]:
    """How many rows this rank receives from each rank for each of its own experts,
    [N * E / N] int64; and how many it sends to each rank, and receives from each. Waits for the
    device: sizes of an all-to-all are numbers of the host."""
    sent = torch.bincount(expert_ids, minlength=num_ranks * num_here)  # [E]
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    sizes = torch.stack([sent.view(num_ranks, -1).sum(1), received.view(num_ranks, -1).sum(1)])
    sent_sizes, received_sizes = sizes.tolist()
    return received, sent_sizes, received_sizes


def _computed(here: Any, rows: Tensor, expert_ids: Tensor) -> Tensor:
    """[R, D] rows [R, D], each by one expert."""
    if not len(rows):
        # With a graph: the others wait for this rank in the backward pass, and a weight without a
        # gradient would be missing when all ranks take the norm.
        sums = [each.to_local().sum() for each in here._experts.parameters(recurse=False)]
        return rows + 0.0 * torch.stack(sums).sum().to(rows.dtype)

    ones = rows.new_ones(len(rows), 1)
    output: Tensor = grouped_mm_experts_forward(here, rows, expert_ids[:, None], ones)
    return output


def register() -> None:
    """In place of transformers' own, which it calls outside autocast."""
    ALL_EXPERTS_FUNCTIONS.register("grouped_mm", grouped_mm)
