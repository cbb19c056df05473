"""The supervisor's record: its process id during a run and, at the end, the outcome.

The start time distinguishes the process from a later one with the same id.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from prime_rl.rundir.status import replace_text

RECORD = "status/supervisor.json"
RUNNING, DONE, FAILED, STOPPED = "running", "done", "failed", "stopped"


@dataclass(frozen=True)
class Supervisor:
    """``status/supervisor.json``"""

    pid: int
    host: str
    started: float | None
    """Seconds from the machine's boot to the process's start, see ``start_of``."""
    state: str = RUNNING

    @property
    def is_alive(self) -> bool:
        """Whether the process runs now, on this machine."""
        here = self.host == socket.gethostname()
        return here and self.started is not None and self.started == start_of(self.pid)

    def write(self, run_dir: Path) -> None:
        (run_dir / "status").mkdir(parents=True, exist_ok=True)
        replace_text(run_dir / RECORD, json.dumps(asdict(self)))

    @classmethod
    def read(cls, run_dir: Path) -> Supervisor | None:
        """The run's supervisor, past or present; None if there is no record."""
        try:
            return cls(**json.loads((run_dir / RECORD).read_text()))
        except (FileNotFoundError, json.JSONDecodeError, TypeError):
            return None


@contextmanager
def supervised(run_dir: Path) -> Iterator[None]:
    """Record this process as the supervisor during a run, and the outcome at the end."""
    record = Supervisor(os.getpid(), socket.gethostname(), start_of(os.getpid()))
    record.write(run_dir)
    state = FAILED
    try:
        yield
        state = DONE
    except KeyboardInterrupt:
        state = STOPPED
        raise
    finally:
        with suppress(OSError):  # must not hide the error that ended the run
            replace(record, state=state).write(run_dir)


def start_of(pid: int) -> float | None:
    """When a process started, in seconds since boot; None if no process with this id runs.

    A zombie does not run. Seconds since the epoch would change whenever the clock is set.
    """
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return round(float(process.create_time() - psutil.boot_time()), 2)
    except psutil.NoSuchProcess:
        return None
