"""The checkpoints of a run on disk: whole or not there at all.

    <run>/checkpoints/.step_5/orchestrator/   1. written before batch 5 goes to the trainer
    <run>/checkpoints/.step_5/weights/        2. the trainer, after step 5
    <run>/checkpoints/.step_5/trainer/
    <run>/checkpoints/.step_5/STABLE          3. everything is on the disk
    <run>/checkpoints/step_5/                 4. by one rename

The orchestrator's part lies there before the trainer can have the batch that completes the step, so
neither waits for the other: the trainer, which writes last, completes the checkpoint if it finds
both parts. Nothing inside a completed one is ever written again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from pathlib import Path

from prime_rl.config.ckpt import CkptConfig
from prime_rl.plugins.errors import ConfigError

STABLE = "STABLE"
"""Marker file in a checkpoint that is whole."""
PROGRESS = "progress.json"
"""Last file of the orchestrator's part."""


class Checkpoint:
    """Paths of one checkpoint."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def step(self) -> int:
        return int(self.directory.name.lstrip(".").removeprefix("step_"))

    @property
    def run_dir(self) -> Path:
        """The run it is of."""
        return self.directory.parent.parent

    @property
    def orchestrator(self) -> Path:
        """Progress, sampler, sources, algorithms, buffered rollouts."""
        return self.directory / "orchestrator"

    @property
    def progress(self) -> Path:
        return self.orchestrator / PROGRESS

    @property
    def trainer(self) -> Path:
        """Optimizer, random numbers and step, by torch.distributed.checkpoint."""
        return self.directory / "trainer"

    @property
    def weights(self) -> Path:
        """The policy: a Hugging Face folder."""
        return self.directory / "weights"

    @property
    def is_whole(self) -> bool:
        return (self.directory / STABLE).exists()


def checkpoints_dir(run_dir: Path) -> Path:
    """Where a run's checkpoints lie."""
    return run_dir / "checkpoints"


def unfinished(run_dir: Path, step: int) -> Checkpoint:
    """A checkpoint that is being written."""
    return Checkpoint(checkpoints_dir(run_dir) / f".step_{step}")


def finished(run_dir: Path, step: int) -> Checkpoint:
    """A completed one, if it is there."""
    return Checkpoint(checkpoints_dir(run_dir) / f"step_{step}")


def whole_steps(run_dir: Path) -> list[int]:
    """Steps of the checkpoints that are whole, in order. Stray names are passed over."""
    found = checkpoints_dir(run_dir).glob("step_*")
    numbered = [path for path in found if path.name.removeprefix("step_").isdigit()]
    return sorted(c.step for c in map(Checkpoint, numbered) if c.is_whole)


def complete(run_dir: Path, step: int) -> Checkpoint:
    """Make what was written a checkpoint, in one instant. Raises ``OSError``."""
    written, final = unfinished(run_dir, step), finished(run_dir, step)
    flush_all(written.directory)
    (written.directory / STABLE).touch()
    flush(written.directory)
    if final.directory.exists():
        remove(final)
    written.directory.rename(final.directory)
    flush(final.directory.parent)
    return final


def flush_all(directory: Path) -> None:
    """Have a folder with everything in it on the disk."""
    for path in [*directory.rglob("*"), directory]:
        flush(path)


def flush(path: Path) -> None:
    """Have a file's, or a folder's, contents on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(checkpoint: Checkpoint) -> None:
    """Delete one; at no instant is half of it there under its own name."""
    going = checkpoint.directory.with_name(f".removed_{checkpoint.directory.name}")
    shutil.rmtree(going, ignore_errors=True)
    checkpoint.directory.rename(going)
    shutil.rmtree(going, ignore_errors=True)


def retain(run_dir: Path, config: CkptConfig, in_use: Collection[int] = ()) -> None:
    """Delete what ``keep_last`` and ``keep_interval`` do not keep. ``in_use``: steps to spare."""
    for step in config.superseded(whole_steps(run_dir)):
        if step not in in_use:
            remove(finished(run_dir, step))


def copy(source: Checkpoint, run_dir: Path) -> Checkpoint:
    """A checkpoint in another run, sharing the disk's blocks where it can: no file of one is ever
    changed in place. Raises ``ConfigError`` if the disk refuses, and leaves nothing half copied."""
    unwhole, target = unfinished(run_dir, source.step), finished(run_dir, source.step)
    shutil.rmtree(unwhole.directory, ignore_errors=True)
    try:
        shutil.copytree(source.directory, unwhole.directory, copy_function=link_or_copy)
        flush_all(unwhole.directory)
        unwhole.directory.rename(target.directory)
        flush(target.directory.parent)
    except OSError as error:
        shutil.rmtree(unwhole.directory, ignore_errors=True)
        # copytree tells of each file: (source, target, why)
        why = error.args[0][0][2] if isinstance(error, shutil.Error) else error
        raise ConfigError(
            f"--resume: cannot copy {source.directory} to {target.directory}: {why}"
        ) from error
    return target


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """A file again, without taking disk space if both are on one disk."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy(source, target)
