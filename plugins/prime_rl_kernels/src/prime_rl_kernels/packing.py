"""Ways of a row through the model in one call, with attention that keeps its documents apart.

    shared   a prompt of several documents is computed once (``prefix_sharing.py``)
    packed   the documents lie end to end

A recurrent or convolution layer carries its state from one document into the next, unless its
kernel reads the boundaries that ``packed`` passes. A model with attention of its own may see the
whole row. The trainer measures which way a model needs (``self_check``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from prime_rl.trainer import context
from prime_rl.trainer.device import to_device
from prime_rl.trainer.packing import Ints, Layout, Packing, decode
from prime_rl.trainer.routes import counted
from prime_rl_kernels.attention import NAMES, Documents
from prime_rl_kernels.prefix_sharing import RowLayout, shared_layout


@dataclass(frozen=True)
class WholeRow(Packing):
    """One call for the row. Of several ranks that compute it, each calls the model with its part of
    the tokens."""

    name: str = "packed"
    attention: str = NAMES["varlen"]
    splits_rows: ClassVar[bool] = True

    def lay_out(
        self,
        token_ids: Ints,
        sequence_ids: Ints,
        lengths: Ints,
        targets: Ints,
        device: torch.device,
        ends: Ints | None = None,
    ) -> Layout:
        """Every token, as it lies in the row, and a document that fills the last rank's part."""
        positions = np.arange(len(token_ids)) - (np.cumsum(lengths) - lengths)[sequence_ids]
        filling = context.padded(len(token_ids)) - len(token_ids)
        computed = lengths
        num_owners = None
        if filling:  # no target reads it
            is_of_row = np.arange(len(token_ids) + filling) < len(token_ids)
            num_owners = to_device(is_of_row, np.int64, device)
            token_ids = np.concatenate([token_ids, np.repeat(token_ids[:1], filling)])
            positions = np.concatenate([positions, np.arange(filling)])
            computed = np.append(lengths, filling)
        documents = Documents(tuple(computed.tolist()), device)
        return RowLayout(
            token_ids=to_device(token_ids, np.int64, device),
            lengths=tuple(lengths.tolist()),
            sources=to_device(targets - 1, np.int64, device),
            ends=None if ends is None else to_device(ends, np.int64, device),
            num_owners=num_owners,
            position_ids=to_device(positions, np.int64, device),
            documents=documents,
        )

    def hidden_states(self, model: Any, layout: Layout) -> Tensor:
        """[U, D] of the tokens of ``layout``, in its order."""
        row = cast(RowLayout, layout)
        num_owners = row.num_owners
        if num_owners is not None:
            num_owners = context.part_of_tokens(num_owners)
        with counted(num_owners):
            states = decode(
                model,
                context.part_of_tokens(row.token_ids)[None],
                position_ids=context.part_of_tokens(row.position_ids)[None],
                documents=row.documents,
                **self.boundaries(row.documents),
            )
        return context.gather_parts(states.squeeze(0))

    def boundaries(self, documents: Documents) -> dict[str, Tensor]:
        """For kernels of recurrent and convolution layers, which need all tokens of a document."""
        return documents.boundaries if context.num_parts() == 1 else {}


@dataclass(frozen=True)
class SharedPrompts(WholeRow):
    """One call for the row, with prompts that several sequences share computed once."""

    name: str = "shared"

    def lay_out(
        self,
        token_ids: Ints,
        sequence_ids: Ints,
        lengths: Ints,
        targets: Ints,
        device: torch.device,
        ends: Ints | None = None,
    ) -> Layout:
        """Shared prompts once, and nothing that no target or end depends on."""
        if not len(targets):
            return super().lay_out(token_ids, sequence_ids, lengths, targets, device, ends)
        return shared_layout(
            token_ids, sequence_ids, lengths=lengths, targets=targets, device=device, ends=ends
        )

    def boundaries(self, documents: Documents) -> dict[str, Tensor]:
        """None: where prompts are shared no layer carries state. And torch.compile would compile
        rows with and without them separately."""
        return {}
