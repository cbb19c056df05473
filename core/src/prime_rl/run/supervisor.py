"""``prime-rl run``: start every process of a run, show what they do, and end them all together.

    model maker (if the model is made here)
    inference engine      HTTP on a free loopback port; admin routes need the run's key
    trainer               receives micro batches, publishes weights
    orchestrator          samples, scores and packs; the run ends when it is done

The launcher starts the processes and chooses their machines. An engine that dies is restarted
(``Restarts``). Any other process that dies ends the run with its name, exit code and last log
lines, and all processes are ended. The first Ctrl-C or SIGTERM stops the run gracefully
(``stop.py``), the second ends it at once.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from prime_rl.config.run import RunConfig
from prime_rl.errors import RunError
from prime_rl.plugins.launchers import Launcher, Process, ProcessCommand, Task
from prime_rl.plugins.manager import load_plugins
from prime_rl.plugins.view import RunView
from prime_rl.run.children import ending, first_signal_asks, sigterm_is_ctrl_c, uninterrupted
from prime_rl.run.commands import Commands, Keys
from prime_rl.run.placement import lay_out, plan
from prime_rl.run.resolve import build_engine, build_launcher
from prime_rl.rundir.checkpoints import Checkpoint, whole_steps
from prime_rl.rundir.control import STOP, Stop
from prime_rl.rundir.status import DONE, ENGINES, HUNG, STARTING, Status, read_status

TICK_SECONDS = 0.25
TRAINER_GRACE = 1800.0
"""Seconds the trainer may take to write the final weights after the orchestrator is done."""


def run(config: RunConfig, view: RunView, checkpoint: Checkpoint | None = None) -> None:
    """Train, from a checkpoint if one is given. Raises ``RunError`` when a process dies,
    ``Stopped`` when the user stops the run, ``KeyboardInterrupt`` when it ends at once."""
    run_dir = view.run_dir
    for left in (STOP, "status/orchestrator.json", "status/trainer.json"):  # by an attempt before
        (run_dir / left).unlink(missing_ok=True)
    first_step = 1 if checkpoint is None else checkpoint.step + 1
    launcher = build_launcher(config, load_plugins(disabled=config.plugins.disabled))
    processes: list[Process] = []

    with sigterm_is_ctrl_c():
        try:
            restarts = Restarts(launcher, run_dir, config.inference.max_restarts, view.print)
            # Extends the list process by process, so a failure ends those that have started.
            processes += _start(config, view, launcher, restarts, checkpoint)
            with first_signal_asks() as asked:
                stop = Stop(run_dir, first_step, asked, view.print)
                _watch(processes, view, restarts.restart, stop)
            if stopped := stop.result:
                if stop.is_asked:
                    raise stopped
                view.print((run_dir / STOP).read_text())  # the run ended itself: [stop]
        finally:
            with uninterrupted():
                _end(launcher, processes)


def _start(
    config: RunConfig,
    view: RunView,
    launcher: Launcher,
    restarts: Restarts,
    checkpoint: Checkpoint | None,
) -> Iterator[Process]:
    """Start all processes at once: they import in parallel and then wait for each other. What the
    launcher waits for is printed, and written to its status."""
    run_dir = view.run_dir
    engine = build_engine(config, load_plugins(disabled=config.plugins.disabled))
    layout = lay_out(config, launcher, engine, checkpoint)
    status = Status(run_dir / "status" / "launcher.json" if launcher.is_remote else None)

    def wait_for(what: str) -> None:
        view.print(f"waiting for {what}")
        status.report("placing", waiting_for=what)

    launch = plan(config, layout, launcher.place(layout.tasks, run_dir, wait_for), checkpoint)
    status.report(DONE)
    launch.write(run_dir)
    seen = run_dir.absolute() if launcher.is_remote else run_dir
    commands = Commands(config, launch, seen, engine, Keys.of_run(config, launcher.is_remote))
    for task in layout.tasks:
        yield restarts.start(task, commands.of(task))


def _end(launcher: Launcher, processes: Sequence[Process]) -> None:
    """End the engines last: their clients would report a failure."""
    try:
        launcher.end([each for each in processes if not _is_of("inference", each)])
        launcher.end([each for each in processes if _is_of("inference", each)])
    finally:
        launcher.close()


def _watch(
    processes: list[Process],
    view: RunView,
    restart: Callable[[list[Process]], None] = lambda processes: None,
    stop: Stop | None = None,
) -> None:
    """Return when the orchestrator and the trainer are done. Raises ``RunError`` if a process that
    is needed dies before, and ``restart`` does not replace it. A stop needs no engines, and no
    trainer if no step was trained."""
    orchestrator = next(each for each in processes if each.name == "orchestrator")
    awaited = [each for each in processes if each is orchestrator or _is_of("trainer", each)]
    deadline: float | None = None
    while any(each.exit_code is None for each in awaited):
        stopping = stop is not None and stop.is_asked
        if not stopping:
            restart(processes)
        for process in awaited if stopping else processes:
            _check_alive(process, view.run_dir)
        if orchestrator.exit_code == 0:
            if stop is not None and (stopped := stop.result) and not stopped.trained:
                return
            deadline = deadline or time.monotonic() + TRAINER_GRACE
            if time.monotonic() > deadline:
                raise RunError(
                    f"the trainer is still busy {TRAINER_GRACE:.0f} s after the last step"
                )
        view.refresh()
        time.sleep(TICK_SECONDS)
    for process in awaited:
        _check_alive(process, view.run_dir)
    view.refresh()


def _is_of(part: str, process: Process) -> bool:
    return process.name.split("_")[0] == part


def _check_alive(process: Process, run_dir: Path) -> None:
    """Raises ``RunError`` if a process has ended without reporting that it is done."""
    code = process.exit_code
    if code is None or (code == 0 and _is_done(process.name, run_dir)):
        return
    how = ending(code) + (" before it was done" if code == 0 else "")
    report = read_status(run_dir / "status" / f"{process.name}.json")
    said = str(report.detail.get("error", "")) if report is not None else ""
    is_fault = said.startswith("plugin ")  # the log has more, but nothing more to the point
    lines = said.splitlines() if is_fault else process.last_lines()
    head = "More is in its log" if is_fault else "The end of its log"
    tail = "\n".join(f"    {line}" for line in lines)
    steps = whole_steps(run_dir)
    resume = f"\n--resume continues from the checkpoint of step {steps[-1]}." if steps else ""
    raise RunError(f"{process.name} {how}. {head} ({process.log}):\n{tail}{resume}")


def _is_done(name: str, run_dir: Path) -> bool:
    """The trainer's first node reports for all nodes."""
    is_other_node = name.startswith("trainer_")
    report = read_status(run_dir / "status" / f"{'trainer' if is_other_node else name}.json")
    return report is not None and (is_other_node or report.state == DONE)


