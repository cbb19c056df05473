"""Names and types of tensors in safetensors, as files and weight transports use them."""

from __future__ import annotations

import math
from collections.abc import Mapping

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


def header_of(tensors: Mapping[str, Tensor], rounded: Mapping[str, torch.dtype]) -> Header:
    """The header of whole tensors or shards; ``rounded``: types of those sent in another type."""
    return [
        TensorInfo(name, NAMES[rounded.get(name, tensor.dtype)], list(tensor.shape))
        for name, tensor in tensors.items()
    ]


def num_bytes(info: TensorInfo) -> int:
    """Size of one tensor."""
    return DTYPES[info.dtype].itemsize * math.prod(info.shape)
