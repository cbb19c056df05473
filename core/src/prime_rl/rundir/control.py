"""The supervisor's record, and a graceful stop.

The record has its process id during a run and, at the end, the outcome. The start time
distinguishes the process from a later one with the same id.

At a graceful stop the run ends with the step that is being trained, and saves its state.

    first signal -> supervisor creates <run>/STOP
                 -> orchestrator: no more rollouts, its part of the checkpoint, a batch without rows
                 -> trainer: finishes the batches it was sent, checkpoint, ``weights/``
                 -> orchestrator: the last step in its status
    second signal -> every process ends at once

The request is a file because every process sees the run directory, on any machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from prime_rl.errors import RunError
from prime_rl.plugins.status import SUPERVISOR, read_status
from prime_rl.rundir.checkpoints import durable, would_repeat
from prime_rl.rundir.polls import poll_failed, poll_succeeded
from prime_rl.rundir.rows import read_table
from prime_rl.rundir.status import DONE, names_in, names_seen, replace_text

RECORD = f"status/{SUPERVISOR}.json"
RUNNING = "running"
FAILED = "failed"
STOPPED = "stopped"


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
    def has_done(cls, run_dir: Path) -> bool:
        """Whether the run ended in order, with every file that it leaves."""
        try:
            record = cls.read(run_dir)
        except RunError:
            return False
        return record is not None and record.state == DONE

    @classmethod
    def read(cls, run_dir: Path) -> Supervisor | None:
        """The run's supervisor, past or present; None if there is no record. Raises ``RunError``
        if the record is damaged."""
        path = run_dir / RECORD
        try:
            record: Supervisor = read_table(path, cls)
        except FileNotFoundError:
            return None
        return record


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


STOP = "STOP"
"""Marker file in the run directory: a stop is requested."""
POLL_SECONDS = 0.1


class Stopped(KeyboardInterrupt):
    """The user has stopped the run gracefully."""

    def __init__(self, step: int | None, trained: bool) -> None:
        """``step``: the last step; None: unknown. ``trained``: this attempt has saved a step."""
        super().__init__()
        self.step = step
        self.trained = trained


class Stop:
    """The supervisor's side of a stop. ``asked``: whether the user wants the run to end."""

    def __init__(
        self, run_dir: Path, first_step: int, asked: Callable[[], bool], tell: Callable[[str], None]
    ) -> None:
        self._run_dir = run_dir
        self._first_step = first_step
        self._asked = asked
        self._tell = tell
        self._is_passed_on = False

    @property
    def is_asked(self) -> bool:
        """Whether the run must end. The first time, this asks the orchestrator to stop; if the disk
        refuses, the next look asks again."""
        if self._asked() and not self._is_passed_on:
            try:
                self._pass_on()
            except OSError as error:
                poll_failed(self._run_dir / STOP, error)
            else:
                poll_succeeded(self._run_dir / STOP)
                self._is_passed_on = True
        return self._asked()

    def _pass_on(self) -> None:
        """Raises ``OSError`` if the file cannot be written."""
        if STOP in names_in(self._run_dir):  # the run ends itself already (``[stop]``)
            return

        (self._run_dir / STOP).touch()
        self._tell("stopping: finishing the step and saving (a second signal ends the run at once)")
        with suppress(OSError):  # the stop does not depend on what can be said of it
            if would_repeat(self._run_dir):
                self._tell(f"after a second signal: {durable(self._run_dir)}")

    @property
    def result(self) -> Stopped | None:
        """The outcome, once the orchestrator is done; None if the run finished all its steps."""
        report = read_status(self._run_dir / "status" / "orchestrator.json")
        if report is None or report.state != DONE or "last_step" not in report.detail:
            return None

        step = int(report.detail["last_step"])
        return Stopped(step, trained=step >= self._first_step)


async def stop_asked(run_dir: Path) -> None:
    while STOP not in names_seen(run_dir):
        await asyncio.sleep(POLL_SECONDS)
