"""What a process does or waits for, as one small JSON file.

Files rather than a socket: a status survives its process, another terminal can read it, and a
reporter never blocks.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from prime_rl.errors import RunError
from prime_rl.plugins.status import Facts, StatusReport, read_status
from prime_rl.rundir.attempts import check_current
from prime_rl.rundir.polls import poll_failed, poll_succeeded
from prime_rl.rundir.rows import Tail as Tail
from prime_rl.rundir.rows import read_rows as read_rows

DONE = "done"
"""The last state of a process that finished its work."""

ENGINES = "engines"
"""Name of the status with the orchestrator's state of each engine."""


def process_name(part: str, number: int) -> str:
    """Name of a process, its log and its status: ``inference``, then ``inference_1``."""
    return f"{part}_{number}" if number else part


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
        facts: Facts | None = None,
        **detail: float | str,
    ) -> None:
        """Replace the report atomically. A failed write is ignored: the process's work matters
        more than its status."""
        self.last = StatusReport(
            state,
            progress=progress,
            waiting_for=waiting_for,
            detail=detail,
            pid=os.getpid(),
            time=time.time(),
            facts=facts or Facts(),
        )

        if self.path is not None:
            with suppress(OSError, RunError):
                self.path.parent.mkdir(parents=True, exist_ok=True)  # it may have been removed
                replace_text(self.path, self.last.to_json())

    def beat(self) -> None:
        """A sign of life, from the loop that works and not from a thread."""
        if self.path is not None:
            with suppress(OSError):
                os.utime(self.path)


def replace_text(path: Path, text: str) -> None:
    """Replace a small file by an atomic rename: a concurrent reader sees the old text or the new.

    Raises ``OSError`` and leaves the old text if the new one cannot be written, or ``RunError``.
    """
    check_current()

    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, "utf-8")
        temporary.replace(path)
    except OSError:
        with suppress(OSError):  # each process of each attempt would leave one on a full disk
            temporary.unlink()
        raise


def names_in(folder: Path) -> list[str]:
    """What polls for a file lists its folder: for 30 seconds after it found nothing, a client of
    NFS may answer a lookup from its cache. It asks the server when a folder is opened."""
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def names_seen(folder: Path) -> list[str]:
    """``names_in`` for a poll: none while the folder cannot be read."""
    try:
        names = names_in(folder)
    except OSError as error:
        poll_failed(folder, error)
        return []
    poll_succeeded(folder)
    return names


def last_beat(path: Path) -> int | None:
    """When a status was last written or touched (``Status.beat``); None: there is none."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def trainer_works(run_dir: Path) -> bool:
    """Whether the trainer does something, by its own status: trains, loads, writes. Then its limit
    is ``recovery.hang_timeout``, and no other. One that waits for a batch, or for engines to take
    its weights, does not."""
    report = read_status(run_dir / "status" / "trainer.json")
    if report is None or report.state == DONE:
        return False
    return report.facts.waits_for is None
