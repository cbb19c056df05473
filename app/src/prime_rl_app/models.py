"""``python -m prime_rl_app.models RUN_DIR``: make or fetch a run's model, unless it is cached.

The user's cache has one folder for each set of settings and seed of a model that a plugin makes,
and one for each id of the hub. A local folder is used as it is.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from prime_rl import ModelMaker, Tuning
from prime_rl.config.run import ModelSource, RunConfig
from prime_rl.errors import ConfigError, PrimeRLError
from prime_rl.plugins.hookspecs import TRAINER_GROUP
from prime_rl.registry.manager import load_plugins
from prime_rl.registry.offers import MODEL, collect, make_tuning
from prime_rl.rundir.launch import READY, Launch
from prime_rl.rundir.processes import exit_with_parent
from prime_rl.rundir.status import DONE, Status
from prime_rl_app.resolve import build_model_maker

log = logging.getLogger("prime_rl.models")

CACHE = "PRIME_RL_CACHE"
"""Environment variable with the folder of cached models."""


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


def model_path(config: ModelSource, cache: Path | None = None) -> tuple[str, bool]:
    """The path of the run's model, and whether the model process must still create it. ``cache``
    replaces the user's cache, unless ``$PRIME_RL_CACHE`` is set."""
    cache = cache if cache and CACHE not in os.environ else cache_dir()
    hooks = load_plugins(disabled=config.plugins.disabled)
    maker = build_model_maker(config, hooks)
    if maker is not None:
        version = collect(hooks, MODEL)[maker.name].source.version
        path = cached_path(maker, version, config.seed, cache)
    elif Path(config.model.name).is_dir():
        return str(Path(config.model.name).resolve()), False
    else:
        path = cache / f"hub--{config.model.name.replace('/', '--')}"

    return str(path), not (path / READY).exists()


def check_made(config: ModelSource) -> None:
    """Raises ``ConfigError`` if the model has to be made here and cannot be."""
    maker = build_model_maker(config, load_plugins(disabled=config.plugins.disabled))
    _, to_make = model_path(config)
    if maker is not None and to_make:
        maker.check()


def check_tuning(config: RunConfig) -> Tuning | None:
    """The run's tuning, checked against the model. Raises ``ConfigError``."""
    hooks = load_plugins(TRAINER_GROUP, disabled=config.plugins.disabled)
    tuning = make_tuning(config.trainer.settings, hooks)
    if tuning is not None:
        tuning.check(Path(model_path(config)[0]))
    return tuning


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
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        fill(work)
        (work / READY).touch()
        try:
            work.rename(target)
        except OSError:
            if not (target / READY).exists():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def main() -> int:
    """Make or fetch the model that the run's config names; 1 if that fails."""
    exit_with_parent()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # run the clean-up
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    run_dir = Path(sys.argv[1])
    status = Status(run_dir / "status" / "model.json")
    status.report("starting")
    try:
        table = json.loads((run_dir / "configs" / "run.json").read_bytes())
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
        status.report("failed", error=str(error))  # said, so that the run does not try again
        return 1

    status.report(DONE, progress=1.0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
