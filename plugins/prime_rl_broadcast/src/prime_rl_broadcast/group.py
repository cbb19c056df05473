"""The group of one broadcast, which the orchestrator sends to the trainer and the engines.

Importing this imports no torch.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Literal, get_args

import msgspec

from prime_rl import Header as Header
from prime_rl import TensorInfo as TensorInfo
from prime_rl import WeightsError
from prime_rl.rundir.polls import poll_failed, poll_succeeded
from prime_rl.rundir.status import names_seen, replace_text
from prime_rl.weights.versions import MEETING

Backend = Literal["gloo", "nccl", "ipc"]
TRANSPORTS: tuple[Backend, ...] = get_args(Backend)

FOLDER = "meetings"
"""In ``broadcasts``: a folder per broadcast and per process group."""

Check = Callable[[Header], str | None]
"""Returns why a header is refused, or None."""

_END = "end"
_POLL_SECONDS = 0.005


class BroadcastGroup(msgspec.Struct, kw_only=True, frozen=True):
    """The group that broadcasts one version, from the point of view of one member."""

    directory: str
    """Folder of this broadcast: ``here_RANK`` for each member that is ready, ``end`` if it is
    aborted."""
    group: str
    """Folder of the process group. Members of the last broadcast are still connected."""
    backend: Backend
    rank: int
    """The member's first rank: an engine with several workers has as many ranks in a row."""
    world_size: int
    """1 for the trainer's rank 0, plus the workers of all engines."""
    timeout: float
    """Seconds until every member is ready, and for each message."""
    loopback: bool
    """All members are on this machine."""

    def for_worker(self, worker: int) -> BroadcastGroup:
        """The group from the point of view of one worker of this engine."""
        return msgspec.structs.replace(self, rank=self.rank + worker)

    def open(self, directory: Path) -> bool:
        """As the orchestrator: send the group to the trainer, as ``meeting.json`` in the version's
        ``directory``. False if the trainer has declined."""
        return _claim(directory / MEETING, msgspec.json.encode(self))

    def abort(self, reason: str) -> None:
        """Release the members that wait for others. Also in a process whose attempt has been
        replaced: the folder is of this broadcast alone. Raises ``WeightsError``."""
        _claim(Path(self.directory) / _END, (reason or "no reason was given").encode())

    def wait_for_all(self, protocol: str) -> None:
        """Report this member as ready, and wait for the others. Raises ``WeightsError`` if one is
        missing or uses another protocol, or if the broadcast is aborted."""
        folder = Path(self.directory)
        deadline = time.monotonic() + self.timeout
        try:
            replace_text(folder / f"here_{self.rank}", protocol)
            while missing := self._missing(self.check_open()):
                if time.monotonic() > deadline:
                    raise WeightsError(
                        f"{folder}: rank {', '.join(map(str, missing))} of {self.world_size} is "
                        f"not ready after {self.timeout:g} s (weight_broadcast.timeout)"
                    )
                time.sleep(_POLL_SECONDS)

            for rank in range(self.world_size):
                other = (folder / f"here_{rank}").read_text("utf-8")
                if other != protocol:
                    raise WeightsError(
                        f"rank {self.rank} of the broadcast uses {protocol}; rank {rank} uses "
                        f"{other}. Trainer and engines must use the same."
                    )
        except OSError as error:
            raise WeightsError(f"{folder}: {error}") from error

    def check_open(self) -> list[str]:
        """The names in the folder; none while a shared disk refuses to say. Raises
        ``WeightsError`` if the broadcast is aborted, or removed by another attempt."""
        folder = Path(self.directory)
        try:
            names = os.listdir(folder)
        except FileNotFoundError as error:
            raise WeightsError(f"{folder} is gone: another attempt has begun") from error
        except OSError as error:
            poll_failed(folder, error)
            return []
        poll_succeeded(folder)

        if _END in names:
            reason = "its reason cannot be read"
            with suppress(OSError):
                reason = (folder / _END).read_text("utf-8")
            raise WeightsError(f"the broadcast was aborted: {reason}")
        return names

    def _missing(self, names: Collection[str]) -> list[int]:
        return [rank for rank in range(self.world_size) if f"here_{rank}" not in names]


def backends(on_gpu: bool) -> list[Backend]:
    """The ``receives.backends`` of an engine's ``GET /health``."""
    names: list[Backend] = ["gloo"]
    if on_gpu:
        names.append("nccl")
    if sys.platform == "linux":
        names.append("ipc")
    return names


def decline(directory: Path) -> bool:
    """As the trainer: refuse a broadcast of this version. False if a group is open already."""
    return _claim(directory / MEETING, b"null")


def opened(directory: Path) -> BroadcastGroup | None:
    """As the trainer: the group that ``open`` wrote, or None."""
    if MEETING not in names_seen(directory):
        return None
    try:
        meeting = (directory / MEETING).read_bytes()
    except OSError as error:  # the trainer looks again
        poll_failed(directory / MEETING, error)
        return None
    poll_succeeded(directory / MEETING)
    return msgspec.json.decode(meeting, type=BroadcastGroup | None)


def _claim(path: Path, content: bytes) -> bool:
    """Create a file atomically. False if it exists. Raises ``WeightsError`` if writing fails."""
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
