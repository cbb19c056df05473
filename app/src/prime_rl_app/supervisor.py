"""``prime-rl run``: start every process of a run, show what they do, and end them all together.

    model maker (if the model is made here)
    inference engine      HTTP on a free loopback port; admin routes need the run's key
    trainer               receives micro batches, publishes weights
    orchestrator          samples, scores and packs; the run ends when it is done

The launcher starts the processes and chooses their machines. An engine that dies is restarted
(``restarts.py``). If any other process dies, hangs or is stopped, all but the engines are ended and
start again from the newest checkpoint, as another attempt (``Attempts``). A run that cannot go on
ends with the name, exit code and last log lines of the process. The first Ctrl-C or SIGTERM
stops the run gracefully (``control.py``), the second ends it at once.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace

from prime_rl.errors import ProcessFailed, RunError
from prime_rl.plugins.launchers import Launcher, Place, Process, Task
from prime_rl.plugins.status import read_status
from prime_rl.plugins.view import RunView
from prime_rl.rundir.attempts import PROCESS, kill_left, newest_attempt
from prime_rl.rundir.checkpoints import Checkpoint, whole_steps
from prime_rl.rundir.control import STOP, Stop
from prime_rl.rundir.directory import new_attempt, write_config
from prime_rl.rundir.processes import raise_file_limit
from prime_rl.rundir.status import DONE, RANK_GONE, Status, last_beat
from prime_rl_app import children
from prime_rl_app.children import Child, Pause, ending, first_signal_asks, sigterm_is_ctrl_c
from prime_rl_app.commands import PYTHON, Commands, Keys
from prime_rl_app.placement import engine_url, lay_out, plan
from prime_rl_app.recovery import Recovery
from prime_rl_app.resolve import Resolved
from prime_rl_app.restarts import Restarts
from prime_rl_app.resume import newest, rewind

TICK_SECONDS = 0.25
TRAINER_GRACE = 1800.0
"""Seconds without a sign of life of the trainer, after the orchestrator is done."""
GUARD = "guard"
"""Name of the process that ends what outlives us."""


def run(resolved: Resolved, view: RunView, checkpoint: Checkpoint | None = None) -> None:
    """Train, from a checkpoint if one is given. Raises ``RunError`` when the run cannot go on,
    ``Stopped`` when the user stops the run, ``KeyboardInterrupt`` when it ends at once."""
    raise_file_limit()
    launcher = resolved.launcher
    recovery = Recovery(resolved.config, view)
    attempts = Attempts(resolved, view)
    restarts = recovery.engines(attempts, launcher)
    attempts.restarts = restarts
    guard = Guard(view)

    def tend(processes: list[Process]) -> None:
        guard.keep()
        restarts.restart(processes)

    with sigterm_is_ctrl_c():
        try:
            attempts.start(checkpoint)
            with first_signal_asks() as asked:
                while True:
                    first_step = 1 if checkpoint is None else checkpoint.step + 1
                    stop = Stop(view.run_dir, first_step, asked, view.print)
                    look = recovery.watch()
                    try:
                        _watch(attempts.processes, view, stop, look, tend)
                        break
                    except ProcessFailed as failure:
                        if stop.is_asked:
                            raise
                        recovery.allow(failure, first_step)
                        checkpoint = attempts.go_back()
                        attempts.start(checkpoint)
            stopped = stop.result
            if stopped:
                if stop.is_asked:
                    raise stopped
                view.print((view.run_dir / STOP).read_text())  # the run ended itself: [stop]
        finally:
            with children.uninterrupted():
                _end(launcher, attempts.processes)
                kill_left(view.run_dir, {GUARD})
                children.end([guard.child], grace=0.0)


class Guard:
    """Has the process that ends what outlives us run as long as we do."""

    def __init__(self, view: RunView) -> None:
        self._view = view
        self.child = self._start()

    def keep(self) -> None:
        """Start another one if it has ended."""
        code = self.child.exit_code
        if code is not None:
            self._view.print(f"the {GUARD} {ending(code)}: starting another one")
            self.child = self._start()

    def _start(self) -> Child:
        run_dir = self._view.run_dir
        command = [*PYTHON, "prime_rl.rundir.attempts", str(run_dir)]
        named = {PROCESS: f"{newest_attempt(run_dir)}:{GUARD}:{run_dir.resolve()}"}
        return children.start(GUARD, command, named, Path(os.devnull))


class Attempts:
    """The processes of a run. Its engines serve one attempt after the other."""

    def __init__(self, resolved: Resolved, view: RunView) -> None:
        self._resolved = resolved
        self._config = resolved.config
        self._view = view
        self._launcher = resolved.launcher
        self._run_dir = view.run_dir
        self._places: dict[str, Place] = {}
        self._keys = Keys.of_run(self._config, self._launcher.is_remote)
        self.restarts: Restarts | None = None
        """Learns how each engine is started."""
        self.engines: tuple[Task, ...] | None = None
        """The policy's, some of which have joined since the start; None before it."""
        self.processes: list[Process] = []

    def start(self, checkpoint: Checkpoint | None) -> None:
        """Start at once all processes that do not run: they import in parallel and then wait for
        each other. What the launcher waits for is printed, and written to its status."""
        launcher = self._launcher
        run_dir = self._run_dir
        reports = [f"status/{name}.json" for name in ("model", "orchestrator", "trainer")]
        agents = (run_dir / "status").glob("trainer_*.json")
        # Of the attempt before: they say that it was done, or why it failed.
        for left in (run_dir / STOP, *(run_dir / report for report in reports), *agents):
            left.unlink(missing_ok=True)
        layout = lay_out(self._resolved, checkpoint, self.engines)
        self.engines = layout.engines
        self.layout = layout
        status = Status(run_dir / "status" / "launcher.json" if launcher.is_remote else None)

        def wait_for(what: str) -> None:
            self._view.print(f"waiting for {what}")
            status.report("placing", waiting_for=what)

        kept = {process.name for process in self.processes}
        new = [task for task in layout.tasks if task.name not in kept]
        self._places |= launcher.place(new, run_dir, wait_for)
        launch = plan(self._resolved, layout, self._places, checkpoint, engines_kept=bool(kept))
        status.report(DONE)
        launch.write(run_dir)
        seen = run_dir.absolute() if launcher.is_remote else run_dir
        self.commands = Commands(self._config, launch, seen, self._resolved.engine, self._keys)
        for task in layout.tasks:
            command = self.commands.of(task)
            if self.restarts is not None:
                self.restarts.add(task, command)
            if task in new:  # one by one, so that a failure ends those that have started
                self.processes.append(launcher.start(task, command))

    def join(self, task: Task, place: Place) -> Process:
        """Start an engine that joins the run, or returns at another place."""
        others = [each for each in self.engines or () if each.name != task.name]
        self.engines = (*others, task)
        self._places[task.name] = place
        self.announce()
        command = self.commands.of(task)
        if self.restarts is not None:
            self.restarts.add(task, command)
        return self._launcher.start(task, command)

    def announce(self, elsewhere: Sequence[str] = ()) -> None:
        """Tell the orchestrator where the policy's engines are now: the run's, else those that the
        user runs."""
        names = [task.name for task in self.engines or ()]
        own = [engine_url(self._config, e, self._places[e.name]) for e in self.engines or ()]
        launch = self.commands.launch
        launch = replace(launch, engine_urls=[*own, *elsewhere], engine_names=names)
        launch.write(self._run_dir)
        self.commands = dataclasses.replace(self.commands, launch=launch)

    def go_back(self) -> Checkpoint | None:
        """End what does not serve the next attempt, and drop what followed the newest checkpoint,
        which is returned; None: there is none."""
        new_attempt(self._run_dir)  # from here on the old processes write nothing
        keep = "" if self._config.deployment.colocated else "inference"
        running = [each for each in self.processes if not isinstance(each, Pause)]
        self._launcher.end([each for each in running if not _is_of(keep, each)])
        self.processes[:] = [each for each in self.processes if _is_of(keep, each)]
        kept = {GUARD, *(process.name for process in self.processes)}
        kill_left(self._run_dir, kept)
        checkpoint, damaged = newest(self._run_dir)
        for line in damaged:
            self._view.print(line)
        rewind(self._run_dir, 0 if checkpoint is None else checkpoint.step, kept)
        write_config(self._run_dir, self._config)
        return checkpoint


