"""The run directory: created once, never shared; ``--resume`` adds another attempt to it.

<output_dir>/<run>/
  configs/run.json, launch.json       the resolved config
  logs/attempt_1/NAME.log             one per process; logs/latest points to the newest attempt
  status/NAME.json                    what each process does now
  metrics.jsonl, trainer.jsonl        one line per step
  expert_load.jsonl                   choices of a mixture's experts, one line per step
  evals.jsonl                         one line per evaluation
  rollouts/step_N.msgpack             rollouts with exact floats; eval_rollouts/step_N/ENV.msgpack
  broadcasts/step_N/                  published weights
  averages/step_N/                    their moving average, where an engine serves it
  checkpoints/step_N/                 what --resume continues from (checkpoints.py)
  weights/                            the final model, a Hugging Face folder
  summary.json, learning_curve.png    the result
"""

from __future__ import annotations

import fcntl
import glob
import itertools
import os
import re
import shutil
from codecs import BOM_UTF8
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import ValidationError

from prime_rl.config.explain import explain
from prime_rl.config.run import RunConfig
from prime_rl.errors import ConfigError, RunError, RunHeld
from prime_rl.rundir.status import replace_text

DRY = ".dry-run"
"""Marker file of a directory that only a dry run has used."""

SUBFOLDERS = ("configs", "logs/attempt_1", "status", "rollouts", "broadcasts")


def make_run_dir(config: RunConfig, *, dry: bool = False) -> Path:
    """Create a run directory and write the resolved config into it; ``dry``: nothing else.

    A real run may claim the directory of a dry run. Raises ``ConfigError`` if ``run.name`` is
    taken: a run never writes into the directory of another run.
    """
    parent = Path(config.output_dir)
    name = config.run.name
    names = [name] if name else (f"{_stem(config)}--{number}" for number in itertools.count(1))
    try:
        run_dir = next((parent / each for each in names if _claim(parent / each)), None)
    except OSError as error:
        raise ConfigError(
            f"output_dir: no run directory can be made in {parent}: {error}"
        ) from error

    if run_dir is None:
        raise ConfigError(
            f"run.name: {parent / str(name)} exists already. --resume goes on with its run. For a "
            "new run, choose another run.name, leave it out to get a free one, or remove the "
            "folder."
        )

    for folder in ("configs",) if dry else SUBFOLDERS:
        (run_dir / folder).mkdir(parents=True, exist_ok=True)
    if dry:
        (run_dir / DRY).touch()
    else:
        (run_dir / "logs" / "latest").symlink_to("attempt_1")

    write_config(run_dir, config)
    return run_dir


def write_config(run_dir: Path, config: RunConfig) -> None:
    """Write the resolved config of the newest attempt. Raises ``OSError``, and leaves the one
    before."""
    replace_text(run_dir / "configs" / "run.json", config.model_dump_json(indent=2))


def read_config(run_dir: Path) -> RunConfig:
    """The resolved config of the newest attempt. Raises ``RunError`` if the file is missing or
    damaged, or of a version with other keys."""
    path = run_dir / "configs" / "run.json"
    try:
        return RunConfig.model_validate_json(path.read_bytes().removeprefix(BOM_UTF8))
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValidationError as error:
        problems = explain(error, RunConfig).split("\n")
        raise RunError(f"{path} cannot be read: {'; '.join(problems[:5])}") from error


def new_attempt(run_dir: Path) -> int:
    """Make fresh logs for another attempt, whose number is returned, and keep the config of the one
    before, whose processes write nothing from here on. Raises ``OSError``."""
    number = _newest_attempt(run_dir)
    for folder in SUBFOLDERS:
        (run_dir / folder).mkdir(parents=True, exist_ok=True)
    (run_dir / "logs" / f"attempt_{number + 1}").mkdir()

    # A rename replaces the link, so `latest` always names an attempt (`check_current`).
    link = run_dir / "logs" / ".latest"
    link.unlink(missing_ok=True)
    link.symlink_to(f"attempt_{number + 1}")
    link.replace(run_dir / "logs" / "latest")

    # `run.json` stays until the new one replaces it: a folder without it is no run.
    for name, keep in (("run", shutil.copyfile), ("launch", os.replace)):
        old = run_dir / "configs" / f"{name}.json"
        if old.exists():
            keep(old, old.with_name(f"{name}.attempt_{number}.json"))

    return number + 1


@contextmanager
def held(run_dir: Path) -> Iterator[None]:
    """Lock the directory for one supervisor. Raises ``RunHeld`` if another one holds it."""
    with (run_dir / ".lock").open("a", encoding="utf-8") as file:
        try:
            # The kernel releases the lock when the process ends, however it ends.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RunHeld(
                f"{run_dir}: another process runs this run already. Wait for it, or stop it."
            ) from error
        yield


def runs_of(config: RunConfig) -> list[Path]:
    """The run that ``run.name`` names; without a name, all runs of these envs and this model, the
    newest first."""
    parent = Path(config.output_dir)
    if config.run.name:
        named = parent / config.run.name
        return [named] if named.is_dir() else []

    stem = _stem(config)
    numbered = {}
    for path in parent.glob(f"{glob.escape(stem)}--*"):
        number = path.name.removeprefix(f"{stem}--")
        if number.isdecimal() and path.is_dir():
            numbered[int(number)] = path
    return [path for _, path in sorted(numbered.items(), reverse=True)]


def _claim(run_dir: Path) -> bool:
    """Create the directory or claim that of a dry run. One of several concurrent callers
    succeeds."""
    try:
        run_dir.mkdir(parents=True)
        return True
    except FileExistsError:
        with suppress(FileNotFoundError):
            # A file is removed once, so only one of several callers succeeds.
            (run_dir / DRY).unlink()
            return True
    return False


def _stem(config: RunConfig) -> str:
    envs = "-".join(env.label for env in config.orchestrator.train.env)
    return re.sub(r"[^a-z0-9._-]+", "-", f"{envs}--{Path(config.model.name).name}".lower())[:80]


def log_dir(run_dir: Path) -> Path:
    return run_dir / "logs" / f"attempt_{_newest_attempt(run_dir)}"


def _newest_attempt(run_dir: Path) -> int:
    names = (path.name.removeprefix("attempt_") for path in run_dir.glob("logs/attempt_*"))
    return max((int(name) for name in names if name.isdecimal()), default=1)
