"""What a process does or waits for, as one small JSON file.

Files rather than a socket: a status survives its process, another terminal can read it, and a
reporter never blocks.
"""

from __future__ import annotations

import json
import logging
import os
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypedDict

import msgspec

from prime_rl.errors import RunError
from prime_rl.plugins.status import StatusReport, read_status
from prime_rl.rundir.attempts import check_current

log = logging.getLogger(__name__)

DONE = "done"
"""The last state of a process that finished its work."""

RANK_GONE = "another rank has ended"
"""Beginning of the error of a trainer that fails because another of its ranks has ended."""

ENGINES = "engines"
"""Name of the status with the orchestrator's state of each engine."""
HUNG = "hung"
"""Prefix of the state of an engine that accepts connections and does not answer. A count follows,
so that each hang is handled once."""


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
        **detail: float | str,
    ) -> None:
        """Replace the report atomically. A failed write is ignored: the process's work matters
        more than its status."""
        self.last = StatusReport(state, progress, waiting_for, detail, os.getpid(), time.time())
        if self.path is not None:
            with suppress(OSError, RunError):
                self.path.parent.mkdir(parents=True, exist_ok=True)  # it may have been removed
                replace_text(self.path, json.dumps(asdict(self.last)))

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
    temporary.write_text(text)
    temporary.replace(path)


def names_in(folder: Path) -> list[str]:
    """What polls for a file lists its folder: for 30 seconds after it found nothing, a client of
    NFS may answer a lookup from its cache. It asks the server when a folder is opened."""
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


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
    return not str(report.waiting_for).startswith(("orchestrator", "engines"))


class HasStep(TypedDict):
    """A line of a file with one line per step; its other keys are anything."""

    step: int


def read_rows(path: Path, shape: Any = HasStep) -> list[dict[str, Any]]:
    """The complete lines of a JSONL file of a run that have a ``shape``, with all their keys; none
    without the file. A line of another shape, which a crash or an editor has left, is logged and
    left out: it must not end a run or hide the others."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return []

    rows = []
    for number, line in enumerate(text[: text.rfind(b"\n") + 1].split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError(f"expected an object, got {type(row).__name__}")
            msgspec.convert(row, shape)
            rows.append(row)
        except (ValueError, RecursionError) as error:
            log.warning("%s, line %d is left out: %s", path, number, error)

    return rows


class Tail:
    """Remembers its position in the file. An incomplete last line is left for the next call. A file
    that was replaced, because the run went back, is read from its start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = self._inode = 0

    def new_lines(self) -> list[bytes]:
        """Complete, non-empty lines written since the last call; none while there is no file."""
        try:
            with self._path.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                if inode != self._inode:
                    self._offset = 0
                    self._inode = inode
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []

        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [line for line in whole.splitlines() if line]
