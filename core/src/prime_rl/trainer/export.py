"""The trained policy as a model folder that ``from_pretrained`` loads."""

from __future__ import annotations

import shutil
from pathlib import Path

from transformers import PretrainedConfig, PreTrainedModel

from prime_rl.rundir.attempts import check_current
from prime_rl.rundir.chat_template import put_chat_template
from prime_rl.trainer import parallel
from prime_rl.trainer.publish import clear, disk_errors, save, tuning_of

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".index.json", ".gguf")


def export(model: PreTrainedModel, model_dir: Path, directory: Path) -> None:
    """Write weights, config, ``model_dir``'s tokenizer, and the chat template of the run whose
    folder ``directory`` is in. The adapter of a tuning is merged in, and is in the folder
    ``adapter`` too. Every rank calls this.

    Raises ``WeightsError`` if the disk refuses.
    """
    unfinished, tuning = directory.with_name(f".{directory.name}"), tuning_of(model)
    adapter = unfinished / "adapter"

    def begin() -> None:
        clear(unfinished, directory)
        copy_model_files(model.config, model_dir, unfinished, run_dir=directory.parent)
        if tuning is not None:
            adapter.mkdir()

    def end() -> None:
        if tuning is not None:
            tuning.merge(model_dir, adapter, unfinished)
        check_current()
        unfinished.rename(directory)

    with disk_errors("export the trained model", directory):
        parallel.on_main(begin)
        save(model, adapter if tuning else unfinished)
        parallel.on_main(end)


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
