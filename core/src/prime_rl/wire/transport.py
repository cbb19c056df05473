"""Transport of frames to the trainer's ranks: over sockets or as files.

    sender (orchestrator) --one frame per rank and step--> receiver (each trainer rank)

Both transports keep the order, drop nothing, and make the sender wait while ``hwm`` batches are
unread. A checksum follows each frame: a flipped bit often makes another valid batch. A frame
without rows ends the run early: the previous step was the last.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from prime_rl.config.run import FILES
from prime_rl.errors import ConfigError, WireError
from prime_rl.rundir.attempts import check_current
from prime_rl.rundir.launch import Launch
from prime_rl.rundir.polls import poll_failed, poll_succeeded
from prime_rl.rundir.status import names_in, names_seen
from prime_rl.wire.sealing import check_num_frames, sealed, unsealed

SOCKETS = "zmq"
POLL_SECONDS = 0.01
"""Between two looks of the file transport."""
UNREADABLE_SECONDS = 60.0
"""For which a disk may refuse a frame of the file transport."""


class Sender(Protocol):
    """The orchestrator's end. Raises ``ConfigError`` on an unknown transport."""

    async def send(self, step: int, frames: Sequence[bytes]) -> None:
        """Send one frame per rank; waits while ``hwm`` batches are unread. Raises ``WireError`` if
        a disk refuses."""

    async def drain(self) -> None:
        """Wait until every rank has read all its frames."""

    async def announced(self, after: int) -> None:
        """Until the trainer announces weights later than version ``after``; or to look at files."""

    def close(self) -> None:
        """Release the sockets; unread frames are lost."""


class Receiver(Protocol):
    """One trainer rank's end."""

    def receive(self, timeout: float) -> memoryview | None:
        """The next frame, or None if none came within ``timeout`` seconds. Raises ``WireError`` if
        it was damaged on the way."""

    def announce(self, version: int) -> None:
        """Tell the orchestrator that weights are complete. For rank 0, on any thread."""

    def close(self) -> None:
        """Release the sockets."""


def make_sender(launch: Launch, run_dir: Path) -> Sender:
    """The orchestrator's end. Raises ``ConfigError`` on an unknown transport."""
    if launch.transport_type == FILES:
        return FileSender(wire_dir(run_dir), launch.num_ranks, launch.transport_hwm)
    _check_known(launch)
    from prime_rl.wire.sockets import FrameSender

    return FrameSender(launch, run_dir / "status" / "trainer.json")


def make_receiver(launch: Launch, run_dir: Path, rank: int = 0) -> Receiver:
    """One rank's end. Raises ``ConfigError`` on an unknown transport."""
    if launch.transport_type == FILES:
        return FileReceiver(wire_dir(run_dir), rank)
    _check_known(launch)
    from prime_rl.wire.sockets import FrameReceiver

    return FrameReceiver(launch, rank)


def _check_known(launch: Launch) -> None:
    if launch.transport_type != SOCKETS:
        raise ConfigError(
            f"rollout_transport.type {launch.transport_type!r} is unknown: expected {FILES!r} or "
            f"{SOCKETS!r}"
        )


def wire_dir(run_dir: Path) -> Path:
    """The folder of the file transport's unread frames."""
    return run_dir / "rollouts_wire"


class FileSender:
    """Writes ``<directory>/step_N/rank_R.bin``. A step's folder appears by one rename."""

    def __init__(self, directory: Path, num_ranks: int, hwm: int) -> None:
        self.directory = directory
        self.num_ranks = num_ranks
        self.hwm = hwm
        directory.mkdir(parents=True, exist_ok=True)

    async def send(self, step: int, frames: Sequence[bytes]) -> None:
        check_num_frames(step, frames, self.num_ranks)
        # Without this limit, an orchestrator that is faster would fill the disk with old batches.
        while self._num_unread() >= self.hwm:
            await asyncio.sleep(POLL_SECONDS)

        # Under another name until it is whole: a reader must not find half of a step.
        unfinished = self.directory / f".step_{step}"
        try:
            unfinished.mkdir(exist_ok=True)
            for rank, frame in enumerate(frames):
                _frame_path(unfinished, rank).write_bytes(sealed(frame))

            # A process of an earlier attempt must not send after the run has started again.
            check_current()
            unfinished.rename(self.directory / f"step_{step}")
        except OSError as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise WireError(
                f"cannot write the micro batches of step {step} to {self.directory}: {error}"
            ) from error

    async def drain(self) -> None:
        while self._num_unread():
            await asyncio.sleep(POLL_SECONDS)

    def _num_unread(self) -> float:
        """Batches that some rank has not read; infinitely many while the disk refuses to say."""
        try:
            steps = _steps(names_in(self.directory))
        except OSError as error:
            poll_failed(self.directory, error)
            return math.inf
        poll_succeeded(self.directory)
        return len(steps)

    async def announced(self, after: int) -> None:
        await asyncio.sleep(2 * POLL_SECONDS)

    def close(self) -> None:
        """Nothing to release."""


class FileReceiver:
    """Reads the frames of one rank, lowest step first, and deletes them."""

    def __init__(self, directory: Path, rank: int) -> None:
        self.directory = directory
        self.rank = rank
        self._last = -1
        """The step that was read last."""
        self._refused_at: float | None = None
        """Since when the disk refuses the next frame."""

    def receive(self, timeout: float) -> memoryview | None:
        deadline = time.monotonic() + timeout
        while True:
            frame = self._look()
            if frame is not None:
                return unsealed(frame)
            if time.monotonic() >= deadline:
                return None
            time.sleep(POLL_SECONDS)

    def _look(self) -> bytes | None:
        """The next frame; None if it is not there yet, or if the disk refuses to say. Raises
        ``WireError`` if that lasts."""
        refused_at = time.monotonic() if self._refused_at is None else self._refused_at
        self._refused_at = None
        for step in _steps(names_seen(self.directory)):
            path = _frame_path(self.directory / f"step_{step}", self.rank)
            if step <= self._last:  # it was read, and the disk refused to remove it
                _remove(path)
                continue

            try:
                frame = path.read_bytes()
            except FileNotFoundError:  # other ranks have not read theirs
                continue
            except OSError as error:
                poll_failed(path, error)
                self._refused_at = refused_at
                if time.monotonic() - refused_at < UNREADABLE_SECONDS:
                    return None
                # The run goes back, and makes the batch again.
                raise WireError(
                    f"{path} cannot be read for {UNREADABLE_SECONDS:.0f} s: {error}"
                ) from error

            poll_succeeded(path)
            self._last = step
            _remove(path)
            return frame

        return None

    def announce(self, version: int) -> None:
        """The version's files are enough."""

    def close(self) -> None:
        """Nothing to release."""


def _steps(names: Sequence[str]) -> list[int]:
    """The steps of a folder's names, in order."""
    return sorted(int(name.removeprefix("step_")) for name in names if name.startswith("step_"))


def _remove(path: Path) -> None:
    """Remove a frame that was read, and its folder if it was the last one there."""
    # What is left is removed at a later look.
    with suppress(OSError):
        path.unlink()
    with suppress(OSError):  # another rank's frame is in it, or it is removed
        path.parent.rmdir()


def _frame_path(step_dir: Path, rank: int) -> Path:
    return step_dir / f"rank_{rank}.bin"
