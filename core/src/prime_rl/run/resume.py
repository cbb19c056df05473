"""``prime-rl run CONFIG --resume [latest | STEP | DIR]``: which checkpoint, in which run directory.

``latest`` and ``STEP`` continue the run that ``run.name`` names; without a name, the newest run of
these environments and this model that has such a checkpoint. ``DIR`` is a checkpoint's folder: if
it belongs to the run that ``run.name`` names, that run continues; else a new run starts from a
copy.

A resumed run drops what followed the checkpoint: metrics, rollouts, broadcasts. Later checkpoints
are moved to ``checkpoints/abandoned_K``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prime_rl.config.run import RunConfig
from prime_rl.errors import ConfigError
from prime_rl.plugins.manager import installed_versions
from prime_rl.plugins.tuning import Tuning
from prime_rl.run.resume_checks import (
    check_model,
    check_optimizer,
    check_tuning,
    config_drift,
    version_drift,
)
from prime_rl.rundir.checkpoints import (
    Checkpoint,
    checkpoints_dir,
    copy,
    finished,
    whole_steps,
)
from prime_rl.rundir.directory import held, make_run_dir, new_attempt, runs_of, write_config
from prime_rl.rundir.status import replace_text

LATEST = "latest"


@dataclass(frozen=True)
class Plan:
    """The checkpoint to resume from, chosen before any file changes."""

    checkpoint: Checkpoint
    run_dir: Path | None
    """The run that continues; None: a new run starts from a copy."""
    notes: list[str] = field(default_factory=list)
    """Lines for the user: the checkpoint, and the changes since."""


def plan(config: RunConfig, what: str, tuning: Tuning | None = None) -> Plan:
    """Find the checkpoint and compare it with the config and its tuning. Raises ``ConfigError`` if
    there is none or the config does not fit it."""
    checkpoint, run_dir = _find(config, what)
    if checkpoint.step >= config.max_steps:
        raise ConfigError(
            f"--resume: {checkpoint.directory} is of step {checkpoint.step}, max_steps is "
            f"{config.max_steps}: nothing is left to train. Raise max_steps."
        )
    progress = _read_progress(checkpoint)
    now = config.model_dump(mode="json")
    check_model(progress["config"].get("model", {}), now["model"], checkpoint.weights)
    check_tuning(progress["config"], tuning, checkpoint)
    check_optimizer(progress["config"], now, checkpoint)
    where = "" if run_dir else f", in a new run (a copy of run {checkpoint.run_dir.name})"
    drift = config_drift(progress["config"], now)
    drift += version_drift(progress["plugins"], installed_versions())
    notes = [f"resuming from step {checkpoint.step} of {checkpoint.directory}{where}"]
    return Plan(checkpoint, run_dir, notes + [f"changed since: {line}" for line in drift])


@contextmanager
def begin(config: RunConfig, chosen: Plan) -> Iterator[tuple[Path, Checkpoint]]:
    """Lock the run directory and prepare it for the next attempt. Raises ``ConfigError`` if
    another process holds it or a file cannot be written."""
    if chosen.run_dir is None:
        run_dir = make_run_dir(config)
        with held(run_dir):
            yield run_dir, copy(chosen.checkpoint, run_dir)
        return
    with held(chosen.run_dir):
        try:
            rewind(chosen.run_dir, chosen.checkpoint.step)
            new_attempt(chosen.run_dir)
            write_config(chosen.run_dir, config)
        except OSError as error:
            raise ConfigError(f"--resume: cannot make {chosen.run_dir} ready: {error}") from error
        yield chosen.run_dir, chosen.checkpoint


def _find(config: RunConfig, what: str) -> tuple[Checkpoint, Path | None]:
    if what != LATEST and not what.isdecimal():
        return _in_folder(config, Path(what))
    runs = runs_of(config)
    for run_dir in runs:
        steps = whole_steps(run_dir)
        if what == LATEST and steps:
            return finished(run_dir, steps[-1]), run_dir
        if what != LATEST and int(what) in steps:
            return finished(run_dir, int(what)), run_dir
    wanted = "a whole checkpoint" if what == LATEST else f"a whole checkpoint of step {what}"
    listed = "; ".join(f"{run} has steps {whole_steps(run) or 'none'}" for run in runs)
    raise ConfigError(
        f"--resume {what}: no run has {wanted}: {listed or f'no such run in {config.output_dir}'}. "
        "A run writes one where it ends or is stopped, and every [ckpt] interval steps, unless "
        "ckpt.enabled is false; run.name chooses the run."
    )


def _in_folder(config: RunConfig, directory: Path) -> tuple[Checkpoint, Path | None]:
    numbered = directory.name.removeprefix("step_").isdecimal()
    if not numbered or not (found := Checkpoint(directory.resolve())).is_whole:
        raise ConfigError(
            f"--resume {directory}: expected 'latest', a step, or the folder of a whole "
            "checkpoint: RUN/checkpoints/step_N"
        )
    named = config.run.name and (Path(config.output_dir) / config.run.name).resolve()
    return found, found.run_dir if found.run_dir == named else None


def _read_progress(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    try:
        progress = json.loads(checkpoint.progress.read_text())
        return {name: dict(progress[name]) for name in ("config", "plugins")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--resume: {checkpoint.progress} cannot be read: {error}") from error


def rewind(run_dir: Path, step: int) -> None:
    """Remove what a run wrote after step ``step``. Later checkpoints go first: if the process dies
    in between, ``latest`` is already the right checkpoint."""
    _abandon(run_dir, step)
    for name in ("metrics.jsonl", "trainer.jsonl", "evals.jsonl"):
        _cut(run_dir / name, step)
    for folder in ("broadcasts", "rollouts", "token_exports"):
        _remove_steps(run_dir / folder, after=step)
    _remove_steps(run_dir / "rollouts_wire", after=-1)
    for path in (run_dir / "status").glob("*.json"):
        path.unlink()


def _cut(path: Path, step: int) -> None:
    """Keep the complete lines up to a step."""
    if not path.exists():
        return
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        with suppress(ValueError, KeyError, TypeError):
            if line.endswith(b"\n") and json.loads(line)["step"] <= step:
                kept.append(line)
    replace_text(path, b"".join(kept).decode())


def _remove_steps(folder: Path, after: int) -> None:
    """Delete each ``step_N`` with N greater than ``after``, and every unfinished ``.step_N``."""
    for path in [*folder.glob("step_*"), *folder.glob(".step_*")]:
        number = path.name.removeprefix("step_").split(".")[0]
        if path.name.startswith(".") or (number.isdecimal() and int(number) > after):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _abandon(run_dir: Path, step: int) -> None:
    """Move later checkpoints away, and delete incomplete ones."""
    folder = checkpoints_dir(run_dir)
    for leftover in [*folder.glob(".step_*"), *folder.glob(".removed_*")]:
        shutil.rmtree(leftover)
    later = [n for n in whole_steps(run_dir) if n > step]
    if later:
        aside = folder / f"abandoned_{len(list(folder.glob('abandoned_*'))) + 1}"
        aside.mkdir()
        for each in later:
            path = finished(run_dir, each).directory
            path.rename(aside / path.name)
