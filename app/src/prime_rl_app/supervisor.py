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

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from prime_rl.errors import ProcessFailed, RunError
from prime_rl.plugins.launchers import Launcher, Process
from prime_rl.plugins.status import read_status
from prime_rl.plugins.view import RunView
from prime_rl.rundir.attempts import PROCESS, kill_left, newest_attempt
from prime_rl.rundir.checkpoints import Checkpoint, whole_steps
from prime_rl.rundir.control import STOP, Stop
from prime_rl.rundir.processes import raise_file_limit
from prime_rl.rundir.status import DONE, last_beat
from prime_rl_app import children
from prime_rl_app.attempts import GUARD, Attempts, is_of
from prime_rl_app.children import Child, Pause, ending, first_signal_asks, sigterm_is_ctrl_c
from prime_rl_app.commands import PYTHON
from prime_rl_app.recovery import MOVED_MIB, Recovery, bytes_moved
from prime_rl_app.resolve import Resolved
from prime_rl_app.run_states import full_disk

TICK_SECONDS = 0.25
TRAINER_GRACE = 1800.0
"""Seconds without a sign of life of the trainer, after the orchestrator is done: it does not beat,
and it reads and writes nothing."""


def run(resolved: Resolved, view: RunView, checkpoint: Checkpoint | None = None) -> None:
    """Train, from a checkpoint if one is given. Raises ``RunError`` when the run cannot go on,
    ``Stopped`` when the user stops the run, ``KeyboardInterrupt`` when it ends at once."""
    raise_file_limit()
    launcher = resolved.launcher
    recovery = Recovery(resolved.config, view)
    attempts = Attempts(resolved, view)
    restarts = recovery.engines(attempts, launcher)
    attempts.commanded = restarts.add
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
                    stop = Stop(view.run_dir, first_step, asked=asked, tell=view.print)
                    look = recovery.watch()
                    try:
                        _watch(attempts.processes, view, stop=stop, look=look, restart=tend)
                        break
                    except ProcessFailed as failure:
                        if stop.is_asked:
                            raise
                        recovery.allow(failure, first_step)
                        try:
                            checkpoint = attempts.go_back()
                            attempts.start(checkpoint)
                        except OSError as error:
                            raise RunError(
                                f"{failure}\nThe run cannot start again: {error}. When the disk "
                                "takes files again, `prime-rl run --resume auto` continues."
                            ) from error
            stopped = stop.result
            if stopped:
                if stop.is_asked:
                    raise stopped
                view.print((view.run_dir / STOP).read_text("utf-8"))  # the run ended itself: [stop]
        finally:
            with children.uninterrupted():
                _end(launcher, attempts.processes)
                kill_left(view.run_dir, {GUARD})
                children.end([guard.child], grace=0.0)


class Guard:
    """Keeps a process running that ends our children if they outlive us."""

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
        return children.start(GUARD, command, env=named, log=Path(os.devnull))


def _end(launcher: Launcher, processes: Sequence[Process]) -> None:
    """End the engines last: their clients would report a failure."""
    running = [each for each in processes if not isinstance(each, Pause)]
    try:
        launcher.end([each for each in running if not is_of("inference", each)])
        launcher.end([each for each in running if is_of("inference", each)])
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
    awaited = [each for each in processes if each is orchestrator or is_of("trainer", each)]
    beat: int | None = None
    num_bytes = 0
    deadline = 0.0
    while any(each.exit_code is None for each in awaited):
        stopping = stop is not None and stop.is_asked
        finding = look(processes)
        if finding:
            process, why = finding
            if isinstance(process, Child):
                process.kill()
            if not is_of("inference", process):
                raise _failed(process, view.run_dir, why)

        if not stopping:
            restart(processes)
        for process in awaited if stopping else processes:
            _check_alive(process, view.run_dir)
        if orchestrator.exit_code == 0:
            stopped = None if stop is None else stop.result
            if stopped and not stopped.trained:
                return
            newest = last_beat(view.run_dir / "status" / "trainer.json")
            if newest != beat or not deadline:
                beat = newest
                num_bytes = sum(map(bytes_moved, awaited))
                deadline = time.monotonic() + TRAINER_GRACE
            if time.monotonic() > deadline:
                # A large checkpoint is written in one call, which cannot beat.
                before = num_bytes
                num_bytes = sum(map(bytes_moved, awaited))
                deadline = time.monotonic() + TRAINER_GRACE
                if num_bytes - before >= MOVED_MIB << 20:
                    continue
                why = f"the trainer is still busy {TRAINER_GRACE:.0f} s after the last step"
                why += ", and has given no sign of life since"
                raise ProcessFailed(why, "trainer", why)

        view.refresh()
        time.sleep(TICK_SECONDS)

    for process in awaited:
        _check_alive(process, view.run_dir)
    view.refresh()


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
        if is_done and not is_of("inference", process):  # an engine is never done
            return
        how += " before it was done"

    raise _failed(process, run_dir, how)


def _failed(process: Process, run_dir: Path, how: str) -> RunError:
    report = read_status(run_dir / "status" / f"{process.name}.json")
    said = str(report.detail.get("error", "")) if report is not None else ""
    fault = None if report is None else report.facts.fault
    is_fault = fault == "plugin"  # the log has more, but nothing more to the point
    lines = said.splitlines() if is_fault else process.last_lines()
    head = "More is in its log" if is_fault else "The end of its log"
    tail = "\n".join(f"    {line}" for line in lines)
    resume = ""
    disk = ""
    with suppress(OSError):  # what the text lacks must not hide the failure
        for newest in whole_steps(run_dir)[-1:]:
            resume = f"\n--resume continues from the checkpoint of step {newest}."
        lack = full_disk(run_dir)  # then neither the log nor the status may have the reason
        disk = f"\nThe disk of {run_dir} is full: {lack}." if lack else ""
    text = f"{process.name} {how}. {head} ({process.log}):\n{tail}{disk}{resume}"
    if is_of("inference", process):
        return RunError(text)
    reason = "" if fault == "other_rank" else said
    detail = reason or next(reversed(lines), "") if process.exit_code == 1 else ""
    cause = f"{process.name} {how}" + (f": {detail}" if detail else "")
    return ProcessFailed(text, process.name, cause.splitlines()[0], reported=bool(reason))
