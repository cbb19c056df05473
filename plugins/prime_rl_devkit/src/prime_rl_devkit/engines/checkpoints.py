"""Checkpoints for an engine to load: other weights, damaged ones, a LoRA adapter."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTED = ("q_proj", "v_proj", "down_proj")
RANK = 4
ALPHA = 8


def read(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder."""
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        tensors |= load_file(path)
    return tensors


def write(source: Path, target: Path, tensors: Mapping[str, Tensor]) -> Path:
    """Write a folder with these tensors and the other files of ``source``."""
    from safetensors.torch import save_file

    target.mkdir(parents=True)
    for path in source.iterdir():
        if path.is_file() and ".safetensors" not in path.name:
            shutil.copy(path, target)
    save_file(dict(tensors), target / SINGLE, metadata={"format": "pt"})
    return target


def changed(source: Path, target: Path, seed: int = 1) -> Path:
    """Write a checkpoint in which every tensor differs noticeably."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def change(tensor: Tensor) -> Tensor:
        noise = torch.randn(tensor.shape, generator=generator)
        return (tensor.float() * (1.0 + 0.4 * noise)).to(tensor.dtype)

    return write(source, target, {name: change(t) for name, t in read(source).items()})


# -- damaged ones -----------------------------------------------------------------------


def _truncated(source: Path, target: Path) -> None:
    write(source, target, read(source))
    data = (target / SINGLE).read_bytes()
    (target / SINGLE).write_bytes(data[: len(data) // 2])


def _without_a_tensor(source: Path, target: Path) -> None:
    tensors = read(source)
    del tensors[_last_matrix(tensors)]
    write(source, target, tensors)


def _wrong_shape(source: Path, target: Path) -> None:
    tensors = read(source)
    name = _last_matrix(tensors)
    tensors[name] = tensors[name][:-1].clone()
    write(source, target, tensors)


def _not_finite(source: Path, target: Path) -> None:
    tensors = read(source)
    tensors[_last_matrix(tensors)].view(-1)[0] = float("nan")
    write(source, target, tensors)


def _missing_shard(source: Path, target: Path) -> None:
    tensors = read(source)
    write(source, target, tensors)
    last = _last_matrix(tensors)
    shards = {name: "model-2.safetensors" if name == last else SINGLE for name in tensors}
    (target / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": shards}), "utf-8")


def _no_folder(source: Path, target: Path) -> None:
    pass


def _last_matrix(tensors: Mapping[str, Tensor]) -> str:
    """The last matrix by name: a loader in that order has changed most tensors before it."""
    return max(name for name, tensor in tensors.items() if tensor.dim() == 2)


DAMAGES: Mapping[str, Callable[[Path, Path], None]] = {
    "a truncated file": _truncated,
    "a missing tensor": _without_a_tensor,
    "a tensor of another shape": _wrong_shape,
    "a tensor with a nan": _not_finite,
    "a missing shard": _missing_shard,
    "no folder": _no_folder,
}
"""Functions that write a damaged checkpoint, by the damage. Source and target folders."""


# -- adapters ---------------------------------------------------------------------------


def write_adapter(source: Path, target: Path, *, rank: int = RANK, seed: int = 2) -> Path:
    """A LoRA adapter of ``source`` in PEFT's format. ``rank`` other than ``RANK`` contradicts the
    adapter's own config."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, weight in read(source).items():
        module = name.removesuffix(".weight")
        if module.endswith(ADAPTED):
            high, wide = weight.shape
            prefix = f"base_model.model.{module}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, wide, generator=generator) * 0.3
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(high, rank, generator=generator) * 0.3

    target.mkdir(parents=True)
    save_file(tensors, target / "adapter_model.safetensors", metadata={"format": "pt"})
    (target / "adapter_config.json").write_text(json.dumps(_adapter_config(source)), "utf-8")
    return target


def _adapter_config(source: Path) -> dict[str, object]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(source),
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "target_modules": list(ADAPTED),
        "modules_to_save": None,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }


def merged(source: Path, adapter: Path, target: Path) -> Path:
    """Write base and adapter as one model: W + alpha / r * B A (Hu et al. 2021, 4.1)."""
    from safetensors.torch import load_file

    factors = load_file(adapter / "adapter_model.safetensors")
    tensors = read(source)
    for name, weight in tensors.items():
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        low = factors.get(f"{prefix}.lora_A.weight")
        if low is not None:
            high = factors[f"{prefix}.lora_B.weight"]
            tensors[name] = (weight.float() + ALPHA / RANK * (high @ low)).to(weight.dtype)

    return write(source, target, tensors)
