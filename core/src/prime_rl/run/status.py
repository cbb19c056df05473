"""What a process is doing or waiting for, as one small JSON file that anybody may read.

Files rather than a socket: a status survives its process, another terminal can read it, and a
reporter never blocks.
"""

from __future__ import annotations

import errno
import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

DONE = "done"
"""The last state of a process that did all it was there for."""


@dataclass(frozen=True)
class StatusReport:
    """One line of the live view."""

    state: str = "starting"
    """What the process does now, in a few words: ``loading weights``."""
    progress: float | None = None
    """Share done, 0 to 1, of something that takes more than two seconds."""
    waiting_for: str | None = None
    """Whom or what it waits for, if it waits: ``trainer (weights of step 7)``."""
    detail: dict[str, float | str] = field(default_factory=dict)
    """Numbers worth showing beside it."""
    pid: int = 0
    time: float = 0.0
    """Seconds since the epoch at which this was written."""


class Status:
    """Writes one process's report; ``Status(None)`` writes nothing."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.last = StatusReport()

    def report(
        self,
        state: str,
        *,
        progress: float | None = None,
        waiting_for: str | None = None,
        **detail: float | str,
    ) -> None:
        """Replace the report atomically: a reader sees the old one or the new one, whole.

        Never fails: what a process does matters more than what it says.
        """
        self.last = StatusReport(state, progress, waiting_for, detail, os.getpid(), time.time())
        if self.path is not None:
            with suppress(OSError):
                replace_text(self.path, json.dumps(asdict(self.last)))


def replace_text(path: Path, text: str) -> None:
    """Replace a small file whole. Raises ``OSError``.

    On a full disk the text goes where the file's bytes lie, for which there is room, so that it can
    still be said what everybody waits for. Spaces fill what it leaves of them, and it is written
    in one call: who reads at that very instant may see half of each, who reads again does not.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not path.exists():
            raise
        temporary.unlink(missing_ok=True)
        _write_over(path, text.encode(), error)


def _write_over(path: Path, data: bytes, refused: OSError) -> None:
    """Raises ``refused`` if ``data`` needs more room than there is, and leaves what was there."""
    before = path.read_bytes()
    file = os.open(path, os.O_WRONLY)
    try:
        if os.pwrite(file, data.ljust(len(before)), 0) < len(data):
            os.pwrite(file, before, 0)
            os.ftruncate(file, len(before))
            raise refused
    finally:
        os.close(file)


def read_status(path: Path) -> StatusReport | None:
    """The last report in ``path``, or None if its process has not written one yet, or it cannot be
    read just now (a disk of several machines may take a file away that is being replaced)."""
    try:
        return StatusReport(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None
