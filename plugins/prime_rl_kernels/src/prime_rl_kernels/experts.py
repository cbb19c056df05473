"""The products of a mixture's experts: in autocast's dtype, and with experts on several ranks.

transformers computes all experts of a layer by ``grouped_mm``, which is not on autocast's lists and
casts its input to the weight's dtype: float32. Inside autocast our version hands it the weights
rounded, as autocast does for linear layers; gradients arrive in the weights' own dtype.

With ``trainer.expert_parallel`` tokens travel to the ranks of their experts
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

from prime_rl.trainer.expert_ranks import Here
from prime_rl.trainer.token_exchange import over_ranks


class _Rounded:
    """The experts of a layer with parameters in ``dtype``."""

    def __init__(self, experts: nn.Module, dtype: torch.dtype) -> None:
        self._experts = experts
        self._dtype = dtype

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._experts, name)
        rounds = isinstance(attribute, Tensor) and attribute.is_floating_point()
        return attribute.to(self._dtype) if rounds else attribute


class _Part:
    """Those of a layer that this rank computes."""

    def __init__(self, experts: nn.Module, here: Here) -> None:
        self._experts = experts
        self._here = here
        self.num_experts = len(here.all[0])

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._experts, name)
        return self._here(attribute) if isinstance(attribute, nn.Parameter) else attribute


def grouped_mm(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The experts' output [T, D] for hidden states [T, D], the experts chosen for each token [T, k]
    and their weights [T, k]."""
    kind = hidden.device.type
    dtype = None
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        hidden = hidden.to(dtype)

    stored = [*experts.parameters(recurse=False)]
    if stored and isinstance(stored[0], DTensor):
        return over_ranks(
            partial(_of_rows, experts),
            stored,
            hidden,
            chosen=chosen,
            weights=weights,
            num_experts=experts.num_experts,
            dtype=dtype,
        )

    here = experts if dtype is None else _Rounded(experts, dtype)
    output: Tensor = grouped_mm_experts_forward(here, hidden, chosen, weights)
    return output


def _of_rows(experts: nn.Module, here: Here, rows: Tensor, expert_ids: Tensor) -> Tensor:
    """[R, D] rows [R, D], each by one expert."""
    ones = rows.new_ones(len(rows), 1)
    part = _Part(experts, here)
    output: Tensor = grouped_mm_experts_forward(part, rows, expert_ids[:, None], ones)
    return output


def register() -> None:
    """In place of transformers' own, which it calls outside autocast."""
    ALL_EXPERTS_FUNCTIONS.register("grouped_mm", grouped_mm)
