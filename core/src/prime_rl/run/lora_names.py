"""Whether the modules that ``[trainer.lora]`` names are the model's, before anything is started."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from itertools import accumulate
from pathlib import Path

from prime_rl.config.run import RunConfig
from prime_rl.model_files import read_headers
from prime_rl.plugins.errors import ConfigError
from prime_rl.run.models import model_path


def check_lora_names(config: RunConfig) -> None:
    """Raises ``ConfigError`` for a name that no module of the model has.

    Asks the headers of the model's safetensors: a model that is not here yet, or lies here in
    another format, is checked by the trainer, which also knows each module's kind.
    """
    lora = config.trainer.lora
    if lora is None:
        return
    folder = Path(model_path(config)[0])
    if not any(folder.glob("model*.safetensors")):
        return
    shapes = {name: entry.shape for name, entry in read_headers(folder).items()}
    matrices = {
        name.removesuffix(".weight")
        for name, shape in shapes.items()
        if len(shape) == 2 and name.endswith(".weight")
    }
    modules = {module for name in shapes for module in _modules(name)}
    for target in lora.target_modules or ():
        if not any(f".{name}".endswith(f".{target}") for name in matrices):
            raise _unknown("target_modules", target, matrices, folder)
    for end in lora.modules_to_save:
        if not any(name.endswith(end) for name in modules):
            raise _unknown("modules_to_save", end, modules, folder)


def _modules(tensor: str) -> Iterator[str]:
    """``a.b.weight`` lies in the modules a and a.b."""
    return accumulate(tensor.split(".")[:-1], lambda outer, inner: f"{outer}.{inner}")


def _unknown(key: str, name: str, modules: set[str], folder: Path) -> ConfigError:
    ends = sorted({module.rpartition(".")[2] for module in modules} - set(map(str, range(1000))))
    close = get_close_matches(name, ends, 1)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    return ConfigError(
        f"trainer.lora.{key}: no module of the model in {folder} is called {name!r}. {hint}"
        f"There are {', '.join(ends)}."
    )
