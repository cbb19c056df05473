"""Rollouts of a run on disk: ``<run>/rollouts/step_N.msgpack``.

A step's file holds every rollout decided on for its batch, as it was stamped, and what a replay
needs: the place of each rollout in the order of scoring, siblings that still waited for a batch,
and the digest of every frame sent.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import msgspec
from pydantic import PositiveInt

from prime_rl import Group, Observer, ObserverHost, PluginConfig, Rollout
from prime_rl.orchestrator.records import StoredRollout as StoredRollout
from prime_rl.orchestrator.records import decode_rollouts, encode_rollouts
from prime_rl_app.files import reading

if TYPE_CHECKING:
    from prime_rl.rollout import Batch

log = logging.getLogger(__name__)

ScoringPlace: TypeAlias = tuple[int, int, int, int]
"""When a rollout was scored: the attempt at the run (by its time), the group within it, the member
within that, and the group's size. Places are in the order in which groups were scored."""


class FrameDigest(NamedTuple):
    """One rank's micro batches, as sent."""

    num_bytes: int
    sha256: str

    @classmethod
    def of(cls, frame: bytes) -> FrameDigest:
        return cls(len(frame), hashlib.sha256(frame).hexdigest())


@dataclass(frozen=True, repr=False, kw_only=True)
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
        self._open: dict[ScoringPlace, Rollout] = {}
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
        objections: Mapping[int, Mapping[str, str]] = MappingProxyType({}),
    ) -> None:
        """Save one step: every rollout decided on, and the digests of the frames sent. ``dropped``
        and ``objections``: see ``Batch``."""
        places = [rollout.place for rollout in seen if rollout.place]
        for place in places:
            self._open.pop(place, None)
        groups = {place[:2] for place in places}
        waiting = [rollout for place, rollout in self._open.items() if place[:2] in groups]
        digests = [FrameDigest.of(frame) for frame in frames]
        path = self.directory / f"step_{step}.msgpack"
        write_rollouts(
            path,
            step,
            rollouts=seen,
            dropped=dropped,
            waiting=waiting,
            frames=digests,
            objections=objections,
        )


class SaveConfig(PluginConfig):
    """``[observers.save_rollouts]``: which files in ``<run>/rollouts``, and which folders in
    ``<run>/eval_rollouts``, stay."""

    keep_last: PositiveInt | None = None
    """Number of newest steps, and of newest evaluated versions beside the first. None: all."""
    keep_interval: PositiveInt | None = None
    """Steps and versions of every multiple of this stay, in addition to ``keep_last``."""

    def superseded(self, steps: Sequence[int]) -> list[int]:
        """The ``steps``, in order, whose files can be deleted."""
        older = [] if self.keep_last is None else steps[: -self.keep_last]
        return [n for n in older if self.keep_interval is None or n % self.keep_interval]


class SaveRollouts(Observer):
    """Saves the rollouts of every step, unless ``orchestrator.save_rollouts`` is false."""

    name = "save_rollouts"
    config_class = SaveConfig
    reads = ("orchestrator.save_rollouts",)

    def __init__(self, config: PluginConfig, host: ObserverHost) -> None:
        super().__init__(config, host)
        self._keep = config if isinstance(config, SaveConfig) else SaveConfig()
        run = host.shared.run
        is_on = run.config.orchestrator.save_rollouts
        self._store = RolloutStore(run.run_dir) if is_on else None

    def group_scored(self, group: Group, version: int) -> None:
        if self._store is not None:
            self._store.group_scored(group)

    def batch_sent(self, batch: Batch, frames: Sequence[bytes]) -> None:
        """Save the batch. A full disk does not end the run."""
        if self._store is None:
            return
        try:
            self._store.write(
                batch.step,
                seen=batch.seen,
                dropped=batch.dropped,
                frames=frames,
                objections=batch.objections,
            )
            run_dir = self._store.directory.parent
            files = step_files(run_dir)
            for step in self._keep.superseded([*files]):
                files[step].unlink(missing_ok=True)
            folders = numbered(run_dir.glob("eval_rollouts/step_*"))
            for version in self._keep.superseded([*folders][1:]):  # the first: before training
                shutil.rmtree(folders[version])
        except OSError as error:
            log.error("step %d: its rollouts are not kept: %s", batch.step, error)

    def batch_lost(self, batch: Batch) -> None:
        """Save what was dropped."""
        self.batch_sent(batch, ())


def write_rollouts(
    path: Path,
    step: int,
    rollouts: Sequence[Rollout],
    dropped: Mapping[int, str],
    *,
    waiting: Sequence[Rollout] = (),
    frames: Sequence[FrameDigest] = (),
    objections: Mapping[int, Mapping[str, str]] = MappingProxyType({}),
) -> None:
    """Save one step's rollouts, kept and dropped, atomically. ``dropped`` and ``objections`` say
    how and why, by ``id()`` (``Batch``). Raises ``OSError``."""
    decided = [(rollout, dropped.get(id(rollout))) for rollout in rollouts]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    try:
        content = encode_rollouts(
            step, decided, waiting=waiting, frames=frames, objections=objections
        )
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def step_files(run_dir: Path) -> dict[int, Path]:
    """A run's files by step, in order."""
    return numbered((run_dir / "rollouts").glob("step_*.msgpack"))


def numbered(paths: Iterable[Path]) -> dict[int, Path]:
    """The paths named ``step_N``, by N, in order."""
    files = {}
    for path in paths:
        number = path.stem.removeprefix("step_")
        if number.isdecimal():
            files[int(number)] = path
    return dict(sorted(files.items()))


def read_rollouts(path: Path) -> tuple[int, list[Rollout], list[str | None]]:
    """The step, its rollouts, and why each was dropped (None: it trained)."""
    stored = read_step(path)
    return (
        stored.step,
        [each.rollout for each in stored.rollouts],
        [each.dropped_by for each in stored.rollouts],
    )


def read_step(path: Path) -> StoredStep:
    """Everything a step's file holds. Raises ``RunError`` if it is truncated or of another kind."""
    record = decode_rollouts(path)
    with reading(path):
        pairs = msgspec.convert(record["frames"], list[tuple[int, str]])
        frames = [FrameDigest(rank, digest) for rank, digest in pairs]
    return StoredStep(
        step=record["step"], rollouts=record["rollouts"], waiting=record["waiting"], frames=frames
    )
