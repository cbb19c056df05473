"""Weights on their way out: a version for the engines, and a model folder at the end.

    <run>/broadcasts/step_3/model.safetensors   written beside, then renamed: whole or not there
    <run>/broadcasts/step_3/STABLE               last of all: engines may load version 3

Rank 0 writes, tensor by tensor as the ranks gather them: no rank holds the whole model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from prime_rl.adapter import ADAPTER_WEIGHTS, merged_tensors
from prime_rl.model_files import ModelFiles
from prime_rl.plugins.errors import WeightsError
from prime_rl.trainer import parallel
from prime_rl.trainer.lora import adapter_tensors, lora_of

STABLE = "STABLE"
"""Marker file of a version that is complete."""
WEIGHTS = "model.safetensors"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".index.json", ".gguf")


class Publisher:
    """Publishes one version after each step and keeps the last few."""

    def __init__(self, directory: Path, keep: int) -> None:
        self.directory = directory
        self.keep = keep

    def path(self, version: int) -> Path:
        """Where a version lies."""
        return self.directory / f"step_{version}"

    def write(self, model: PreTrainedModel, version: int) -> None:
        """Write a version without announcing it; every rank calls this. Raises ``WeightsError`` if
        the disk refuses."""
        unfinished, final = self.directory / f".step_{version}", self.path(version)
        tensors = published_tensors(model)

        def save(stream: Iterator[Tensor]) -> None:
            with _disk(f"write weights version {version}", final):
                for leftover in (unfinished, final):
                    shutil.rmtree(leftover, ignore_errors=True)
                unfinished.mkdir(parents=True)
                _save(model, unfinished, tensors, stream)
                unfinished.rename(final)

        parallel.stream_to_main(tensors, save)

    def size(self, version: int) -> float:
        """Of a version that is written, in MiB; 0 where this machine does not see it."""
        return sum(file.stat().st_size for file in self.path(version).glob("*")) / 2**20

    def announce(self, version: int) -> None:
        """Tell whoever watches that a version is complete, and delete those too old to keep. Rank 0
        does."""
        with _disk(f"announce weights version {version}", self.path(version)):
            (self.path(version) / STABLE).touch()
        for old in self.directory.glob("step_*"):
            if int(old.name.removeprefix("step_")) <= version - self.keep:
                shutil.rmtree(old, ignore_errors=True)


def weights_name(model: PreTrainedModel) -> str:
    """The file of a published folder: the whole model, or the adapter where LoRA trains one."""
    return WEIGHTS if lora_of(model) is None else ADAPTER_WEIGHTS


def _save(
    model: PreTrainedModel, directory: Path, like: Mapping[str, Tensor], stream: Iterator[Tensor]
) -> None:
    lora = lora_of(model)
    metadata = {} if lora is None else lora.metadata
    write_safetensors(directory / weights_name(model), like, stream, metadata)
    if lora is not None:
        lora.write_config(directory)


def published_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights by their Hugging Face names, as this rank holds them; a tied head does not appear
    twice. Where LoRA trains an adapter, that alone, by PEFT's names."""
    if lora_of(model) is not None:
        return adapter_tensors(model)
    tensors: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        # By identity: tied modules hold one parameter, and two empty shards may share an address.
        tensors.setdefault(id(tensor), (name, tensor))
    return dict(tensors.values())


DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""How safetensors spells them."""


def write_safetensors(
    path: Path,
    like: Mapping[str, Tensor],
    stream: Iterator[Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a safetensors file tensor by tensor, so that no two need to be in memory at once.

    ``like`` has names, shapes and types in the order in which ``stream`` brings the values.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for name, tensor in like.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in stream:
            file.write(tensor.flatten().view(torch.uint8).numpy().data)


def export(model: PreTrainedModel, model_dir: Path, directory: Path) -> None:
    """Write a folder that ``from_pretrained`` loads: weights, config, ``model_dir``'s tokenizer.
    Where LoRA trained, the weights are merged, and the adapter lies in the folder ``adapter``.
    Every rank calls this.

    Raises ``WeightsError`` if the disk refuses.
    """
    unfinished = directory.with_name(f".{directory.name}")
    tensors = published_tensors(model)

    def save(stream: Iterator[Tensor]) -> None:
        with _disk("export the trained model", directory):
            for leftover in (unfinished, directory):
                shutil.rmtree(leftover, ignore_errors=True)
            unfinished.mkdir(parents=True)
            copy_model_files(model.config, model_dir, unfinished)
            if lora_of(model) is None:
                _save(model, unfinished, tensors, stream)
            else:
                (unfinished / "adapter").mkdir()
                _save(model, unfinished / "adapter", tensors, stream)
                _merge(model_dir, unfinished / "adapter", unfinished / WEIGHTS)
            unfinished.rename(directory)

    parallel.stream_to_main(tensors, save)


def _merge(base_dir: Path, adapter_dir: Path, path: Path) -> None:
    """In float32, as a model that trained whole is exported; one tensor at a time."""
    like = {
        name: torch.empty(entry.shape, dtype=torch.float32, device="meta")
        for name, entry in ModelFiles(base_dir).tensors.items()
    }
    merged = merged_tensors(base_dir, adapter_dir)
    write_safetensors(path, like, (tensor.float() for _, tensor in merged))


def copy_model_files(config: PretrainedConfig, model_dir: Path, directory: Path) -> None:
    """What a model folder has beside the weights: ``config`` and ``model_dir``'s tokenizer."""
    for file in model_dir.iterdir():
        if file.is_file() and not file.name.endswith(_WEIGHT_SUFFIXES) and file.name[0] != ".":
            shutil.copy(file, directory)
    config.save_pretrained(directory)


@contextmanager
def _disk(doing: str, path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # safetensors raises its own kind for a full disk
        raise WeightsError(f"cannot {doing} to {path}: {error}. {_free_space(path)}") from error


def _free_space(path: Path) -> str:
    """How much is left on the disk of the nearest folder that exists."""
    while not path.exists():
        path = path.parent
    return f"Free there: {shutil.disk_usage(path).free / 2**30:.2f} GiB."