def _end(launcher: Launcher, processes: Sequence[Process]) -> None:
    """End the engines last: their clients would report a failure."""
    running = [each for each in processes if not isinstance(each, Pause)]
    try:
        launcher.end([each for each in running if not _is_of("inference", each)])
        launcher.end([each for each in running if _is_of("inference", each)])
    finally:
        launcher.close()


def _nothing(processes: list[Process]) -> None:
    """Without recovery."""


def _watch(
    processes: list[Process],
    view: RunView,
    stop: Stop | None = None,
    look: Callable[[list[Process]], tuple[Process, str] | None] = _nothing,
    restart: Callable[[list[Process]], None] = _nothing,
) -> None:
    """Return when the orchestrator and the trainer are done. Raises ``RunError`` if a process that
    is needed dies or hangs before, and ``restart`` does not replace it. A stop needs no engines,
    and no trainer if no step was trained."""
    orchestrator = next(each for each in processes if each.name == "orchestrator")
    awaited = [each for each in processes if each is orchestrator or _is_of("trainer", each)]
    beat: int | None = None
    deadline = 0.0
    while any(each.exit_code is None for each in awaited):
        stopping = stop is not None and stop.is_asked
        found = look(processes)
        if found:
            process, why = found
            if isinstance(process, Child):
                process.kill()
            if not _is_of("inference", process):
                raise _failed(process, view.run_dir, why)

        if not stopping:
            restart(processes)
        for process in awaited if stopping else processes:
            _check_alive(process, view.run_dir)
        if orchestrator.exit_code == 0:
            if stop is not None and (stopped := stop.result) and not stopped.trained:
                return
            newest = last_beat(view.run_dir / "status" / "trainer.json")
            if newest != beat or not deadline:
                beat = newest
                deadline = time.monotonic() + TRAINER_GRACE
            if time.monotonic() > deadline:
                why = f"the trainer is still busy {TRAINER_GRACE:.0f} s after the last step"
                why += ", and has given no sign of life since"
                raise ProcessFailed(why, "trainer", why)

        view.refresh()
        time.sleep(TICK_SECONDS)

    for process in awaited:
        _check_alive(process, view.run_dir)
    view.refresh()


