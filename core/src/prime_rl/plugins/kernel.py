"""Kernels: how the trainer computes a packed row. Entry-point group ``prime_rl.trainer``.

Without a kernel the trainer computes each sequence of a row by itself, with the attention and the
LM head of transformers. A kernel gives the same numbers in less time or memory.

Shapes: N = targets of a row, D = hidden size, V = vocabulary, L = labels of a target.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from prime_rl.plugins.base import Offer

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from prime_rl.trainer.packing import Packing


class Kernel(Offer):
    """Ways of a row through the model. ``trainer.attention`` selects it by name, and its settings
    are those of ``fused_lm_head``, ``lm_head_block`` and ``share_prompts`` that the run sets. Keep
    ``import torch`` inside the methods."""

    def prepare(self, compiled: bool) -> None:
        """Once, before any row: register attention with transformers. ``compiled``: the decoder
        blocks are compiled, and must call attention outside of their graphs."""

    def packings(self, device: torch.device) -> Sequence[Packing]:
        """The ways, the fastest first. The trainer takes the first one whose log π is that of
        transformers, or its own way if none is (``trainer/self_check.py``)."""
        return ()

    def logprobs(
        self,
        head: nn.Linear,
        hidden: Tensor,
        temperatures: Tensor | None,
        labels: Tensor,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor] | None:
        """log softmax(logits / temperature)[label], in the shape of ``labels`` [N] or [N, L], and
        the entropies [N], which have a gradient only with ``entropy_gradient``. Both are float32,
        or float64 if ``hidden`` [N, D] is. None: compute all logits [N, V] at once."""
        return None
