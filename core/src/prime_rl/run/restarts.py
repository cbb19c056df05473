"""Restart engines that die or hang. Meanwhile the run continues with the other engines, or waits.

The supervisor sees that an engine has died. The orchestrator sees that an engine hangs, and reports
it in a status file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from prime_rl.plugins.launchers import Launcher, Process, ProcessCommand, Task
from prime_rl.run.children import ending
from prime_rl.rundir.status import ENGINES, HUNG, STARTING, read_status


class Restarts:
    """Starts processes, and restarts each engine at most ``limit`` times. An engine that has never
    served is not restarted: the same failure would follow."""

    def __init__(
        self, launcher: Launcher, run_dir: Path, limit: int, tell: Callable[[str], None]
    ) -> None:
        self._launcher, self._run_dir = launcher, run_dir
        self._limit, self._tell = limit, tell
        self._engines: dict[str, tuple[Task, ProcessCommand]] = {}
        self._used: Counter[str] = Counter()
        self._handled: dict[str, str] = {}
        """State of an engine when it was last restarted or given up."""

    def start(self, task: Task, command: ProcessCommand) -> Process:
        if task.part == "inference":
            self._engines[task.name] = (task, command)
        return self._launcher.start(task, command)

    def restart(self, processes: list[Process]) -> None:
        """Replace each engine in the list that has died or hangs by a new process. An engine that
        has reached the limit is removed if another engine works; else it stays, so that the caller
        sees its exit code or the orchestrator waits for it."""
        report = read_status(self._run_dir / "status" / f"{ENGINES}.json")
        states = {} if report is None else {n: str(state) for n, state in report.detail.items()}
        for process in [each for each in processes if each.name in self._engines]:
            name, state = process.name, states.get(process.name, STARTING)
            if state == STARTING or (process.exit_code is None and not self._hangs(name, state)):
                continue
            code = process.exit_code
            how = f"{name} {'answers nothing' if code is None else ending(code)}"
            if self._used[name] < self._limit:
                self._used[name] += 1
                count = f"{self._used[name]} of {self._limit} times"
                self._tell(f"{how}: starting it again ({count})")
                processes[processes.index(process)] = self._launcher.start(*self._engines[name])
            elif any(self._works(other, states) for other in processes if other is not process):
                self._tell(f"{how}: going on without it")
                self._launcher.end([process])  # and its remaining children
                processes.remove(process)
            self._handled[name] = state

    def _hangs(self, name: str, state: str) -> bool:
        return state.startswith(HUNG) and state != self._handled.get(name)

    def _works(self, other: Process, states: Mapping[str, str]) -> bool:
        """Whether the run can continue with this engine."""
        hangs = self._hangs(other.name, states.get(other.name, STARTING))
        return other.name in self._engines and other.exit_code is None and not hangs
