"""The products of a mixture's experts: in autocast's dtype, and with experts on several ranks.

transformers computes all experts of a layer by ``grouped_mm``, which is not on autocast's lists and
casts its input to the weight's dtype: float32. Inside autocast our version hands it the weights
rounded, as autocast does for linear layers; gradients arrive in the weights' own dtype.

Where the experts stay on their ranks (``trainer.expert_parallel``), tokens travel to them
(``prime_rl.trainer.token_exchange``).

Shapes: T = tokens of this rank, k = experts per token, D = hidden size, R = rows that this rank
receives.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from prime_rl.trainer.token_exchange import local, of_no_row, over_ranks


class _Weights:
    """The experts of a layer that lie here, with parameters in ``dtype`` (None: their own)."""

    num_experts: int

    def __init__(self, experts: nn.Module, dtype: torch.dtype | None) -> None:
        self._experts = experts
        self._dtype = dtype

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._experts, name)
        if isinstance(attribute, Tensor):
            attribute = local(attribute)
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
        here = _Weights(experts, dtype)
        here.num_experts = len(first.to_local())
        return over_ranks(partial(_computed, here), first, hidden, chosen=chosen, weights=weights)

    output: Tensor = grouped_mm_experts_forward(here, hidden, chosen, weights)
    return output


def _computed(here: Any, rows: Tensor, expert_ids: Tensor) -> Tensor:
    """[R, D] rows [R, D], each by one expert."""
    if not len(rows):
        return of_no_row(rows, here._experts.parameters(recurse=False))

    ones = rows.new_ones(len(rows), 1)
    output: Tensor = grouped_mm_experts_forward(here, rows, expert_ids[:, None], ones)
    return output


def register() -> None:
    """In place of transformers' own, which it calls outside autocast."""
    ALL_EXPERTS_FUNCTIONS.register("grouped_mm", grouped_mm)
