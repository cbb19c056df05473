"""Names and types of tensors in safetensors, as files and weight transports use them."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prime_rl.plugins.weight_transports import Header, TensorInfo

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Piece(NamedTuple):
    """Consecutive elements of a model's tensor that are a tensor of their own in its files."""

    name: str
    source: str
    """The tensor in the model."""
    start: int
    """How many of its elements come before."""
    shape: tuple[int, ...]

    def of(self, whole: Tensor) -> Tensor:
        """The piece of ``source``: a view."""
        end = self.start + math.prod(self.shape)
        return whole.reshape(-1)[self.start : end].view(self.shape)


def whole(tensors: Mapping[str, Tensor]) -> list[Piece]:
    """Each tensor in one piece."""
    return [
        Piece(name, name, start=0, shape=tuple(tensor.shape)) for name, tensor in tensors.items()
    ]


def pieces_of(model: Any, tensors: Mapping[str, Tensor]) -> list[Piece]:
    """The pieces by which a transformers model's folder has ``tensors``, in the order of their
    elements. The model has the experts of a layer in one tensor, the files have each. A tensor
    whose files hold it in another order stays whole."""
    from transformers.core_model_loading import revert_weight_conversion

    # Only the numbers of elements are converted, two for each row. The rows do not change.
    ends = [0]
    numbers = {}
    for name, tensor in tensors.items():
        shape = (*tensor.shape[:-1], 2)
        ends.append(ends[-1] + math.prod(shape))
        numbers[name] = torch.arange(*ends[-2:], dtype=torch.int32).view(shape)

    pieces: list[list[Piece]] = [[] for _ in tensors]

    sources = whole(tensors)
    with suppress(ValueError, RuntimeError):  # a conversion that needs whole rows
        for name, values in revert_weight_conversion(model, numbers).items():
            flat = values.flatten()
            first = int(flat[0])
            place = bisect(ends, first) - 1
            # Elements in another order are no piece. Their tensor stays whole (below).
            if flat.equal(torch.arange(first, first + len(flat), dtype=torch.int32)):
                source = sources[place].source
                width = sources[place].shape[-1:]
                # Two numbers represent each row.
                start = (first - ends[place]) // 2 * math.prod(width)
                pieces[place].append(
                    Piece(name, source, start=start, shape=(*values.shape[:-1], *width))
                )

    # A tensor is cut into all its pieces or stays whole: engines need every element.
    for each, of_source in zip(sources, pieces, strict=True):
        if sum(math.prod(piece.shape) for piece in of_source) != math.prod(each.shape):
            of_source[:] = [each]

    return [
        piece for of_source in pieces for piece in sorted(of_source, key=lambda piece: piece.start)
    ]


def header_of(
    tensors: Mapping[str, Tensor],
    rounded: Mapping[str, torch.dtype],
    pieces: Sequence[Piece] | None = None,
) -> Header:
    """The header of whole tensors or shards; ``rounded``: types of those sent in another type;
    ``pieces``: those of all of them (None: each is whole)."""
    dtypes = {name: NAMES[rounded.get(name, each.dtype)] for name, each in tensors.items()}
    pieces = whole(tensors) if pieces is None else pieces
    return [TensorInfo(each.name, dtypes[each.source], list(each.shape)) for each in pieces]


def num_bytes(info: TensorInfo) -> int:
    """Size of one tensor."""
    return DTYPES[info.dtype].itemsize * math.prod(info.shape)
