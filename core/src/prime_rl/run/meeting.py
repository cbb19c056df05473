"""How the supervisor and the machines that join a run meet: small files on the disk they share.

    <run>/places/open.json           the supervisor: which tasks there are; beats while it lives
    <run>/places/MEETING/TASK.claim  an agent took this task; made by exactly one of them
    <run>/places/MEETING/TASK.agent  the agent: its address and ports, then its process; beats too
    <run>/places/MEETING/TASK.order  the supervisor: start (number 1, 2 ...), or end

Each file has one writer and is replaced whole. Nobody compares clocks of two machines: a file beats
by a count, and who reads it measures by its own clock since when the count stands still.
"""

from __future__ import annotations

import hmac
import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from prime_rl.run.status import replace_text

BEAT_SECONDS = 1.0
READS, READ_SECONDS = 5, 0.02
"""How often, and how soon, a file is read again that cannot be read."""
LOST_SECONDS = 60.0
"""Without a beat, after which the other side is taken for dead: a shared disk may stall a while."""

OPEN = "open.json"


@dataclass(frozen=True)
class Open:
    """``open.json``"""

    meeting: str
    """Names this attempt: what an earlier one left behind is not read."""
    tasks: list[dict[str, Any]]
    """Those that machines may join as: the fields of ``Task``."""
    beat: int = 0


@dataclass(frozen=True)
class Agent:
    """``TASK.agent``"""

    address: str
    ports: list[int]
    host: str
    proof: str
    """That it has the run's key, without telling it."""
    order: int = 0
    """The last order to start that it has followed."""
    exit_code: int | None = None
    """Of the process of that order."""
    refused: str = ""
    """Why it does not start anything."""
    beat: int = 0


@dataclass(frozen=True)
class Order:
    """``TASK.order``"""

    start: int = 0
    """How often the task was started so far."""
    end: bool = False
    needs: list[str] = field(default_factory=list)
    """Files that the machine must see."""


Record = TypeVar("Record", Open, Agent, Order)


def places_dir(run_dir: Path) -> Path:
    """Where a run's machines meet."""
    return run_dir / "places"


def read(path: Path, kind: type[Record]) -> Record | None:
    """What a file says now; None if it is not there. One that is being replaced while we look, on
    a full or a distant disk, is looked at again."""
    for last in [False] * (READS - 1) + [True]:
        try:
            return kind(**json.loads(path.read_text()))
        except (FileNotFoundError, NotADirectoryError):
            break
        except (OSError, ValueError):
            if last:
                raise
            time.sleep(READ_SECONDS)
    return None


def write(path: Path, record: Open | Agent | Order) -> None:
    """Replace a file whole; on a full disk too, if it is there already: the beat goes on."""
    replace_text(path, json.dumps(asdict(record)))


def claim(path: Path) -> bool:
    """Take a task; of several that try at once, one gets it."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        return False
    return True


def proof(key: str, meeting: str) -> str:
    """What only who has the run's key can say in this meeting."""
    return hmac.new(key.encode(), meeting.encode(), "sha256").hexdigest()


class Pulse:
    """Tells since when something stands still, by this machine's clock."""

    def __init__(self) -> None:
        self._last: object = None
        self._since = time.monotonic()

    def still_for(self, value: object) -> float:
        """Seconds for which ``value`` has not changed."""
        if value != self._last:
            self._last, self._since = value, time.monotonic()
        return time.monotonic() - self._since
