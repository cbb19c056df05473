"""What a process is doing or waiting for, as one small JSON file that anybody may read.

Files rather than a socket: a status survives its process, another terminal can read it, and a
reporter never blocks.
"""

from __future__ import annotations

import json
import os
import time
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
        """Replace the report atomically: a reader sees the old one or the new one, whole."""
        self.last = StatusReport(state, progress, waiting_for, detail, os.getpid(), time.time())
        if self.path is None:
            return
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(asdict(self.last)))
        temporary.replace(self.path)


def read_status(path: Path) -> StatusReport | None:
    """The last report in ``path``, or None if its process has not written one yet."""
    try:
        return StatusReport(**json.loads(path.read_text()))
    except (FileNotFoundError, json.JSONDecodeError, TypeError):
        return None
