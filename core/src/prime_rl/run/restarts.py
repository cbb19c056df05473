"""Engines that die or hang are started again: the run goes on meanwhile with the others, or waits.

Who dies, the supervisor sees. Who hangs, the orchestrator does, as it talks to the engines: it says
so in the status file.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from prime_rl.plugins.launchers import Launcher, Process, ProcessCommand, Task
from prime_rl.run.status import read_status

ENGINES = "engines"
"""Status file in which the orchestrator says of each engine, by its name, how it is."""
STARTING = "starting"
"""What it says of one that has not served yet."""
HUNG = "hung"
"""How what it says of one begins that takes connections and answers nothing. How often that has
happened follows: each time is ended once."""


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
        self._dealt_with: dict[str, str] = {}
        """What was said of an engine when it was last started or given up."""

    def start(self, task: Task, command: ProcessCommand) -> Process:
        """Start a process for the first time."""
        if task.part == "inference":
            self._engines[task.name] = (task, command)
        return self._launcher.start(task, command)

    def mend(self, processes: list[Process]) -> None:
        """Put a new process in the place of each engine that has died or hangs. One that has done
        so too often is taken off the list, if another engine is left; else it stays, for the caller
        to see that it has died, or for the orchestrator to wait for."""
        said = self._what_is_said()
        for process in [each for each in processes if each.name in self._engines]:
            name, how = process.name, said.get(process.name, STARTING)
            if how == STARTING or (process.exit_code is None and not self._hangs(name, how)):
                continue
            if self._used[name] < self._limit:
                self._used[name] += 1
                count = f"{self._used[name]} of {self._limit} times"
                self._tell(f"{name} {_end_of(process)}: starting it again ({count})")
                processes[processes.index(process)] = self._launcher.start(*self._engines[name])
            elif any(self._goes_on(other, said) for other in processes if other is not process):
                self._tell(f"{name} {_end_of(process)}: going on without it")
                self._launcher.end([process])  # what it has left running
                processes.remove(process)
            self._dealt_with[name] = how

    def _hangs(self, name: str, how: str) -> bool:
        return how.startswith(HUNG) and how != self._dealt_with.get(name)

    def _goes_on(self, other: Process, said: Mapping[str, str]) -> bool:
        """Whether it is an engine to go on with."""
        hangs = self._hangs(other.name, said.get(other.name, STARTING))
        return other.name in self._engines and other.exit_code is None and not hangs

    def _what_is_said(self) -> dict[str, str]:
        report = read_status(self._run_dir / "status" / f"{ENGINES}.json")
        return {} if report is None else {name: str(how) for name, how in report.detail.items()}


def _end_of(process: Process) -> str:
    if process.exit_code is None:
        return "answers nothing"
    code = process.exit_code or 0
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
