"""Losses of the rl component. Trainer side: entry-point group ``prime_rl.trainer``.

Shapes: T = tokens of one sequence, or of all sequences of a micro batch end to end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from prime_rl.plugins.base import Offer

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class LossInputs:
    """What the rl loss sees of one sequence (or of many, if the loss is ``token_wise``). All
    tensors: [T]."""

    trainer_logprobs: torch.Tensor
    """log π of each token under the weights in training; carries the gradient."""
    inference_logprobs: torch.Tensor
    """log μ under the policy that sampled it."""
    ref_logprobs: torch.Tensor | None
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    """bool: this component's member tokens."""
    loss_weights: torch.Tensor | None
    """The component's weight stream; None means 1.0 everywhere."""


@dataclass(frozen=True)
class TokenMetric:
    """A metric that is a mean over some tokens of each sequence (0 where none), then over
    sequences."""

    values: torch.Tensor
    """[T] float."""
    mask: torch.Tensor
    """[T] bool."""


@dataclass(frozen=True)
class LossOutputs:
    """A loss summed over member tokens, not normalized, and its metrics."""

    loss: torch.Tensor
    """0-dim."""
    metrics: Mapping[str, torch.Tensor | TokenMetric]
    """0-dim tensors (one value per sequence), 1-D ones (each entry counts) or ``TokenMetric``.
    ``is_masked``, ``is_masked_high`` and ``is_masked_low`` also go to the token export."""


class Loss(Offer):
    """The loss of the ``rl`` component. Keep ``import torch`` inside ``__call__``: listing plugins
    must stay fast."""

    token_wise: ClassVar[bool] = False
    """Each term of the sum depends on its own token alone, and the metrics are ``TokenMetric``s:
    the trainer calls the loss once per micro batch instead of once per sequence."""

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Sum the loss over ``inputs.loss_mask``. The trainer divides by the global count of member
        tokens."""
        raise NotImplementedError
