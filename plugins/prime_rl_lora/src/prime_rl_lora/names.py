"""The names in ``[trainer.lora]``, checked against a model's files before any process starts."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from itertools import accumulate
from pathlib import Path

from prime_rl import ConfigError
from prime_rl_engine_kit.model_files import read_headers


def check_names(targets: Sequence[str], saved: Sequence[str], folder: Path) -> None:
    """Raises ``ConfigError`` for a name that no module of the model has. ``targets``, ``saved``:
    the keys ``target_modules`` and ``modules_to_save``.

    Reads the headers of the model's safetensors. A model that is not local yet, or has another
    format, is checked by the trainer, which also knows the type of each module.
    """
    if not any(folder.glob("model*.safetensors")):
        return
    tensors = read_headers(folder)
    matrices = {
        name.removesuffix(".weight")
        for name, entry in tensors.items()
        if len(entry.shape) == 2 and name.endswith(".weight")
    }
    modules = {  # a.b.weight belongs to the modules a and a.b
        module
        for name in tensors
        for module in accumulate(name.split(".")[:-1], lambda outer, inner: f"{outer}.{inner}")
    }
    for target in targets:
        if not any(f".{name}".endswith(f".{target}") for name in matrices):
            raise _unknown("target_modules", target, modules=matrices, folder=folder)

    for end in saved:
        if not any(name.endswith(end) for name in modules):
            raise _unknown("modules_to_save", end, modules=modules, folder=folder)


def _unknown(key: str, name: str, modules: set[str], folder: Path) -> ConfigError:
    ends = sorted({end for module in modules if not (end := module.rpartition(".")[2]).isdecimal()})
    close = get_close_matches(name, ends, 1)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    return ConfigError(
        f"trainer.lora.{key}: no module of the model in {folder} is called {name!r}. {hint}"
        f"There are {', '.join(ends)}."
    )
