"""The checkpoints of a run on disk. A checkpoint is complete or does not exist.

    <run>/checkpoints/.step_5/orchestrator/   1. written before batch 5 goes to the trainer
    <run>/checkpoints/.step_5/weights/        2. the trainer, after step 5
    <run>/checkpoints/.step_5/trainer/
    <run>/checkpoints/.step_5/states/          (if a loss or head keeps anything)
    <run>/checkpoints/.step_5/STABLE          3. everything is flushed to the disk; its digests
    <run>/checkpoints/step_5/                 4. one rename

The orchestrator writes its part before it sends the batch that completes the step, so neither
process waits for the other. The trainer writes last and completes the checkpoint if both parts
exist. At a stop the orchestrator writes its part before it tells the trainer which step was the
last. A complete checkpoint never changes: a resume compares every file with its digest.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec

from prime_rl.config.run import CkptConfig
from prime_rl.errors import ConfigError, RunError
from prime_rl.rundir.attempts import check_current
from prime_rl.rundir.rows import last_lines, parse_row, read_table
from prime_rl.rundir.status import names_in

CHECKSUMS = "STABLE"
"""Marker file of a complete checkpoint, named like that of a published version: SHA-256 of every
other file, by its path."""
BEST = "best.json"
"""In ``checkpoints``: the step with the best value of ``ckpt.best``, and the last one measured."""
REFERENCE = "reference.json"
"""In the trainer's part: the version of the reference, if it is not the first."""
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
        """Optimizer, random state and step: the ranks' shards and their index."""
        return self.directory / "trainer"

    @property
    def reference(self) -> int:
        """Version of the weights that became the reference (``trainer.reference_reset``); 0: none
        did. Raises ``ConfigError``."""
        path = self.trainer / REFERENCE
        try:
            return int(read_table(path, dict[str, int])["version"])
        except FileNotFoundError:
            return 0
        except (OSError, RunError, LookupError) as error:
            raise ConfigError(f"--resume: {path} cannot be read: {error}") from error

    def write_reference(self, version: int) -> None:
        """Raises ``OSError``."""
        path = self.trainer / REFERENCE
        path.write_text(json.dumps({"version": version}), "utf-8")
        flush(path)

    @property
    def states(self) -> Path:
        """What losses and heads keep beside their weights, a folder each. Absent if none does."""
        return self.directory / "states"

    @property
    def weights(self) -> Path:
        """The policy: a Hugging Face folder."""
        return self.directory / "weights"

    @property
    def is_adapter(self) -> bool:
        """Whether ``weights`` holds what trained beside the model, and not the model."""
        names = names_in(self.weights)
        return not any(n.startswith("model") and n.endswith(".safetensors") for n in names)

    @property
    def is_whole(self) -> bool:
        """Raises ``OSError`` if the disk refuses to say: newer Pythons' ``exists`` says no then."""
        return CHECKSUMS in names_in(self.directory)

    def verify(self) -> None:
        """Raise ``ConfigError`` unless every file is as it was written. Marks of earlier versions
        are empty, and say nothing about the files."""
        marker = self.directory / CHECKSUMS
        try:
            expected = read_table(marker, dict[str, str]) if marker.stat().st_size else {}
            actual = digests(self.directory) if expected else {}
        except (OSError, RunError) as error:
            raise ConfigError(f"--resume: {marker} cannot be checked: {error}") from error

        for name, digest in expected.items():
            if actual.get(name) != digest:
                fault = "is damaged" if name in actual else "is missing"
                raise ConfigError(
                    f"--resume: {self.directory / name} {fault}: it is not the file that "
                    f"{CHECKSUMS} has the digest of. Resume from another checkpoint."
                )


