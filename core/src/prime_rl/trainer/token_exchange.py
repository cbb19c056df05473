"""Tokens travel to the ranks of their experts, and the results back (``trainer.expert_parallel``).

    tokens, by expert -> [to the experts' ranks] -> products -> [back] -> weighted sum

One all-to-all each; the backward pass takes the same two in reverse (Lepikhin et al. 2020,
"GShard", arXiv:2006.16668; without their capacity: no token is dropped).

Meanwhile a rank gathers weights of its experts from other groups, if these have them
(``expert_ranks.py``).

Shapes: T = tokens of this rank, k = experts per token, D = hidden size, E = experts of a layer, n =
ranks of a group, R = rows that this rank receives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from prime_rl.trainer import parallel
from prime_rl.trainer.expert_ranks import Gathering, Here

Products = Callable[[Here, Tensor, Tensor], Tensor]
"""The results [R, D] of rows [R, D] by experts [R] that are here, counted from the first. R > 0."""


def over_ranks(
    products: Products,
    shards: Sequence[Tensor],
    hidden: Tensor,
    *,
    chosen: Tensor,
    weights: Tensor,
    num_experts: int,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The experts' output [T, D] for hidden states [T, D], the experts chosen for each token [T, k]
    and their weights [T, k]. Every rank calls this.

    ``shards``: the weights that ``products`` asks for, as they lie on the ranks (``DTensor``).
    ``num_experts``: E. ``dtype``: the type in which weights arrive; None: their own.
    """
    gathering = Gathering(cast(Sequence[DTensor], shards), dtype)
    ranks = gathering.ranks
    num_here = num_experts // ranks.num_ranks
    num_tokens, k = chosen.shape

    # By place, so by rank too.
    places, order = torch.sort(ranks.places(chosen.reshape(-1), num_experts), stable=True)
    received, sent_sizes, received_sizes = exchange_counts(
        places, num_ranks=ranks.num_ranks, num_here=num_here, group=ranks.travel
    )
    rows = parallel.exchange(
        hidden[order // k], ranks.travel, sent=sent_sizes, received=received_sizes
    )
    ids_here = torch.arange(num_here, device=hidden.device).repeat(ranks.num_ranks)
    ids_here = ids_here.repeat_interleave(received, output_size=len(rows))  # [R]

    # Only now: gathering goes on beside the exchange.
    here = gathering.wait()
    computed = products(here, rows, ids_here) if len(rows) else _of_no_row(rows, here)
    results = parallel.exchange(computed, ranks.travel, sent=received_sizes, received=sent_sizes)

    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    results = results[place].view(num_tokens, k, -1)
    return (results * weights[..., None]).sum(1).to(hidden.dtype)


def exchange_counts(
    places: Tensor, num_ranks: int, num_here: int, group: Any
) -> tuple[Tensor, list[int], list[int]]:
    """For the places of the experts of each row: how many rows this rank receives from each rank
    for each expert here, [n * E / n] int64; and how many it sends to each rank, and receives from
    each. Waits for the device: sizes of an all-to-all are numbers of the host."""
    sent = torch.bincount(places, minlength=num_ranks * num_here)  # [E]
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    sizes = torch.stack([sent.view(num_ranks, -1).sum(1), received.view(num_ranks, -1).sum(1)])
    sent_sizes, received_sizes = sizes.tolist()
    return received, sent_sizes, received_sizes


def _of_no_row(rows: Tensor, here: Here) -> Tensor:
    """The results of a rank that is sent nothing: ``rows`` [0, D], with the graph of the experts'
    weights that train. The others wait for this rank in the backward pass, and a weight without a
    gradient would be missing when all ranks take the norm."""
    sums = [each.sum() for each in here.all if each.requires_grad]
    return rows + 0.0 * torch.stack(sums).sum().to(rows.dtype) if sums else rows
