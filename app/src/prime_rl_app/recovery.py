"""A run goes on after the death of a process: what counts as one, and whether to start again.

a process exits, is stopped, or gives no sign of life -> ``ProcessFailed``
-> ``Recovery.allow``: start again, or end the run with the cause
-> the supervisor ends trainer and orchestrator, and resumes the newest checkpoint
"""

from __future__ import annotations

import json
import os
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from prime_rl.config.run import RecoveryConfig, RunConfig
from prime_rl.errors import ProcessFailed
from prime_rl.plugins.launchers import Launcher, Process
from prime_rl.plugins.status import read_status
from prime_rl.plugins.view import RunView
from prime_rl.rundir.checkpoints import CHECKSUMS, finished, last_trained, whole_steps
from prime_rl.rundir.directory import log_dir
from prime_rl.rundir.status import ENGINES, last_beat
from prime_rl.weights.versions import newest_version
from prime_rl_app.attempts import Attempts
from prime_rl_app.children import Child
from prime_rl_app.logs import LogLimit
from prime_rl_app.restarts import EngineRestarts

LOG = "recoveries.jsonl"
"""File in the run directory: one line per restart, of all attempts."""
LONGEST_WAIT = 60.0
LOOK_SECONDS = 1.0
MOVED_MIB = 64
"""What a process has read or written meanwhile is a sign of life: it loads or saves a model, in one
call that cannot beat. Heartbeats of sockets and lines of a log are much less."""
MOST_SECONDS = 5.0
"""What one look may add: the supervisor itself may have been stopped."""


