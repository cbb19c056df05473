"""How the documents of a row go through the model: together, or apart.

    shared   one call; a prompt of several documents is computed once (``prefix_sharing.py``)
    packed   one call; the documents lie end to end
    apart    a call for each padded batch of documents of similar length

Our attention keeps packed documents apart (``attention.py``). A recurrent or convolution layer
carries its state from one document into the next, unless its kernel reads the boundaries that we
pass. A model with attention of its own may see the whole row. ``self_check.py`` measures which of
the three a model needs.

Shapes: T = tokens of the row, D = hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from prime_rl.config.trainer import TrainerConfig
from prime_rl.trainer import parallel
from prime_rl.trainer.attention import NAMES
from prime_rl.trainer.prefix_sharing import Layout

PackingName = Literal["shared", "packed", "apart"]


@dataclass(frozen=True)
class Packing:
    """How rows go through the model."""

    name: PackingName
    attention: str
    """The name of its attention in transformers."""

    def __str__(self) -> str:
        return f"{self.name} ({self.attention})"


def packings(config: TrainerConfig, device: torch.device) -> list[Packing]:
    """Those that the config allows, the fastest first.

    Apart, attention is that of transformers. ``sdpa`` takes less memory; ``eager`` has a cap on
    scores, sinks and more.
    """
    own = NAMES["mask" if config.attention == "mask" else "varlen"]
    found = [Packing("packed", own), Packing("apart", NAMES["sdpa"]), Packing("apart", "eager")]
    # The dense mask and the GPU's kernel have no continuations.
    if config.share_prompts and config.attention != "mask" and device.type == "cpu":
        found.insert(0, Packing("shared", own))
    return found


def use_attention(model: PreTrainedModel, name: str) -> None:
    """Set the attention; models that do not use transformers' interface keep their own. Raises
    ``ValueError`` if the model's kind does not allow it."""
    if model._can_set_attn_implementation():
        model.set_attn_implementation(name)


def hidden_states(model: Any, layout: Layout, packing: PackingName = "shared") -> Tensor:
    """[T, D] of the tokens of ``layout``, in its order. ``apart`` needs a layout without shared
    prompts."""
    if packing == "apart":
        return _apart(model, layout)
    documents = layout.documents
    # Where prompts are shared no layer carries state, so none needs boundaries. And torch.compile
    # would compile rows with and without them separately.
    boundaries = documents.boundaries if packing == "packed" else {}
    states: Tensor = _decoder(model)(
        input_ids=layout.token_ids[None],
        position_ids=layout.position_ids[None],
        use_cache=False,
        documents=documents,
        **boundaries,
    ).last_hidden_state[0]
    return states


def _apart(model: Any, layout: Layout) -> Tensor:
    """Padding is on the right, where no token of a causal model attends to it."""
    documents = list(torch.split(layout.token_ids, list(layout.documents.lengths)))
    sizes, states, start = batch_sizes(layout.documents.lengths), [], 0
    num_calls = max(parallel.gather(len(sizes)))
    for size in sizes:
        batch = documents[start : start + size]
        padded = _call(model, pad_sequence(batch, batch_first=True))
        states += [each[: len(tokens)] for each, tokens in zip(padded, batch, strict=True)]
        start += size
    whole = torch.cat(states)
    # Each call gathers sharded weights, so every rank has to make as many calls. An idle call has
    # to be part of the graph: the backward pass gathers too.
    for _ in range(num_calls - len(sizes)):
        whole = whole + 0.0 * _call(model, documents[0][None, :1]).sum()
    return whole


def _call(model: Any, token_ids: Tensor) -> Tensor:
    states: Tensor = _decoder(model)(input_ids=token_ids, use_cache=False).last_hidden_state
    return states


def _decoder(model: Any) -> Any:
    """The model without its head. Llama 4 names a ``base_model`` that it does not have."""
    base = model.base_model
    return model.model if base is model else base


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
