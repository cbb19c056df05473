"""``python -m prime_rl_app.models RUN_DIR``: make or fetch a run's model, unless it is cached.

The user's cache has one folder for each set of settings and seed of a model that a plugin makes,
and one for each id of the hub. A local folder is used as it is.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from prime_rl import ModelMaker
from prime_rl.config.run import ModelSource
from prime_rl.errors import ConfigError, PluginError, PrimeRLError
from prime_rl.plugins.status import Facts
from prime_rl.registry.manager import Hooks, load_plugins
from prime_rl.registry.offers import MODEL, bringer, collect, settings_of
from prime_rl.rundir.launch import READY, Launch
from prime_rl.rundir.logs import set_up_logging
from prime_rl.rundir.processes import exit_with_parent
from prime_rl.rundir.rows import read_table
from prime_rl.rundir.scratch import Scratch
from prime_rl.rundir.status import DONE, Status

log = logging.getLogger("prime_rl.models")

CACHE = "PRIME_RL_CACHE"
"""Environment variable with the folder of cached models."""


def build_model_maker(config: ModelSource, hooks: Hooks) -> ModelMaker | None:
    """The plugin that makes ``model.name``, or None if it is a folder or a hub id. Raises
    ``ConfigError``."""
    offers = collect(hooks, MODEL)
    model = config.model
    folder = Path(model.name)
    if model.name in offers and not folder.exists():
        cls = offers[model.name].cls
        return cls(settings_of(cls, MODEL, settings=model.settings, where="model"))

    if model.settings:
        raise ConfigError(f"model.{next(iter(model.settings))}: unknown key of a checkpoint")
    # A path to a missing folder may look like a hub id.
    is_path = model.name.startswith((".", "/", "~")) or model.name.count("/") > 1
    is_path = is_path or ("/" in model.name and folder.parent.is_dir())
    if not folder.is_dir():
        if is_path or "/" not in model.name:
            package = bringer("model", model.name)
            install = f". pip install {package} brings it" if package else ""
            made = ", ".join(offers) or "none"
            close = difflib.get_close_matches(model.name, offers, n=1)
            meant = f". Did you mean {close[0]!r}?" if close else ""
            raise ConfigError(
                f"model.name: {model.name!r} is no folder, no hub id (owner/name), and no model "
                f"that an installed plugin makes (those are: {made}){install or meant}"
            )
    elif not (folder / "config.json").exists():
        raise ConfigError(
            f"model.name: {folder} has no config.json; expected a Hugging Face folder"
        )
    elif (folder / "adapter_config.json").exists() and not any(folder.glob("model*.safetensors")):
        raise ConfigError(
            f"model.name: {folder} holds a LoRA adapter without its base. The model that its run "
            "exported, RUN/weights, has the adapter merged in."
        )

    return None


def cached_path(maker: ModelMaker, version: str, seed: int, cache: Path) -> Path:
    """Folder of a maker's model: equal settings, seed and plugin version share one."""
    key = json.dumps([maker.name, version, maker.config.model_dump(mode="json"), seed])
    return cache / f"{maker.name}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def cache_dir() -> Path:
    """``$PRIME_RL_CACHE``, else ``prime-rl/models`` in the user's cache folder."""
    explicit = os.environ.get(CACHE)
    if explicit:
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "prime-rl" / "models"


def model_path(config: ModelSource, hooks: Hooks, cache: Path | None = None) -> tuple[str, bool]:
    """The path of the run's model, and whether the model process must still create it. ``cache``
    replaces the user's cache, unless ``$PRIME_RL_CACHE`` is set."""
    cache = cache if cache and CACHE not in os.environ else cache_dir()
    maker = build_model_maker(config, hooks)
    if maker is not None:
        version = collect(hooks, MODEL)[maker.name].source.version
        path = cached_path(maker, version, seed=config.seed, cache=cache)
    elif Path(config.model.name).is_dir():
        return str(Path(config.model.name).resolve()), False
    else:
        path = cache / f"hub--{config.model.name.replace('/', '--')}"

    return str(path), not (path / READY).exists()


def tensor_names(folder: Path) -> list[str]:
    """The tensors of a model's folder, as its files call them; none if they cannot be read."""
    names: list[str] = []
    try:
        index = folder / "model.safetensors.index.json"
        if index.exists():
            return list(json.loads(index.read_bytes())["weight_map"])
        for path in folder.glob("model*.safetensors"):
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                names += json.loads(file.read(length))
    except (OSError, ValueError, LookupError, TypeError):
        return []
    return names


def check_made(config: ModelSource, hooks: Hooks) -> None:
    """Raises ``ConfigError`` if the model has to be made here and cannot be."""
    maker = build_model_maker(config, hooks)
    _, to_make = model_path(config, hooks)
    if maker is not None and to_make:
        maker.check()


FETCHED = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
"""Files to download: weights, configs, tokenizer."""


def fetch(name: str, directory: Path, status: Status) -> None:
    """Download a model of the hub into the empty ``directory``. Raises ``ConfigError``."""
    from huggingface_hub import snapshot_download

    status.report(f"downloading {name}", waiting_for="Hugging Face hub")
    try:
        snapshot_download(name, local_dir=directory, allow_patterns=FETCHED)
    except Exception as error:  # errors of the hub and of the network
        raise ConfigError(
            f"model.name: {name!r} is no folder here, and fetching it from the hub failed: {error}"
        ) from error


def make(fill: Callable[[Path], None], target: Path) -> None:
    """Let ``fill`` write a model to a temporary folder, then rename it to ``target``. Another
    process may have been faster."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with Scratch(f".{target.name}-", target.parent) as work:
        fill(work.path)
        (work.path / READY).touch()
        try:
            work.path.rename(target)
        except OSError:
            if not (target / READY).exists():
                raise


def main() -> int:
    """Make or fetch the model that the run's config names; 1 if that fails."""
    exit_with_parent()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # run the clean-up
    set_up_logging()
    run_dir = Path(sys.argv[1])
    status = Status(run_dir / "status" / "model.json")
    status.report("starting")
    try:
        table = read_table(run_dir / "configs" / "run.json")
        config = ModelSource.model_validate(
            {key: value for key, value in table.items() if key in ModelSource.model_fields}
        )
        maker = build_model_maker(config, load_plugins(disabled=config.plugins.disabled))

        def fill(folder: Path) -> None:
            if maker is None:
                fetch(config.model.name, folder, status)
            else:
                maker.make(folder, config.seed, lambda s, share: status.report(s, progress=share))

        make(fill, Launch.read(run_dir).initial)
    except (PrimeRLError, OSError) as error:
        log.error("%s: %s", type(error).__name__, error)
        # A failure that is reported makes the run not try again.
        facts = Facts(fault="plugin" if isinstance(error, PluginError) else None)
        status.report("failed", facts=facts, error=str(error))
        return 1

    status.report(DONE, progress=1.0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
