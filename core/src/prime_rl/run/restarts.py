"""Engines that die are started again: the run goes on meanwhile with the others, or waits."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from prime_rl.plugins.launchers import Launcher, Process, ProcessCommand, Task
from prime_rl.run.status import read_status

ENGINES = "engines"
"""Status file in which the orchestrator says of each engine, by its name, how it is."""
STARTING = "starting"
"""What it says of one that has not served yet."""


def engine_names(number: int) -> list[str]:
    """Of the processes that are a run's engines; also of their logs and status files."""
    return ["inference" if place == 0 else f"inference_{place}" for place in range(number)]


class Restarts:
    """Starts processes, and engines again: each ``limit`` times at most, and only one that has
    served before. One that cannot even start has a fault that starting will not mend."""

    def __init__(
        self, launcher: Launcher, run_dir: Path, limit: int, tell: Callable[[str], None]
    ) -> None:
        self._launcher, self._run_dir = launcher, run_dir
        self._limit, self._tell = limit, tell
        self._engines: dict[str, tuple[Task, ProcessCommand]] = {}
        self._used: Counter[str] = Counter()

    def start(self, task: Task, command: ProcessCommand) -> Process:
        """Start a process for the first time."""
        if task.part == "inference":
            self._engines[task.name] = (task, command)
        return self._launcher.start(task, command)

    def mend(self, processes: list[Process]) -> None:
        """Put a new process in the place of each engine that has died. One that has died too often
        is taken off the list, if another engine is left; else it stays, for the caller to see."""
        for process in list(processes):
            name = process.name
            if process.exit_code is None or name not in self._engines or not self._served(name):
                continue
            if self._used[name] < self._limit:
                self._used[name] += 1
                count = f"{self._used[name]} of {self._limit} times"
                self._tell(f"{name} {_end_of(process)}: starting it again ({count})")
                processes[processes.index(process)] = self._launcher.start(*self._engines[name])
            elif any(p.name in self._engines and p.exit_code is None for p in processes):
                self._tell(f"{name} {_end_of(process)}: going on without it")
                self._launcher.end([process])  # what it has left running
                processes.remove(process)

    def _served(self, name: str) -> bool:
        report = read_status(self._run_dir / "status" / f"{ENGINES}.json")
        return report is not None and report.detail.get(name, STARTING) != STARTING


def _end_of(process: Process) -> str:
    code = process.exit_code or 0
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
