"""The run directory: made once, never shared.

<output_dir>/<run>/
  configs/run.json, launch.json       what was asked, as resolved
  logs/attempt_1/NAME.log             one a process; logs/latest points to the newest attempt
  status/NAME.json                    what each process does now
  metrics.jsonl, trainer.jsonl        one line a step
  rollouts/step_N.msgpack             rollouts with exact floats
  broadcasts/step_N/                  published weights
  weights/                            the final model, a Hugging Face folder
  summary.json, learning_curve.png    what it came to
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from prime_rl.config.run import RunConfig
from prime_rl.plugins.errors import ConfigError

DRY = ".dry-run"
"""Marker of a directory in which nothing has run yet."""

SUBFOLDERS = ("configs", "logs/attempt_1", "status", "rollouts", "broadcasts")


def make_run_dir(config: RunConfig, *, dry: bool = False) -> Path:
    """Make a fresh run directory and write the resolved config into it; ``dry``: nothing else.

    A directory that only holds what a dry run wrote may be claimed by the real one. Raises
    ``ConfigError`` if ``run.name`` is taken: a second run never writes into the first one's
    directory.
    """
    parent = Path(config.output_dir)
    try:
        run_dir = _named(parent, config.run.name) if config.run.name else _numbered(parent, config)
    except OSError as error:
        raise ConfigError(
            f"output_dir: no run directory can be made in {parent}: {error}"
        ) from error
    for folder in ("configs",) if dry else SUBFOLDERS:
        (run_dir / folder).mkdir(parents=True, exist_ok=True)
    if dry:
        (run_dir / DRY).touch()
    else:
        (run_dir / "logs" / "latest").symlink_to("attempt_1")
    (run_dir / "configs" / "run.json").write_text(config.model_dump_json(indent=2))
    return run_dir


def _claim(run_dir: Path) -> bool:
    """Take the directory if nobody has; of several that try at once, one gets it."""
    try:
        run_dir.mkdir(parents=True)
    except FileExistsError:
        try:
            (run_dir / DRY).unlink()
        except FileNotFoundError:
            return False
    return True


def _named(parent: Path, name: str) -> Path:
    run_dir = parent / name
    if not _claim(run_dir):
        raise ConfigError(
            f"run.name: {run_dir} exists already. Choose another run.name, leave it out to get a "
            "free one, or remove the folder."
        )
    return run_dir


def _numbered(parent: Path, config: RunConfig) -> Path:
    envs = "-".join(env.label for env in config.orchestrator.train.env)
    stem = re.sub(r"[^a-z0-9._-]+", "-", f"{envs}--{Path(config.model.name).name}".lower())[:80]
    return next(
        run_dir for number in itertools.count(1) if _claim(run_dir := parent / f"{stem}--{number}")
    )


def log_dir(run_dir: Path) -> Path:
    """Where this attempt's logs go."""
    return run_dir / "logs" / "attempt_1"
