"""Weight updates: everything is read and checked before the first parameter changes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from prime_rl import WeightsError
from prime_rl_broadcast.connection import DTYPES, Member, pieces_of
from prime_rl_broadcast.group import BroadcastGroup, Header
from prime_rl_engine_kit.adapter import is_adapter, merged_tensors
from prime_rl_engine_kit.model_files import regular


def read_weights(directory: Path, module: Any) -> dict[str, Tensor]:
    """All tensors of ``module``, from safetensors, checked. Raises ``WeightsError``.

    A LoRA adapter is added to the base model, which is read again from the folder that ``module``
    was loaded from. The current parameters are not used, so no adapter is added twice.
    """
    if is_adapter(directory):
        merged = merged_tensors(_base(directory, module), directory)
        return _checked(directory, dict(merged), module)

    tensors: dict[str, Tensor] = {}
    for path in _shards(directory):
        for name, tensor in _read_shard(path).items():
            if name in tensors:
                raise WeightsError(f"{path}: tensor {name!r} is also in another shard")
            tensors[name] = tensor

    return _checked(directory, tensors, module)


def receive_weights(meeting: BroadcastGroup, member: Member, module: Any) -> dict[str, Tensor]:
    """All tensors of ``module``, from the trainer's memory. Names, shapes and kinds are checked
    before any value is sent. Raises ``WeightsError``."""
    received: dict[str, Tensor] = {}

    def check(header: Header) -> str | None:
        like = {
            info.name: torch.empty(info.shape, dtype=DTYPES[info.dtype], device="meta")
            for info in header
        }
        try:
            _check_layout("broadcast", like, module)
        except WeightsError as error:
            return str(error)

        return None

    def take(stream: Iterator[tuple[str, Tensor]]) -> None:
        received.update(stream)
        _check_values("broadcast", received)

    with member.join(meeting, module.device) as group:
        group.receive(check, take)
    return received


def apply_weights(weights: Mapping[str, Tensor], module: Any) -> None:
    """Copy checked tensors into the parameters, in place, which also updates tied parameters and
    fused projections."""
    parameters = _parameters(module)
    for name, tensor in weights.items():
        parameters[name].copy_(tensor)


def _parameters(module: Any) -> dict[str, Tensor]:
    """Views of the parameters, under the names that the model's folder has for them."""
    state: dict[str, Tensor] = module.state_dict()
    return {
        piece.name: whole if piece.name == piece.source else piece.of(whole)
        for piece in pieces_of(module, state)
        for whole in [state[piece.source]]
    }


def _base(directory: Path, module: Any) -> Path:
    """The folder ``module`` was loaded from."""
    base = Path(module.name_or_path)
    if not base.is_dir():
        raise WeightsError(
            f"{directory}: contains an adapter, but its base {str(base)!r} is not a folder; start "
            "the engine from the folder of the model"
        )
    return base


def _shards(directory: Path) -> list[Path]:
    if not directory.is_dir():
        raise WeightsError(f"{directory}: no such folder")
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        paths = sorted(directory.glob("model*.safetensors"))
        if not paths:
            raise WeightsError(f"{directory}: no model*.safetensors in it")
        return paths

    try:
        table = json.loads(regular(index).read_text("utf-8-sig"))
        names = sorted({str(name) for name in table["weight_map"].values()})
    except (ValueError, KeyError, AttributeError, RecursionError, TypeError) as error:
        raise WeightsError(f"{index}: not an index of safetensors: {error}") from error

    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise WeightsError(f"{index}: {outside[0]!r} is not the name of a file")
    paths = [directory / name for name in names]
    absent = [path.name for path in paths if not path.is_file()]
    if absent:
        raise WeightsError(f"{directory}: shards missing: {', '.join(absent)}")
    return paths


def _read_shard(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(regular(path), framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise WeightsError(f"{path}: can't be read: {error}") from error


def _checked(directory: Path, tensors: dict[str, Tensor], module: Any) -> dict[str, Tensor]:
    """Check names, shapes, kinds and values against the module; drop tied duplicates."""
    for copy, original in _tied(module).items():
        _untie(directory, tensors, copy=copy, original=original)
    _check_layout(directory, tensors, module)
    _check_values(directory, tensors)
    return tensors


def _tied(module: Any) -> Mapping[str, str]:
    """Parameter names that share the storage of another name, with that name."""
    return getattr(module, "all_tied_weights_keys", {}) or {}


def _check_layout(where: Path | str, tensors: Mapping[str, Tensor], module: Any) -> None:
    """Check names, shapes and kinds. ``where``: the source, for messages."""
    wanted = _parameters(module)
    missing = sorted(wanted.keys() - tensors.keys() - _tied(module).keys())
    if missing:
        raise WeightsError(
            f"{where}: {_listed(missing)} missing; the model has {len(wanted)} tensors"
        )

    unknown = sorted(tensors.keys() - wanted.keys())
    if unknown:
        raise WeightsError(f"{where}: {_listed(unknown)} not in the model {type(module).__name__}")
    for name, tensor in tensors.items():
        _check(where, name, found=tensor, wanted=wanted[name])


def _check_values(where: Path | str, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor.sum(dtype=torch.float64)):
            raise WeightsError(f"{where}: {name!r} contains values that aren't finite")


def _untie(directory: Path, tensors: dict[str, Tensor], copy: str, original: str) -> None:
    """Drop the second name of a tied parameter. Different values mean a model without tying."""
    duplicate = tensors.pop(copy, None)
    if duplicate is None:
        return
    if not torch.equal(tensors.setdefault(original, duplicate), duplicate):
        raise WeightsError(
            f"{directory}: {copy!r} and {original!r} are one tied parameter, but differ"
        )


def _check(where: Path | str, name: str, found: Tensor, wanted: Tensor) -> None:
    if found.shape != wanted.shape:
        raise WeightsError(
            f"{where}: {name!r} has shape {list(found.shape)}, the model's has {list(wanted.shape)}"
        )
    if found.is_floating_point() != wanted.is_floating_point():
        raise WeightsError(f"{where}: {name!r} is {found.dtype}, the model's is {wanted.dtype}")


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