class Recovery:
    """Counts failures, and decides whether the run goes on. Keeps its logs small."""

    def __init__(
        self, config: RunConfig, view: RunView, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._run_dir = view.run_dir
        self._tell = view.print
        self._sleep = sleep
        self._config = config.recovery
        self._max_restarts = config.inference.max_restarts
        self._max_lag = config.orchestrator.max_off_policy_steps
        # The supervisor drops us when the processes of the run have ended.
        weakref.finalize(self, LogLimit(view.run_dir, config.log.max_mib).close)
        self._furthest = self._used = 0
        self._last: tuple[str, int] | None = None
        self._began = time.time()

    def watch(self) -> Callable[[Sequence[Process]], tuple[Process, str] | None]:
        """An attempt begins: what looks for processes that count as dead."""
        return Liveness(self._run_dir, self._config).look

    def engines(self, attempts: Attempts, launcher: Launcher) -> EngineRestarts:
        """What restarts the engines of the run, and lets others join and leave."""
        return EngineRestarts(
            launcher,
            self._run_dir,
            limit=self._max_restarts,
            tell=self._tell,
            attempts=attempts,
            max_lag=self._max_lag,
        )

    def allow(self, failure: ProcessFailed, first_step: int) -> None:
        """Return after a pause if the run is to be started again. Raises ``failure`` if it came
        before the first attempt had trained anything and the process said why, if it came twice at
        the same step, if the restarts are used up without progress, or if the disk is full."""
        step = last_trained(self._run_dir)
        if step > self._furthest:
            self._furthest = step
            self._used = 0

        begins = self._last is None and step < first_step
        same = (failure.cause, step) == self._last
        if (failure.reported and (begins or same)) or self._used >= self._config.max_restarts:
            raise failure
        self._last = failure.cause, step
        since = self._began
        where = "the start"
        with suppress(OSError):  # that is for the message alone
            for newest in whole_steps(self._run_dir)[-1:]:
                mark = finished(self._run_dir, newest).directory / CHECKSUMS
                since = max(since, mark.stat().st_mtime)
                where = f"step {newest}"

        lost = max(0.0, time.time() - since)
        line = {"time": time.time(), "cause": failure.cause, "step": step, "lost_seconds": lost}
        path = self._run_dir / LOG
        size = None
        try:
            with path.open("a", encoding="utf-8") as file:
                size = file.tell()
                file.write(json.dumps({"attempt": log_dir(self._run_dir).name, **line}) + "\n")
        except OSError as error:  # a full disk: another attempt could not write either
            with suppress(OSError):  # the next line must not continue a torn one
                if size is not None:
                    os.truncate(path, size)
            raise failure from error

        self._tell(
            f"{failure.cause.removesuffix('.')}, after step {step}: starting again from {where} "
            f"({self._used + 1} of {self._config.max_restarts} times; {lost:.0f} s are repeated)"
        )
        self._sleep(min(2.0**self._used - 1.0, LONGEST_WAIT))
        self._used += 1
        self._began = time.time()


def bytes_moved(process: Process) -> int:
    """Bytes that a process on this machine, or the trainer's ranks, have read and written; 0 if
    unknown."""
    total = 0
    if isinstance(process, Child):
        with suppress(psutil.Error, AttributeError):  # macOS counts none
            parent = psutil.Process(process.process.pid)
            ranks = parent.children() if process.name.startswith("trainer") else []
            for each in (parent, *ranks):
                count = each.io_counters()
                # The first two count calls, the others what the disk did: pages of mapped files.
                total += count.read_chars + count.write_chars
                total += count.read_bytes + count.write_bytes

    return total


class Liveness:
    """Finds processes that run and do nothing: stopped ones on this machine, and those that give no
    sign of life: their loop does not (``Status.beat``), and they read and write nothing. Time
    counts only while we look."""

    def __init__(
        self, run_dir: Path, config: RecoveryConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._run_dir = run_dir
        self._config = config
        self._clock = clock
        self._looked = clock()
        self._stopped: dict[int, float] = {}
        self._silent: dict[str, tuple[int, int, float]] = {}
        """For each process: its last beat, the bytes it had moved when they last were a sign of
        life, and the seconds since the last sign."""
        self._lost = 0.0

    def look(self, processes: Sequence[Process]) -> tuple[Process, str] | None:
        """A process that counts as dead, and why; None while all are well. Looks once a second."""
        passed = self._clock() - self._looked
        if passed < LOOK_SECONDS:
            return None
        self._looked = self._clock()
        passed = min(passed, MOST_SECONDS)
        for process in processes:
            why = "" if process.exit_code is not None else self._is_stopped(process, passed)
            why = why or self._is_silent(process, passed) or self._waits_in_vain(process, passed)
            if why:
                return process, why

        return None

    def _is_stopped(self, process: Process, passed: float) -> str:
        if not isinstance(process, Child):
            return ""
        with suppress(psutil.Error):
            child = psutil.Process(process.process.pid)
            ranks = child.children() if process.name.startswith("trainer") else []
            for each in (child, *ranks):
                stopped = each.status() == psutil.STATUS_STOPPED
                self._stopped[each.pid] = (
                    self._stopped.get(each.pid, 0.0) + passed if stopped else 0
                )
                if self._stopped[each.pid] > self._config.stopped_timeout:
                    limit = f"{self._config.stopped_timeout:g} s (recovery.stopped_timeout)"
                    return f"has been stopped for {limit}: process {each.pid}"

        return ""

    def _waits_in_vain(self, process: Process, passed: float) -> str:
        """Trainer and orchestrator wait for each other if weights vanish before an engine loads
        them. Only weights that this trainer has announced can vanish: those that are absent and
        were not announced are being written."""
        if process.name != "trainer":
            return ""
        version = self._unread_version()
        broadcasts = self._run_dir / "broadcasts"
        newest = newest_version(broadcasts)
        is_lost = version is not None and (newest is None or newest < version)
        self._lost = self._lost + passed if is_lost else 0.0
        if self._lost <= self._config.lost_timeout:
            return ""
        limit = f"for {self._config.lost_timeout:g} s (recovery.lost_timeout)"
        return (
            f"waits for the next batch, and the weights of step {version} that it announced are "
            f"gone {limit} before an engine has loaded them: {broadcasts / f'step_{version}'}"
        )

    def _unread_version(self) -> int | None:
        """The version that the trainer has announced and no engine has loaded, while the trainer
        waits for a batch; None if there is none, or if nothing says so."""
        trainer = read_status(self._run_dir / "status" / "trainer.json")
        engines = read_status(self._run_dir / "status" / f"{ENGINES}.json")
        if trainer is None or engines is None:
            return None
        served = engines.facts.newest_version
        if trainer.facts.waits_for != "orchestrator" or served is None:
            return None
        announced = int(trainer.detail.get("announced", -1))
        return announced if served < announced else None

    def _is_silent(self, process: Process, passed: float) -> str:
        """Engines are watched by the orchestrator."""
        if process.name not in ("orchestrator", "trainer"):
            return ""
        path = self._run_dir / "status" / f"{process.name}.json"
        beat = last_beat(path)
        if beat is None:
            return ""
        before, num_bytes, silent = self._silent.get(process.name, (beat, 0, 0.0))
        silent = silent + passed if beat == before else 0.0
        if silent > self._config.hang_timeout / 2:  # not at each look: it walks /proc
            moved = bytes_moved(process)
            if moved - num_bytes >= MOVED_MIB << 20:
                num_bytes = moved
                silent = 0.0

        self._silent[process.name] = beat, num_bytes, silent
        if silent <= self._config.hang_timeout:
            return ""
        report = read_status(path)
        does = "" if report is None else f": {report.state}, waiting for {report.waiting_for}"
        limit = f"{self._config.hang_timeout:g} s (recovery.hang_timeout)"
        return f"has given no sign of life for {limit}{does}"