def checkpoints_dir(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def unfinished(run_dir: Path, step: int) -> Checkpoint:
    """A checkpoint that is being written."""
    return Checkpoint(checkpoints_dir(run_dir) / f".step_{step}")


def finished(run_dir: Path, step: int) -> Checkpoint:
    """The path of a complete checkpoint, whether it exists or not."""
    return Checkpoint(checkpoints_dir(run_dir) / f"step_{step}")


def whole_steps(run_dir: Path) -> list[int]:
    """Steps of the complete checkpoints, in order. Other names are ignored. Raises ``OSError``
    rather than leave out one that cannot be seen: what follows it would be removed."""
    names = names_in(checkpoints_dir(run_dir))
    numbers = [name.removeprefix("step_") for name in names if name.startswith("step_")]
    steps = sorted(int(number) for number in numbers if number.isdecimal())
    return [step for step in steps if finished(run_dir, step).is_whole]


def last_trained(run_dir: Path) -> int:
    """The last step in ``trainer.jsonl``; 0 if there is none."""
    try:
        lines = last_lines(run_dir / "trainer.jsonl")
    except OSError:
        return 0

    for line in reversed(lines):
        with suppress(ValueError, RecursionError):  # damaged: the one before it
            return int(parse_row(line)["step"])

    return 0


def would_repeat(run_dir: Path) -> range:
    """The trained steps that no checkpoint has: if the run ends now, a resume trains them again."""
    saved = max(whole_steps(run_dir), default=0)
    return range(saved + 1, last_trained(run_dir) + 1)


def durable(run_dir: Path) -> str:
    """What a run that ends now keeps: ``newest checkpoint: step 37; steps 38 to 148 ...``."""
    saved = max(whole_steps(run_dir), default=0)
    repeated = would_repeat(run_dir)
    newest = f"newest checkpoint: step {saved}" if saved else "no checkpoint yet"

    if not repeated:
        return newest

    steps = f"steps {repeated[0]} to {repeated[-1]}"
    if len(repeated) == 1:
        steps = f"step {repeated[0]}"
    return f"{newest}; {steps} will be trained again"


def complete(run_dir: Path, step: int) -> Checkpoint:
    """Turn an unfinished checkpoint into a complete one. Raises ``OSError`` and ``RunError``."""
    written = unfinished(run_dir, step)
    final = finished(run_dir, step)
    # Files, then the mark, then the new name, each on the disk before the next: a power cut
    # leaves a whole checkpoint or none.
    flush(*written.directory.rglob("*"))

    marker = written.directory / CHECKSUMS
    marker.write_bytes(msgspec.json.encode(digests(written.directory)))
    flush(marker, written.directory)

    check_current()
    # A run that went back trains the step again, so its checkpoint may exist.
    if final.directory.exists():
        remove(final)
    written.directory.rename(final.directory)
    flush(final.directory.parent)
    return final


def digests(directory: Path) -> dict[str, str]:
    """SHA-256 of every file but the mark, by its path in the directory. Raises ``OSError``."""

    def digest(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def refuse(error: OSError) -> None:
        raise error

    # Not `rglob`: in newer Pythons it leaves out a folder that cannot be listed.
    files = [
        Path(folder, name)
        for folder, _, names in os.walk(directory, onerror=refuse)
        for name in names
        if name != CHECKSUMS
    ]
    with ThreadPoolExecutor(4) as threads:
        names = (str(path.relative_to(directory)) for path in files)
        return dict(zip(names, threads.map(digest, files), strict=True))


def flush(*paths: Path) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove(checkpoint: Checkpoint) -> None:
    """Delete a checkpoint. It is renamed first, so its name never stands for half a checkpoint."""
    check_current()
    going = checkpoint.directory.with_name(f".removed_{checkpoint.directory.name}")
    shutil.rmtree(going, ignore_errors=True)
    checkpoint.directory.rename(going)
    shutil.rmtree(going, ignore_errors=True)


def retain(run_dir: Path, config: CkptConfig, in_use: Collection[int] = ()) -> None:
    """Delete what ``keep_last``, ``keep_interval`` and ``best`` do not keep, except the steps
    ``in_use``. With ``best``, what has not been evaluated stays."""
    best = None
    measured = 0
    with suppress(OSError, RunError):  # without it, all that `best` may need stay
        best, measured = read_table(checkpoints_dir(run_dir) / BEST, tuple[int | None, int])

    for step in config.superseded(whole_steps(run_dir)):
        kept = config.best is not None and (step == best or step > measured)
        if step not in in_use and not kept:
            remove(finished(run_dir, step))


def copy(source: Checkpoint, run_dir: Path) -> Checkpoint:
    """Copy a checkpoint into another run, by hard links where the disk allows: its files never
    change. Raises ``ConfigError`` if that fails, and leaves no partial copy."""
    partial = unfinished(run_dir, source.step)
    target = finished(run_dir, source.step)
    shutil.rmtree(partial.directory, ignore_errors=True)

    try:
        shutil.copytree(source.directory, partial.directory, copy_function=link_or_copy)
        flush(*partial.directory.rglob("*"), partial.directory)
        partial.directory.rename(target.directory)
        flush(target.directory.parent)
    except OSError as error:
        shutil.rmtree(partial.directory, ignore_errors=True)
        # copytree reports each file as (source, target, reason)
        why = error.args[0][0][2] if isinstance(error, shutil.Error) else error
        raise ConfigError(
            f"--resume: cannot copy {source.directory} to {target.directory}: {why}"
        ) from error

    return target


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """Link a file, or copy it if source and target are on different disks."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy(source, target)
