"""Rollouts on disk: ``<run>/rollouts/step_N.msgpack``, exact floats, no pickle.

A step's file holds every rollout decided on for its batch, as it was stamped, and what a replay
needs: the place of each rollout in the order of scoring, siblings that still waited for a batch,
and the digest of every frame sent.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np

from prime_rl.errors import RunError
from prime_rl.rollout import COLUMNS, Group, Rollout, Sample

Place: TypeAlias = tuple[int, int, int, int]
"""When a rollout was scored: the attempt at the run (by its time), the group within it, the member
within that, and the group's size. Places are in the order in which groups were scored."""

FIELDS = tuple(
    field.name
    for field in fields(Rollout)
    if field.name not in ("samples", "trace", "assigned", "frozen")
)
"""What is saved of a rollout beside its samples."""


@dataclass(frozen=True)
class FrameDigest:
    """One rank's micro batches, as sent."""

    num_bytes: int
    sha256: str

    @classmethod
    def of(cls, frame: bytes) -> FrameDigest:
        return cls(len(frame), hashlib.sha256(frame).hexdigest())


@dataclass(frozen=True, repr=False)
class StoredRollout:
    """One rollout of a file."""

    rollout: Rollout
    dropped_by: str | None
    """None: it trained, or is still waiting."""


@dataclass(frozen=True, repr=False)
class StoredStep:
    """One step's file."""

    step: int
    rollouts: list[StoredRollout]
    """In the order in which they were decided on."""
    waiting: list[StoredRollout]
    """Siblings of them that no batch has taken yet."""
    frames: list[FrameDigest]
    """One per trainer rank; empty if the file has none."""

    @property
    def kept(self) -> list[Rollout]:
        """What trained, in the order it was packed."""
        kept = [each.rollout for each in self.rollouts if each.dropped_by is None]
        return sorted(kept, key=lambda rollout: rollout.group_id)


class RolloutStore:
    """Writes a run's rollouts, one file per step."""

    def __init__(self, run_dir: Path) -> None:
        self.directory = run_dir / "rollouts"
        self._attempt = time.time_ns()
        self._num_groups = 0
        self._open: dict[Place, Rollout] = {}
        """Scored and not yet decided on."""

    def group_scored(self, group: Group) -> None:
        """Give each rollout its place in the order of scoring."""
        for member, rollout in enumerate(group):
            rollout.place = (self._attempt, self._num_groups, member, len(group))
            self._open[rollout.place] = rollout
        self._num_groups += 1

    def write(
        self,
        step: int,
        seen: Sequence[Rollout],
        dropped: Mapping[int, str],
        frames: Sequence[bytes] = (),
    ) -> None:
        """Save one step: every rollout decided on, and the digests of the frames sent."""
        places = [rollout.place for rollout in seen if rollout.place]
        for place in places:
            self._open.pop(place, None)
        groups = {place[:2] for place in places}
        waiting = [rollout for place, rollout in self._open.items() if place[:2] in groups]
        digests = [FrameDigest.of(frame) for frame in frames]
        path = self.directory / f"step_{step}.msgpack"
        write_rollouts(path, step, seen, dropped, waiting=waiting, frames=digests)


def write_rollouts(
    path: Path,
    step: int,
    rollouts: Sequence[Rollout],
    dropped: Mapping[int, str],
    *,
    waiting: Sequence[Rollout] = (),
    frames: Sequence[FrameDigest] = (),
) -> None:
    """Save one step's rollouts, kept and dropped, atomically. ``dropped`` gives the reasons by
    ``id()``. Raises ``OSError``."""
    record = {
        "step": step,
        "rollouts": [_record(rollout, dropped.get(id(rollout))) for rollout in rollouts],
        "waiting": [_record(rollout, None) for rollout in waiting],
        "frames": [[frame.num_bytes, frame.sha256] for frame in frames],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_bytes(msgspec.msgpack.encode(record, enc_hook=_plain))
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _plain(value: Any) -> Any:
    """A value without a msgpack type: numpy's as plain ones, anything else as text."""
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else str(value)


def step_files(run_dir: Path) -> dict[int, Path]:
    """A run's files by step, in order."""
    found = {}
    for path in (run_dir / "rollouts").glob("step_*.msgpack"):
        if (number := path.stem.removeprefix("step_")).isdecimal():
            found[int(number)] = path
    return dict(sorted(found.items()))


def read_rollouts(path: Path) -> tuple[int, list[Rollout], list[str | None]]:
    """The step, its rollouts, and why each was dropped (None: it trained)."""
    stored = read_step(path)
    return (
        stored.step,
        [each.rollout for each in stored.rollouts],
        [each.dropped_by for each in stored.rollouts],
    )


def read_step(path: Path) -> StoredStep:
    """Everything a step's file holds. Raises ``RunError`` if it is truncated or another kind of
    file."""
    try:
        record = msgspec.msgpack.decode(path.read_bytes())
        return StoredStep(
            record["step"],
            [_stored(row) for row in record["rollouts"]],
            [_stored(row) for row in record.get("waiting", ())],
            [FrameDigest(*frame) for frame in record.get("frames", ())],
        )
    except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"{path}: not a file of rollouts: {error}. Expected what a run writes as "
            "rollouts/step_N.msgpack."
        ) from error


def _record(rollout: Rollout, dropped_by: str | None) -> dict[str, Any]:
    samples = [
        {
            "temperature": sample.temperature,
            "columns": {
                name: [column.dtype.str, column.tobytes()]
                for name in COLUMNS
                if (column := getattr(sample, name)) is not None
            },
        }
        for sample in rollout.samples
    ]
    plain = {name: getattr(rollout, name) for name in FIELDS}
    return plain | {"samples": samples, "dropped_by": dropped_by}


def _stored(row: Mapping[str, Any]) -> StoredRollout:
    samples = []
    for sample in row["samples"]:
        columns = {n: np.frombuffer(data, dtype) for n, (dtype, data) in sample["columns"].items()}
        samples.append(Sample(temperature=sample["temperature"], **columns))
    plain = {name: row[name] for name in FIELDS if name in row}  # older files have fewer
    plain["place"] = tuple(row["place"]) if row.get("place") else None
    return StoredRollout(Rollout(**plain, samples=samples), row["dropped_by"])
