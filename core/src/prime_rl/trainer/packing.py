"""How the documents of a row go through the model: here, apart.

A recurrent or convolution layer carries its state from one document into the next, and attention
may see the whole row. So core computes each document by itself. Kernels bring faster ways, and an
installed check measures which of them a model allows (``loop.find_packing``).

Shapes: T = tokens of the row, N = its targets, U = tokens computed, D = hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from prime_rl.trainer import parallel
from prime_rl.trainer.device import to_device
from prime_rl.trainer.routes import choosing, counted, padded_routes, watching

if TYPE_CHECKING:
    # Importing it takes longer than all of a plugin's checks, which load no model.
    from transformers import PreTrainedModel

Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Layout:
    """What goes through the model, and how to read what comes out."""

    token_ids: Tensor
    """[U] int64"""
    lengths: tuple[int, ...]
    """Tokens of each document."""
    sources: Tensor
    """[N] int64: the computed token whose hidden state predicts each target."""
    ends: Tensor | None = field(default=None, kw_only=True)
    """[E] int64: the computed tokens at which some sequences end. None: nothing reads them."""
    num_owners: Tensor | None = field(default=None, kw_only=True)
    """[U] int64: how many sequences of the row a computed token is of; 0: it fills the row up.
    None: one each."""
    routes: Tensor | None = field(default=None, kw_only=True)
    """[U, layers, k] int64: the experts that compute each token; -1: those of its router. None:
    nothing is replayed. Core adds them to what ``lay_out`` gives."""

    @property
    def runs(self) -> list[tuple[int, int, int]]:
        """(number, queries, keys) of neighbors of equal size: a document attends to itself."""
        return [(len(list(same)), length, length) for length, same in groupby(self.lengths)]


@dataclass(frozen=True)
class Packing:
    """How rows go through the model. This way makes a call for each padded batch of documents of
    similar length."""

    name: str = "apart"
    attention: str = "eager"
    """The name of its attention in transformers. ``eager`` has a cap on scores, sinks and more."""
    splits_rows: ClassVar[bool] = False
    """It can compute a part of a row on each of several ranks (``context``)."""

    def __str__(self) -> str:
        return f"{self.name} ({self.attention})"

    def lay_out(
        self,
        token_ids: Ints,
        sequence_ids: Ints,
        lengths: Ints,
        targets: Ints,
        device: torch.device,
        ends: Ints | None = None,
    ) -> Layout:
        """What the model computes of a row, given [T] tokens and the sequence of each, the length
        of each sequence, and [N] targets. This one: every token, as it lies in the row.

        ``ends`` [E]: last tokens of sequences with targets whose states a head reads."""
        return Layout(
            token_ids=to_device(token_ids, np.int64, device),
            lengths=tuple(lengths.tolist()),
            sources=to_device(targets - 1, np.int64, device),
            ends=None if ends is None else to_device(ends, np.int64, device),
        )

    def hidden_states(self, model: Any, layout: Layout) -> Tensor:
        """[U, D] of the tokens of ``layout``, in its order. Padding is on the right, where no token
        of a causal model attends to it."""
        documents = list(torch.split(layout.token_ids, list(layout.lengths)))
        sizes = batch_sizes(layout.lengths)

        routes = None
        if layout.routes is not None:
            routes = list(torch.split(layout.routes, list(layout.lengths)))

        states = []
        start = 0
        num_calls = max(parallel.gather(len(sizes)))
        for size in sizes:
            batch = documents[start : start + size]
            num_owners = pad_sequence([torch.ones_like(each) for each in batch], True)

            replayed: AbstractContextManager[None] = nullcontext()
            if routes is not None:
                # -1: the routers decide at padding, and nothing reads the result.
                of_batch = pad_sequence(routes[start : start + size], True, padding_value=-1)
                replayed = padded_routes(of_batch.flatten(0, 1))

            with replayed, counted(num_owners.flatten()):
                padded = decode(model, pad_sequence(batch, batch_first=True))
            states += [each[: len(tokens)] for each, tokens in zip(padded, batch, strict=True)]
            start += size

        whole = torch.cat(states)
        # Each call gathers sharded weights, so every rank has to make as many calls. An idle call
        # has to be part of the graph: the backward pass gathers too.
        with choosing(None), watching(None):  # it has nothing to replay or to count
            for _ in range(num_calls - len(sizes)):
                # One token is enough to gather every block, forward and backward.
                whole = whole + 0.0 * decode(model, documents[0][None, :1]).sum()
        return whole


def use_attention(model: PreTrainedModel, name: str) -> None:
    """Set the attention; models that do not use transformers' interface keep their own. Raises
    ``ValueError`` if the model's kind does not allow it."""
    if model._can_set_attn_implementation():
        model.set_attn_implementation(name)


def decode(model: Any, token_ids: Tensor, **others: Any) -> Tensor:
    """[B, T, D] of ``token_ids`` [B, T], by the model without its head. Llama 4 names a
    ``base_model`` that it does not have."""
    base = model.base_model
    decoder = model.model if base is model else base
    states: Tensor = decoder(input_ids=token_ids, use_cache=False, **others).last_hidden_state
    return states


def batch_sizes(lengths: Sequence[int]) -> list[int]:
    """How many neighbors share a batch: those at least 7/8 as long as its first, so that at most an
    eighth is padding. ``lengths`` descend."""
    sizes: list[int] = []
    longest = 0
    for length in lengths:
        if sizes and 8 * length >= 7 * longest:
            sizes[-1] += 1
        else:
            sizes.append(1)
            longest = length

    return sizes
