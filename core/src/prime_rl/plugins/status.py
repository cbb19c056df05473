"""What a process of a run says of itself, as a view reads it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec

STARTING = "starting"
"""State of an engine that has not served yet."""


@dataclass(frozen=True)
class StatusReport:
    """One line of the live view."""

    state: str = STARTING
    """What the process does now, in a few words: ``loading weights``."""
    progress: float | None = None
    """Share done, 0 to 1, of something that takes more than two seconds."""
    waiting_for: str | None = None
    """What the process waits for, if it waits: ``trainer (weights of step 7)``."""
    detail: dict[str, float | str] = field(default_factory=dict)
    """Numbers to show beside the state."""
    pid: int = 0
    time: float = 0.0
    """Seconds since the epoch at which this was written."""


def read_status(path: Path) -> StatusReport | None:
    """The last report in ``path``; None if there is none yet or it cannot be read now (on NFS a
    file that is being replaced may vanish under the reader)."""
    try:
        found = StatusReport(**json.loads(path.read_bytes()))
        return msgspec.convert(asdict(found), StatusReport)  # with values of the right types
    except (OSError, ValueError, TypeError, RecursionError):
        return None
