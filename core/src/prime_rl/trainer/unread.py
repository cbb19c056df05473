"""A model whose weights are still in its files, so that each rank reads its own shards alone.

files' headers -> model on the meta device -> tuning -> shards -> memory for them -> read
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from prime_rl.rundir.rows import read_table
from prime_rl.weights.tensors import Piece, pieces_of


class Unread(nn.Parameter):
    """A parameter without values, and the pieces of it that are in files."""

    pieces: list[tuple[Path, Piece]]

    def __deepcopy__(self, memo: dict[int, Any]) -> Unread:
        # A head with a model of its own copies the policy before any rank has read it.
        copy = of_files(self, self.pieces)
        memo[id(self)] = copy
        return copy

    def read_from_files(self, into: Tensor, start: int) -> None:
        """Elements from number ``start`` on, in row-major order. Only the pages of the file that
        hold them are read."""
        end = start + len(into)
        for path, piece in self.pieces:
            first = max(start, piece.start)
            last = min(end, piece.start + math.prod(piece.shape))
            if first < last:
                values = opened(path).get_tensor(piece.name).view(-1)
                values = values[first - piece.start : last - piece.start]
                into[first - start : last - start] = values


def of_files(like: nn.Parameter, pieces: list[tuple[Path, Piece]]) -> Unread:
    """``like``, to be read."""
    unread = Unread(like.detach(), like.requires_grad)
    unread.pieces = pieces
    return unread


@cache
def opened(path: Path) -> Any:
    """A safetensors file, mapped into memory."""
    from safetensors import safe_open

    return safe_open(path, framework="pt").__enter__()  # type: ignore[no-untyped-call]


def unread_model(folder: Path) -> PreTrainedModel | None:
    """The model of a folder in float32, with its buffers. None if its files don't have each of its
    weights in runs of elements: then it has to be loaded whole."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    # Quantized files do not contain the values of the model's weights.
    if getattr(config, "quantization_config", None) is not None:
        return None

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)

    places = {name: path for path in weight_files(folder) for name in opened(path).keys()}  # noqa: SIM118 - not a dict
    tensors = model.state_dict(keep_vars=True)
    pieces: dict[str, list[tuple[Path, Piece]]] = {name: [] for name in tensors}
    # Reversed, so that the first name of a tied weight wins.
    shared = {id(tensor): name for name, tensor in reversed(tensors.items())}
    for piece in pieces_of(model, {name: tensors[name] for name in shared.values()}):
        path = places.get(piece.name)
        if path is None or opened(path).get_slice(piece.name).get_shape() != list(piece.shape):
            return None
        pieces[piece.source].append((path, piece))

    made = {key: of_files(tensors[name], pieces[name]) for key, name in shared.items()}
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None:
                module._parameters[name] = made[id(old)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")

    # transformers initializes parameters without this mark. These get their values later.
    for each in made.values():
        vars(each)["_is_hf_initialized"] = True
    model.initialize_weights()  # buffers that no file has
    for name, buffer in model.named_buffers():
        if pieces.get(name):
            made[id(tensors[name])].read_from_files(buffer.view(-1), 0)

    return model


class _Index(msgspec.Struct):
    weight_map: dict[str, str]
    """The file of each tensor."""


def weight_files(folder: Path) -> list[Path]:
    """A model folder's safetensors."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        table: _Index = read_table(index, _Index)
        return sorted({folder / name for name in table.weight_map.values()})
    return sorted(folder.glob("model.safetensors"))
