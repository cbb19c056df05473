"""The products of a mixture's experts in autocast's dtype.

transformers computes all experts of a layer by ``grouped_mm``, which is not on autocast's lists and
casts its input to the weight's dtype: float32. Inside autocast our version hands it the weights
rounded, as autocast does for linear layers; gradients arrive in the weights' own dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward


class _Rounded:
    """The experts of a layer, with parameters in ``dtype``."""

    def __init__(self, experts: nn.Module, dtype: torch.dtype) -> None:
        self._experts = experts
        self._dtype = dtype

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._experts, name)
        rounds = isinstance(found, Tensor) and found.is_floating_point()
        return found.to(self._dtype) if rounds else found


def grouped_mm(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The experts' output [T, D] for hidden states [T, D], the experts chosen for each token [T, k]
    and their weights [T, k]."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        experts = _Rounded(experts, dtype)
        hidden = hidden.to(dtype)
    found: Tensor = grouped_mm_experts_forward(experts, hidden, chosen, weights)
    return found


def register() -> None:
    """In place of transformers' own, which it calls outside autocast."""
    ALL_EXPERTS_FUNCTIONS.register("grouped_mm", grouped_mm)
