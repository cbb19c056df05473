"""Tokens travel to the ranks of their experts, and the results back (``trainer.expert_parallel``).

    tokens, by expert -> [to the experts' ranks] -> products -> [back] -> weighted sum

One all-to-all each; the backward pass takes the same two in reverse (Lepikhin et al. 2020,
"GShard", arXiv:2006.16668; without their capacity: no token is dropped).

Shapes: T = tokens of this rank, k = experts per token, D = hidden size, E = experts of a layer, N =
ranks that share them, R = rows that this rank receives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from prime_rl.trainer import parallel

Products = Callable[[Tensor, Tensor], Tensor]
"""The results [R, D] of rows [R, D] by the experts [R] of this rank, counted from its first."""


def over_ranks(
    products: Products, shards: DTensor, hidden: Tensor, chosen: Tensor, weights: Tensor
) -> Tensor:
    """The experts' output [T, D] for hidden states [T, D], the experts chosen for each token [T, k]
    and their weights [T, k]. Each rank of a replica has E / N experts. ``shards``: a weight with a
    row per expert, as it lies on the ranks. Every rank calls this."""
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
    computed = products(rows, ids_here)
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


def of_no_row(rows: Tensor, weights: Iterable[Tensor]) -> Tensor:
    """The results of a rank that is sent nothing: ``rows`` [0, D], with the graph of the experts'
    ``weights`` that train. The others wait for this rank in the backward pass, and a weight without
    a gradient would be missing when all ranks take the norm."""
    sums = [local(each).sum() for each in weights if each.requires_grad]
    return rows + 0.0 * torch.stack(sums).sum().to(rows.dtype) if sums else rows


def local(tensor: Tensor) -> Tensor:
    """This rank's experts of a weight, with the way back for its gradient."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
