"""Oracle of the LM head: log-softmax and entropy with all logits kept, in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def random(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers in float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def plain(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperatures: Tensor | None, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the labels, [N] or [N, L] as they are, and entropies [N]."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    if temperatures is not None:
        logits = logits / temperatures[:, None]
    log_softmax = logits.log_softmax(-1)
    columns = labels[:, None] if labels.dim() == 1 else labels
    chosen = log_softmax.gather(1, columns).view(labels.shape)
    return chosen, -(log_softmax.exp() * log_softmax).sum(-1)