def _is_of(part: str, process: Process) -> bool:
    return process.name.split("_")[0] == part


def _check_alive(process: Process, run_dir: Path) -> None:
    """Raises ``RunError`` if an engine has ended, ``ProcessFailed`` if another process failed."""
    code = process.exit_code
    if code is None:
        return
    how = ending(code)
    if code == 0:
        report = read_status(run_dir / "status" / f"{process.name}.json")
        # The trainer's other nodes have no status: the first reports for all of them.
        speaks = process.name in ("model", "trainer", "orchestrator")
        is_done = report.state == DONE if report is not None else not speaks
        if is_done and not _is_of("inference", process):  # an engine is never done
            return
        how += " before it was done"

    raise _failed(process, run_dir, how)


def _failed(process: Process, run_dir: Path, how: str) -> RunError:
    report = read_status(run_dir / "status" / f"{process.name}.json")
    said = str(report.detail.get("error", "")) if report is not None else ""
    is_fault = said.startswith("plugin ")  # the log has more, but nothing more to the point
    lines = said.splitlines() if is_fault else process.last_lines()
    head = "More is in its log" if is_fault else "The end of its log"
    tail = "\n".join(f"    {line}" for line in lines)
    steps = whole_steps(run_dir)
    resume = f"\n--resume continues from the checkpoint of step {steps[-1]}." if steps else ""
    text = f"{process.name} {how}. {head} ({process.log}):\n{tail}{resume}"
    if _is_of("inference", process):
        return RunError(text)
    own = "" if said.startswith(RANK_GONE) else said
    detail = own or next(reversed(lines), "") if process.exit_code == 1 else ""
    cause = f"{process.name} {how}" + (f": {detail}" if detail else "")
    return ProcessFailed(text, process.name, cause.splitlines()[0], reported=bool(own))