class Restarts:
    """Starts processes, and restarts each engine that dies or hangs, at most ``limit`` times. The
    orchestrator sees that an engine hangs, and reports it in a status file. An engine that has
    never served is not restarted: the same failure would follow."""

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
            # A frozen engine has no state there. It is restarted too; the run needs it.
            name, state = process.name, states.get(process.name, "" if states else STARTING)
            if state == STARTING or (process.exit_code is None and not self._hangs(name, state)):
                continue
            code = process.exit_code
            how = f"{name} {'answers nothing' if code is None else ending(code)}"
            if self._used[name] < self._limit:
                self._used[name] += 1
                count = f"{self._used[name]} of {self._limit} times"
                self._tell(f"{how}: starting it again ({count})")
                processes[processes.index(process)] = self._launcher.start(*self._engines[name])
            elif name in states and any(
                self._works(other, states) for other in processes if other is not process
            ):
                self._tell(f"{how}: going on without it")
                self._launcher.end([process])  # and its remaining children
                processes.remove(process)
            self._handled[name] = state

    def _hangs(self, name: str, state: str) -> bool:
        return state.startswith(HUNG) and state != self._handled.get(name)

    def _works(self, other: Process, states: Mapping[str, str]) -> bool:
        """Whether the run can continue with this engine."""
        hangs = self._hangs(other.name, states.get(other.name, STARTING))
        return other.name in states and other.exit_code is None and not hangs
