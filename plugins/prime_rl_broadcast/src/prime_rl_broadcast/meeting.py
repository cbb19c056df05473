"""Where and with whom weights are passed on: what the orchestrator tells trainer and engines.

Importing this brings in no torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from prime_rl import Header as Header
from prime_rl import TensorInfo as TensorInfo
from prime_rl import WeightsError
from prime_rl.rundir.status import replace_text
from prime_rl.weights.versions import MEETING

Backend = Literal["gloo", "nccl"]

MEETINGS = "meetings"
"""Folder in ``broadcasts``."""

_END = "end"
_POLL_SECONDS = 0.005


class Meeting(msgspec.Struct, kw_only=True, frozen=True):
    """One broadcast of one version, as one member attends it."""

    directory: str
    """Its own folder: ``here_RANK`` says who has come, ``end`` that it will not take place."""
    group: str
    """Folder of the process group. Who was in it at the last meeting is still connected."""
    backend: Backend
    rank: int
    """The member's first: an engine of several workers has as many ranks in a row."""
    world_size: int
    """The trainer's rank 0 and all workers of all engines."""
    timeout: float
    """Seconds for all to come, and for each message."""
    loopback: bool
    """All of them are on this machine."""

    def attended_by(self, worker: int) -> Meeting:
        """The same for one worker of an engine."""
        return msgspec.structs.replace(self, rank=self.rank + worker)

    def wait_for_all(self, comes_by: str) -> None:
        """Say that we are here, and wait for the others. Raises ``WeightsError`` if somebody does
        not come, comes in another way, or the orchestrator has called it off."""
        folder, deadline = Path(self.directory), time.monotonic() + self.timeout
        try:
            replace_text(folder / f"here_{self.rank}", comes_by)
            while missing := self._missing(folder):
                if reason := _read(folder / _END):
                    raise WeightsError(f"the broadcast was called off: {reason}")
                if time.monotonic() > deadline:
                    raise WeightsError(
                        f"{folder}: rank {', '.join(map(str, missing))} of {self.world_size} did "
                        f"not come within {self.timeout:g} s (weight_broadcast.timeout)"
                    )
                time.sleep(_POLL_SECONDS)
            for rank in range(self.world_size):
                if (other := (folder / f"here_{rank}").read_text()) != comes_by:
                    raise WeightsError(
                        f"rank {self.rank} of the broadcast comes by {comes_by}; rank {rank} by "
                        f"{other}. Trainer and engines need the same."
                    )
        except OSError as error:
            raise WeightsError(f"{folder}: {error}") from error

    def _missing(self, folder: Path) -> list[int]:
        names = {path.name for path in folder.iterdir()}
        return [rank for rank in range(self.world_size) if f"here_{rank}" not in names]


def backends(on_gpu: bool) -> list[Backend]:
    """What an engine can receive by: its ``receives.backends`` in ``GET /health``."""
    return ["gloo", "nccl"] if on_gpu else ["gloo"]


def call_off(directory: Path, reason: str) -> None:
    """Nobody waits for those that are missing any more."""
    replace_text(directory / _END, reason or "no reason was given")


def invite(directory: Path, meeting: Meeting) -> bool:
    """Tell the trainer where to send the version in ``directory``: ``meeting.json`` holds the
    ``Meeting`` as the trainer attends it. False if the trainer has declined."""
    return _claim(directory / MEETING, msgspec.json.encode(meeting))


def decline(directory: Path) -> bool:
    """As the trainer: wait for no invitation any more. Whether none has come."""
    return _claim(directory / MEETING, b"null")


def invitation(directory: Path) -> Meeting | None:
    """What ``invite`` has left."""
    try:
        return msgspec.json.decode((directory / MEETING).read_bytes(), type=Meeting | None)
    except FileNotFoundError:
        return None


def _claim(path: Path, content: bytes) -> bool:
    """Create a whole file that exists once. False if it is there. Raises ``WeightsError`` if the
    disk refuses."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError as error:
        raise WeightsError(
            f"cannot write {path}, by which the orchestrator and the trainer arrange a broadcast: "
            f"{error}. Free space on the disk of the run directory, then resume the run."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    return True


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


Check = Callable[[Header], str | None]
"""Why a header is refused; None if it is taken."""
