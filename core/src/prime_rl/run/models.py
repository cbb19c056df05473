"""``python -m prime_rl.run.models RUN_DIR``: make the run's model, unless the cache has it already.

Models that a plugin makes are kept under the user's cache folder, one folder for each set of
settings and seed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path

from prime_rl.config.run import RunConfig
from prime_rl.plugins.base import ModelMaker
from prime_rl.plugins.manager import load_plugins
from prime_rl.plugins.offers import MODEL, collect
from prime_rl.run.launch import READY, Launch
from prime_rl.run.processes import exit_with_parent
from prime_rl.run.resolve import build_model_maker
from prime_rl.run.status import Status


def cached_path(maker: ModelMaker, version: str, seed: int) -> Path:
    """Where a maker's model lives: the same settings, seed and plugin version share one folder."""
    key = json.dumps([maker.name, version, maker.config.model_dump(mode="json"), seed])
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    return cache_dir() / f"{maker.name}-{digest}"


def cache_dir() -> Path:
    """``$PRIME_RL_CACHE``, else ``prime-rl/models`` in the user's cache folder."""
    if explicit := os.environ.get("PRIME_RL_CACHE"):
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "prime-rl" / "models"


def model_path(config: RunConfig) -> tuple[str, bool]:
    """The run's model, and whether it is still to be made."""
    hooks = load_plugins(disabled=config.plugins.disabled)
    maker = build_model_maker(config, hooks)
    if maker is None:
        return config.model.name, False
    version = collect(hooks, MODEL)[maker.name].source.version
    path = cached_path(maker, version, config.seed)
    return str(path), not (path / READY).exists()


def make(maker: ModelMaker, target: Path, seed: int, status: Status) -> None:
    """Make a model beside ``target`` and move it there whole; another process may have been
    faster."""
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        maker.make(work, seed, lambda state, share: status.report(state, progress=share))
        (work / READY).touch()
        try:
            work.rename(target)
        except OSError:
            if not (target / READY).exists():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def main() -> int:
    """Make the model that the run's config names."""
    exit_with_parent()
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    run_dir = Path(sys.argv[1])
    config = RunConfig.model_validate_json((run_dir / "configs" / "run.json").read_bytes())
    status = Status(run_dir / "status" / "model.json")
    status.report("starting")
    maker = build_model_maker(config, load_plugins(disabled=config.plugins.disabled))
    if maker is None:
        raise SystemExit(f"model.name = {config.model.name!r} is not made here")
    make(maker, Path(Launch.read(run_dir).model_path), config.seed, status)
    status.report("done", progress=1.0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
