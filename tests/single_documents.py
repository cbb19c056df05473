"""log π of documents, each by itself through the plain Hugging Face model."""

from __future__ import annotations

from math import log

import numpy as np
import torch
from torch import Tensor
from trainer_fixtures import VOCAB
from transformers import PreTrainedModel

from prime_rl.wire import MicroBatch


def reference(model: PreTrainedModel, document: list[int], temperature: float = 1.0) -> Tensor:
    """[L]: the document by itself through ``model.forward``; log(1/V) for its first token."""
    logits = model(torch.tensor([document])).logits[0] / temperature
    chosen = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(document[1:])[:, None])[:, 0]
    return torch.cat([chosen.new_full((1,), -log(VOCAB)), chosen])


def by_document(micro_batch: MicroBatch, column: Tensor) -> list[Tensor]:
    """Split the row's column, and bring the documents back into the order they came in."""
    lengths = micro_batch.sequence_lengths
    order = np.argsort(-lengths, kind="stable")
    parts: dict[int, Tensor] = dict(
        zip(order.tolist(), column.split_with_sizes(lengths[order].tolist()), strict=True)
    )
    return [parts[index] for index in range(len(parts))]


def called(head: torch.nn.Module) -> list[tuple[int, ...]]:
    """Grows by the shape of what goes through the head, each time it is called."""
    shapes: list[tuple[int, ...]] = []
    head.register_forward_pre_hook(lambda _, inputs: shapes.append(tuple(inputs[0].shape)))
    return shapes
