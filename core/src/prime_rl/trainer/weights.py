"""Weights on their way out: a version for the engines, and a model folder at the end.

    <run>/broadcasts/step_3/model.safetensors   written beside, then renamed: whole or not there
    <run>/broadcasts/step_3/STABLE               last of all: engines may load version 3

All ranks write the one file together (``tensor_file.py``): no rank holds the whole model.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from prime_rl.adapter import ADAPTER_WEIGHTS, merged_tensors
from prime_rl.errors import WeightsError
from prime_rl.model_files import ModelFiles
from prime_rl.rundir.chat_template import put_chat_template
from prime_rl.trainer import parallel
from prime_rl.trainer.lora import adapter_tensors, lora_of
from prime_rl.trainer.tensor_file import lay_out, write_shared, write_stream
from prime_rl.weights.versions import STABLE

WEIGHTS = "model.safetensors"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".index.json", ".gguf")


class Publisher:
    """Publishes one version after each step and keeps the last few."""

    def __init__(
        self, directory: Path, keep: int, dtype: Literal["float32", "bfloat16"] = "float32"
    ) -> None:
        """``dtype``: what is published in (``trainer.publish_dtype``)."""
        self.directory = directory
        self.keep = keep
        self.dtype = torch.bfloat16 if dtype == "bfloat16" else None

    def path(self, version: int) -> Path:
        """Where a version lies."""
        return self.directory / f"step_{version}"

    def write(self, model: PreTrainedModel, version: int, exact: bool = False) -> None:
        """Write a version without announcing it; every rank calls this. ``exact``: unrounded, as a
        checkpoint keeps this one. Raises ``WeightsError`` if a disk refuses."""
        unfinished, final = self.directory / f".step_{version}", self.path(version)
        with _disk(f"write weights version {version}", final):
            parallel.on_main(partial(_clear, unfinished, final))
            _save(model, unfinished, None if exact else self.dtype, flush=exact)
            parallel.on_main(partial(_put, unfinished, final))

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


def _clear(unfinished: Path, final: Path) -> None:
    """An empty folder to write into, and nothing where it will be; a version that is announced and
    lacks its files stays."""
    shutil.rmtree(unfinished, ignore_errors=True)
    if not (final / STABLE).exists():
        shutil.rmtree(final, ignore_errors=True)
    unfinished.mkdir(parents=True)


def _put(unfinished: Path, final: Path) -> None:
    if not final.exists():
        unfinished.rename(final)
        return
    for file in unfinished.iterdir():
        file.replace(final / file.name)
    unfinished.rmdir()


def _save(
    model: PreTrainedModel, directory: Path, dtype: torch.dtype | None = None, flush: bool = False
) -> None:
    lora, tensors = lora_of(model), published_tensors(model)
    metadata = {} if lora is None else lora.metadata
    layout = lay_out(tensors, published_dtypes(model, tensors, dtype), metadata)
    write_shared(directory / weights_name(model), layout, tensors, flush)
    if lora is not None:
        parallel.on_main(partial(lora.write_config, directory))


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


def published_dtypes(
    model: PreTrainedModel, tensors: Mapping[str, Tensor], dtype: torch.dtype | None
) -> dict[str, torch.dtype]:
    """Which tensors engines that serve in ``dtype`` get rounded to it: floats, but for what
    transformers keeps in float32 whatever the model's type (a router's bias). None of an adapter,
    which engines add to the base in float32."""
    if dtype is None or lora_of(model) is not None:
        return {}
    kept = [f"*{pattern}*" for pattern in model._keep_in_fp32_modules_strict or ()]
    return {
        name: dtype
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and not any(fnmatchcase(name, p) for p in kept)
    }


def export(model: PreTrainedModel, model_dir: Path, directory: Path) -> None:
    """Write a folder that ``from_pretrained`` loads: weights, config, ``model_dir``'s tokenizer,
    the chat template of the run that ``directory`` lies in. Where LoRA trained, the weights are
    merged, and the adapter lies in the folder ``adapter``. Every rank calls this.

    Raises ``WeightsError`` if the disk refuses.
    """
    unfinished = directory.with_name(f".{directory.name}")
    is_whole = lora_of(model) is None
    with _disk("export the trained model", directory):
        parallel.on_main(partial(_begin_export, model, model_dir, unfinished, directory))
        _save(model, unfinished if is_whole else unfinished / "adapter")
        parallel.on_main(partial(_end_export, model_dir, unfinished, directory, not is_whole))


def _begin_export(model: PreTrainedModel, model_dir: Path, unfinished: Path, final: Path) -> None:
    _clear(unfinished, final)
    copy_model_files(model.config, model_dir, unfinished, run_dir=final.parent)
    if lora_of(model) is not None:
        (unfinished / "adapter").mkdir()


def _end_export(model_dir: Path, unfinished: Path, final: Path, merge: bool) -> None:
    if merge:
        _merge(model_dir, unfinished / "adapter", unfinished / WEIGHTS)
    unfinished.rename(final)


def _merge(base_dir: Path, adapter_dir: Path, path: Path) -> None:
    """In float32, as a model that trained whole is exported; one tensor at a time."""
    like = {
        name: torch.empty(entry.shape, dtype=torch.float32, device="meta")
        for name, entry in ModelFiles(base_dir).tensors.items()
    }
    merged = merged_tensors(base_dir, adapter_dir)
    write_stream(path, like, (tensor.float() for _, tensor in merged))


def copy_model_files(
    config: PretrainedConfig, model_dir: Path, directory: Path, run_dir: Path
) -> None:
    """What a model folder has beside the weights: ``config``, ``model_dir``'s tokenizer, and the
    run's chat template."""
    for file in model_dir.iterdir():
        if file.is_file() and not file.name.endswith(_WEIGHT_SUFFIXES) and file.name[0] != ".":
            shutil.copy(file, directory)
    config.save_pretrained(directory)
    put_chat_template(run_dir, directory)


@contextmanager
def _disk(doing: str, path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, WeightsError) as error:
        raise WeightsError(f"cannot {doing} to {path}: {error}. {_free_space(path)}") from error


def _free_space(path: Path) -> str:
    """How much is left on the disk of the nearest folder that exists."""
    while not path.exists():
        path = path.parent
    return f"Free there: {shutil.disk_usage(path).free / 2**30:.2f} GiB."
