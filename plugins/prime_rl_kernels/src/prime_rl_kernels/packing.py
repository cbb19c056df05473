"""Ways of a row through the model in one call, with attention that keeps its documents apart.

    shared   a prompt of several documents is computed once (``prefix_sharing.py``)
    packed   the documents lie end to end

A recurrent or convolution layer carries its state from one document into the next, unless its
kernel reads the boundaries that ``packed`` passes. A model with attention of its own may see the
whole row. The trainer measures which way a model needs (``self_check``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from prime_rl.trainer.device import to_device
from prime_rl.trainer.packing import Ints, Layout, Packing, decode
from prime_rl_kernels.attention import NAMES, Documents
from prime_rl_kernels.prefix_sharing import RowLayout, shared_layout


@dataclass(frozen=True)
class Packed(Packing):
    """One call for the row."""

    name: str = "packed"
    attention: str = NAMES["varlen"]

    def lay_out(
        self,
        token_ids: Ints,
        sequence_ids: Ints,
        lengths: Ints,
        targets: Ints,
        device: torch.device,
    ) -> Layout:
        """Every token, as it lies in the row."""
        documents = Documents(tuple(lengths.tolist()), device)
        positions = np.arange(len(token_ids)) - (np.cumsum(lengths) - lengths)[sequence_ids]
        return RowLayout(
            token_ids=to_device(token_ids, np.int64, device),
            lengths=documents.lengths,
            sources=to_device(targets - 1, np.int64, device),
            position_ids=to_device(positions, np.int64, device),
            documents=documents,
        )

    def hidden_states(self, model: Any, layout: Layout) -> Tensor:
        """[U, D] of the tokens of ``layout``, in its order."""
        row = cast(RowLayout, layout)
        return decode(
            model,
            row.token_ids[None],
            position_ids=row.position_ids[None],
            documents=row.documents,
            **self.boundaries(row.documents),
        )[0]

    def boundaries(self, documents: Documents) -> dict[str, Tensor]:
        """For kernels of recurrent and convolution layers."""
        return documents.boundaries


@dataclass(frozen=True)
class Shared(Packed):
    """One call for the row, with prompts that several sequences share computed once."""

    name: str = "shared"

    def lay_out(
        self,
        token_ids: Ints,
        sequence_ids: Ints,
        lengths: Ints,
        targets: Ints,
        device: torch.device,
    ) -> Layout:
        """Shared prompts once, and nothing that no target depends on."""
        if not len(targets):
            return super().lay_out(token_ids, sequence_ids, lengths, targets, device)
        return shared_layout(token_ids, sequence_ids, lengths, targets, device)

    def boundaries(self, documents: Documents) -> dict[str, Tensor]:
        """None: where prompts are shared no layer carries state. And torch.compile would compile
        rows with and without them separately."""
        return {}
