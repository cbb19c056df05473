"""The trained policy as a model folder that ``from_pretrained`` loads."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel

from prime_rl.adapter import merged_tensors
from prime_rl.model_files import ModelFiles
from prime_rl.rundir.chat_template import put_chat_template
from prime_rl.trainer import parallel
from prime_rl.trainer.lora import lora_of
from prime_rl.trainer.publish import WEIGHTS, clear, disk_errors, save
from prime_rl.trainer.tensor_file import write_stream

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".index.json", ".gguf")


def export(model: PreTrainedModel, model_dir: Path, directory: Path) -> None:
    """Write weights, config, ``model_dir``'s tokenizer, and the chat template of the run whose
    folder ``directory`` is in. Where LoRA trained, the weights are merged, and the adapter is in
    the folder ``adapter``. Every rank calls this.

    Raises ``WeightsError`` if the disk refuses.
    """
    unfinished, is_lora = directory.with_name(f".{directory.name}"), lora_of(model) is not None
    adapter = unfinished / "adapter"

    def begin() -> None:
        clear(unfinished, directory)
        copy_model_files(model.config, model_dir, unfinished, run_dir=directory.parent)
        if is_lora:
            adapter.mkdir()

    def end() -> None:
        if is_lora:
            _merge(model_dir, adapter, unfinished / WEIGHTS)
        unfinished.rename(directory)

    with disk_errors("export the trained model", directory):
        parallel.on_main(begin)
        save(model, adapter if is_lora else unfinished)
        parallel.on_main(end)


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
    """Everything of a model folder but the weights: ``config``, ``model_dir``'s tokenizer, and the
    run's chat template."""
    for file in model_dir.iterdir():
        if file.is_file() and not file.name.endswith(_WEIGHT_SUFFIXES) and file.name[0] != ".":
            shutil.copy(file, directory)
    config.save_pretrained(directory)
    put_chat_template(run_dir, directory)
