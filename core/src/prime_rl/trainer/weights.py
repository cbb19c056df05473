"""Weights on their way out: a version for the engines, and a model folder at the end.

<run>/broadcasts/step_3/model.safetensors    written under another name, then renamed: whole or
not there <run>/broadcasts/step_3/STABLE               last of all: engines may load version 3
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from prime_rl.plugins.errors import WeightsError

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
        """Write a version without announcing it. Raises ``WeightsError`` if the disk refuses."""
        unfinished, final = self.directory / f".step_{version}", self.path(version)
        with _disk(f"write weights version {version}", final):
            for leftover in (unfinished, final):
                shutil.rmtree(leftover, ignore_errors=True)
            unfinished.mkdir(parents=True)
            save_file(published_tensors(model), unfinished / WEIGHTS, metadata={"format": "pt"})
            unfinished.rename(final)

    def announce(self, version: int) -> None:
        """Tell whoever watches that a version is complete, and delete those too old to keep."""
        with _disk(f"announce weights version {version}", self.path(version)):
            (self.path(version) / STABLE).touch()
        for old in self.directory.glob("step_*"):
            if int(old.name.removeprefix("step_")) <= version - self.keep:
                shutil.rmtree(old, ignore_errors=True)


def published_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights by their Hugging Face names, on the host; a tied head does not appear twice."""
    tensors: dict[str, Tensor] = {}
    seen: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    for name, tensor in model.state_dict().items():
        identity = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if identity not in seen:
            seen.add(identity)
            tensors[name] = tensor.detach().cpu().contiguous()
    return tensors


def export(model: PreTrainedModel, model_dir: Path, directory: Path) -> None:
    """Write a folder that ``from_pretrained`` loads: weights, config, ``model_dir``'s tokenizer.

    Raises ``WeightsError`` if the disk refuses.
    """
    unfinished = directory.with_name(f".{directory.name}")
    with _disk("export the trained model", directory):
        for leftover in (unfinished, directory):
            shutil.rmtree(leftover, ignore_errors=True)
        unfinished.mkdir(parents=True)
        copy_model_files(model.config, model_dir, unfinished)
        save_file(published_tensors(model), unfinished / WEIGHTS, metadata={"format": "pt"})
        unfinished.rename(directory)


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
