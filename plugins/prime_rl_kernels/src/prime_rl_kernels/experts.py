"""The products of a mixture's experts: in autocast's dtype, and with experts on several ranks.

transformers computes all experts of a layer by ``grouped_mm``, which is not on autocast's lists and
casts its input to the weight's dtype: float32. Inside autocast our version hands it the weights
rounded, as autocast does for linear layers; gradients arrive in the weights' own dtype.

With ``trainer.expert_parallel`` each token travels to the ranks of its experts and the result back,
by one all-to-all each; the backward pass takes the same two in reverse (Lepikhin et al. 2020,
"GShard", arXiv:2006.16668; without their capacity: no token is dropped). Meanwhile a rank gathers
weights of its experts from other groups, if these have them (``prime_rl.trainer.expert_ranks``).

    tokens, by expert -> [to the experts' ranks] -> grouped products -> [back] -> weighted sum

Shapes: T = tokens of this rank, k = experts per token, D = hidden size, E = experts of a layer, n =
ranks of a group, R = rows that this rank receives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from prime_rl.trainer import parallel
from prime_rl.trainer.expert_ranks import Gathering, ranks_of


class _Rounded:
    """The experts of a layer with parameters in ``dtype``."""

    def __init__(self, experts: nn.Module, dtype: torch.dtype) -> None:
        self._experts = experts
        self._dtype = dtype

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._experts, name)
        rounds = isinstance(attribute, Tensor) and attribute.is_floating_point()
        return attribute.to(self._dtype) if rounds else attribute


class _Here:
    """The experts of a layer that this rank computes."""

    def __init__(self, experts: nn.Module, weights: Mapping[str, Tensor]) -> None:
        """``weights``: those of the experts here, by name."""
        self._experts = experts
        self.weights = weights
        self.num_experts = len(next(iter(weights.values())))

    def __getattr__(self, name: str) -> Any:
        return self.weights[name] if name in self.weights else getattr(self._experts, name)


def grouped_mm(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The experts' output [T, D] for hidden states [T, D], the experts chosen for each token [T, k]
    and their weights [T, k]."""
    kind = hidden.device.type
    dtype = None
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        hidden = hidden.to(dtype)

    ranks = ranks_of(experts)
    if ranks is not None:
        gathering = Gathering(ranks, dict(experts.named_parameters(recurse=False)), dtype)
        return _over_ranks(experts, gathering, hidden, chosen=chosen, weights=weights)
    here = experts if dtype is None else _Rounded(experts, dtype)
    output: Tensor = grouped_mm_experts_forward(here, hidden, chosen, weights)
    return output


def _over_ranks(
    experts: nn.Module, gathering: Gathering, hidden: Tensor, chosen: Tensor, weights: Tensor
) -> Tensor:
    """The same over the ranks of a group, which compute E / n experts each."""
    ranks = gathering.ranks
    num_tokens, k = chosen.shape

    # By place, so by rank too.
    places, order = torch.sort(ranks.places(chosen.reshape(-1), gathering.num_experts), stable=True)
    received, sent_sizes, received_sizes = exchange_counts(
        places,
        num_ranks=ranks.num_ranks,
        num_here=gathering.num_here,
        group=ranks.travel,
    )
    rows = parallel.exchange(
        hidden[order // k], ranks.travel, sent=sent_sizes, received=received_sizes
    )
    ids_here = torch.arange(gathering.num_here, device=hidden.device).repeat(ranks.num_ranks)
    ids_here = ids_here.repeat_interleave(received, output_size=len(rows))  # [R]

    # Gathering goes on until here, beside the exchange of tokens.
    computed = _computed(_Here(experts, gathering.wait()), rows, ids_here)
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


def _computed(here: Any, rows: Tensor, expert_ids: Tensor) -> Tensor:
    """[R, D] rows [R, D], each by one expert."""
    if not len(rows):
        # With a graph: the others wait for this rank in the backward pass, and a weight without a
        # gradient would be missing when all ranks take the norm.
        sums = [each.sum() for each in here.weights.values()]
        return rows + 0.0 * torch.stack(sums).sum().to(rows.dtype)

    ones = rows.new_ones(len(rows), 1)
    output: Tensor = grouped_mm_experts_forward(here, rows, expert_ids[:, None], ones)
    return output


def register() -> None:
    """In place of transformers' own, which it calls outside autocast."""
    ALL_EXPERTS_FUNCTIONS.register("grouped_mm", grouped_mm)
