"""Which engines are restarted, how often, and what happens after the limit."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from prime_rl.plugins.launchers import Launcher, Process, ProcessCommand, Task
from prime_rl.plugins.status import EngineFacts, read_status
from prime_rl.rundir.status import ENGINES
from prime_rl_app.attempts import Attempts
from prime_rl_app.children import Pause, ending
from prime_rl_app.scaling import Placing, Scaling

REPLACE_SECONDS = 30.0
"""Until a launcher that found no place for an engine is asked again."""


class EngineRestarts:
    """Restarts each engine that dies or hangs, at most ``limit`` times without a newer version of
    the weights, with growing pauses. The orchestrator reports in a status file that one hangs. One
    that exits before it has served, and is alone, is not restarted: it would fail again."""

    def __init__(
        self,
        launcher: Launcher,
        run_dir: Path,
        limit: int,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        attempts: Attempts | None = None,
        max_lag: int = 0,
    ) -> None:
        """``attempts``: the run, where engines may join, leave and move. ``max_lag``: how many
        versions old rollouts may be when they train."""
        self._launcher = launcher
        self._run_dir = run_dir
        self._clock = clock
        self._attempts = attempts
        self._limit = limit
        self._tell = tell
        self._engines: dict[str, tuple[Task, ProcessCommand]] = {}
        self._used: Counter[str] = Counter()
        self._served: dict[str, int] = {}
        """Newest version of each engine that has served."""
        self._max_lag = max_lag
        self._met: dict[str, int] = {}
        """For each frozen engine, the newest version when it was first seen to run."""
        self._handled: dict[str, int | None] = {}
        """The silence of an engine when it was last restarted or given up."""
        self._scaling = [
            Scaling(each, launcher, run_dir=run_dir, tell=tell) for each in (attempts,) if each
        ]

    def add(self, task: Task, command: ProcessCommand) -> None:
        """How to start an engine, from now on."""
        if task.part == "inference":
            self._engines[task.name] = (task, command)

    def restart(self, processes: list[Process]) -> None:
        """Replace each engine in the list that has died or hangs by a new process. An engine that
        has reached the limit is removed if another engine works; else it stays, so that the caller
        sees its exit code or the orchestrator waits for it."""
        engines = self._facts()
        gone = list[Process]()
        for place, process in [*enumerate(processes)]:
            if process.name not in self._engines:
                continue
            # A frozen engine is not reported. It is restarted too; the run needs it.
            name = process.name
            facts = engines.get(name)
            if isinstance(process, Pause):
                self._met.pop(name, None)
                if isinstance(process, Placing) or self._clock() >= process.until:
                    processes[place] = self._started(process)
                continue

            code = process.exit_code
            if code is None and not self._is_newly_silent(name, facts):
                continue
            limit = self._limit
            others = [each for each in processes if each is not process and each not in gone]
            is_reported = facts is not None or not engines
            if is_reported and not self._has_served(name, facts) and (code or 0) > 0:
                # It would fail again: once more at most, and only if another one works meanwhile.
                another_works = any(self._lives(each) for each in others)
                limit = min(limit, 1) if another_works else 0
            how = f"{name} {'answers nothing' if code is None else ending(code)}"
            if self._used[name] < limit:
                self._used[name] += 1
                self._met.pop(name, None)
                self._tell(f"{how}: starting it again ({self._used[name]} of {limit} times)")
                wait = 2.0 ** (self._used[name] - 1) - 1.0
                if wait:
                    self._launcher.end([process])
                    processes[place] = Pause(process, self._clock() + wait)
                else:
                    processes[place] = self._started(process)
            elif facts is not None and any(self._works(other, engines) for other in others):
                self._tell(f"{how}: going on without it")
                self._launcher.end([process])  # and its remaining children
                gone.append(process)

            self._handled[name] = None if facts is None else facts.silence

        processes[:] = [each for each in processes if each not in gone]
        for each in self._scaling:
            each.look(processes)

    def _started(self, process: Process) -> Process:
        """The engine's next process. A remote launcher may have lost its machine, and is asked for
        its place again, which can take long: ``Placing`` stands in for it."""
        task, command = self._engines[process.name]
        moves = self._attempts is not None and task in (self._attempts.engines or ())
        if self._attempts is None or not moves or not self._launcher.is_remote:
            return self._launcher.start(task, command)
        if not isinstance(process, Placing):
            return Placing(self._launcher, self._run_dir, task=task, tell=self._tell)
        if process.problem is not None:
            self._tell(f"{task.name}: {process.problem}; asking again in {REPLACE_SECONDS:.0f} s")
            return Pause(process, self._clock() + REPLACE_SECONDS)

        return process if process.place is None else self._attempts.join(task, process.place)

    def _facts(self) -> Mapping[str, EngineFacts]:
        """The facts of the policy's engines. An engine that serves a newer version gets its
        restarts back.

        A frozen one serves no version. It gets them back once it has outlived more newer versions
        than there can be without what it answers: batches of older rollouts."""
        report = read_status(self._run_dir / "status" / f"{ENGINES}.json")
        engines = {} if report is None else report.facts.engines
        for name, facts in engines.items():
            if facts.version is not None and facts.version > self._served.get(name, -1):
                self._served[name] = facts.version
                self._used[name] = 0

        newest = None if report is None else report.facts.newest_version
        if newest is None:
            return engines

        for name in self._engines.keys() - engines.keys():
            met = self._met.setdefault(name, newest)
            if newest < met:  # the run went back
                self._met[name] = newest
            elif newest > met + self._max_lag + 1:
                self._used[name] = 0
        return engines

    def _has_served(self, name: str, facts: EngineFacts | None) -> bool:
        return name in self._served or (facts is not None and facts.has_served)

    def _is_newly_silent(self, name: str, facts: EngineFacts | None) -> bool:
        """Whether it answers nothing, and was not restarted for that silence."""
        silence = None if facts is None else facts.silence
        return silence is not None and silence != self._handled.get(name)

    def _works(self, other: Process, engines: Mapping[str, EngineFacts]) -> bool:
        """Whether the run can continue with this engine."""
        facts = engines.get(other.name)
        silent = self._is_newly_silent(other.name, facts)
        return facts is not None and self._lives(other) and not silent

    def _lives(self, other: Process) -> bool:
        running = other.exit_code is None and not isinstance(other, Pause)
        return running and other.name in self._engines
