"""``prime-rl run``: start every process of a run, show what they do, and end them all together.

    model maker (if the model is made here)
    inference engine      HTTP on a free loopback port; admin routes need the run's key
    trainer               receives micro batches, publishes weights
    orchestrator          everything in between; when it is done, the run is done

Who starts them, and on which machines, is the launcher's matter. An engine that dies is started
again (``restarts.py``); any other process that dies ends the run with its name, exit code and last
log lines; none is left behind.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from prime_rl.config.run import RunConfig
from prime_rl.plugins.errors import RunError
from prime_rl.plugins.launchers import Launcher, Place, Process
from prime_rl.plugins.manager import load_plugins
from prime_rl.run.checkpoints import Checkpoint, whole_steps
from prime_rl.run.children import sigterm_is_ctrl_c, uninterrupted
from prime_rl.run.commands import Commands, Keys
from prime_rl.run.control import supervised
from prime_rl.run.placement import Layout, lay_out, plan
from prime_rl.run.resolve import build_engine, build_launcher
from prime_rl.run.restarts import Restarts
from prime_rl.run.status import DONE, Status, read_status
from prime_rl.run.view import View

TICK_SECONDS = 0.25
TRAINER_GRACE = 1800.0
"""Seconds the trainer may take to write the final weights after the orchestrator is done."""


def run(config: RunConfig, run_dir: Path, view: View, checkpoint: Checkpoint | None = None) -> None:
    """Train, from a checkpoint if one is given. Raises ``RunError`` when a process dies,
    ``KeyboardInterrupt`` when the user stops it."""
    launcher = build_launcher(config, load_plugins(disabled=config.plugins.disabled))
    processes: list[Process] = []
    with supervised(run_dir), sigterm_is_ctrl_c():
        try:
            tell = _printer(view)
            restarts = Restarts(launcher, run_dir, config.inference.max_restarts, tell)
            processes += _start(config, run_dir, launcher, restarts, tell, checkpoint)
            _watch(processes, view, restarts.mend)
        finally:
            with uninterrupted():
                _end(launcher, processes)


def _start(
    config: RunConfig,
    run_dir: Path,
    launcher: Launcher,
    restarts: Restarts,
    tell: Callable[[str], None],
    checkpoint: Checkpoint | None,
) -> Iterator[Process]:
    """Every process at once: they import and wait for one another, which is quicker than in
    turn."""
    engine = build_engine(config, load_plugins(disabled=config.plugins.disabled))
    layout = lay_out(config, launcher, engine, checkpoint)
    places = _place(launcher, layout, run_dir, tell)
    launch = plan(config, layout, places, checkpoint)
    launch.write(run_dir)
    keys = Keys.of_run(config, launcher.is_remote)
    seen = run_dir.absolute() if launcher.is_remote else run_dir
    commands = Commands(config, launch, seen, engine, keys)
    for task in layout.tasks:
        yield restarts.start(task, commands.of(task))


def _printer(view: View) -> Callable[[str], None]:
    """Prints a line above the live view."""
    return lambda text: view.console.print(text, markup=False, highlight=False)


def _place(
    launcher: Launcher, layout: Layout, run_dir: Path, tell: Callable[[str], None]
) -> Mapping[str, Place]:
    """A place for every task. Whom it waits for is said here and, for others to read, in the
    launcher's status."""
    status = Status(run_dir / "status" / "launcher.json" if launcher.is_remote else None)

    def say(what: str) -> None:
        tell(f"waiting for {what}")
        status.report("placing", waiting_for=what)

    places = launcher.place(layout.tasks, run_dir, say)
    status.report(DONE)
    return places


def _end(launcher: Launcher, processes: Sequence[Process]) -> None:
    try:
        launcher.end(processes)
    finally:
        launcher.close()


def _watch(
    processes: list[Process],
    view: View,
    mend: Callable[[list[Process]], None] = lambda processes: None,
) -> None:
    """Until the orchestrator and the trainer are done. Raises ``RunError`` if anyone dies
    before whom ``mend`` does not replace."""
    awaited = [each for each in processes if each.name in ("orchestrator", *_trainers(processes))]
    orchestrator = next(each for each in awaited if each.name == "orchestrator")
    deadline: float | None = None
    while any(each.exit_code is None for each in awaited):
        mend(processes)
        for process in processes:
            _check_alive(process, view.run_dir)
        if orchestrator.exit_code == 0:
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


def _trainers(processes: Sequence[Process]) -> list[str]:
    return [each.name for each in processes if each.name.split("_")[0] == "trainer"]


def _check_alive(process: Process, run_dir: Path) -> None:
    """Raises ``RunError`` if a process has ended without having said that it is done."""
    code = process.exit_code
    if code is None or (code == 0 and _is_done(process, run_dir)):
        return
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    how += " before it was done" if code == 0 else ""
    tail = "\n".join(f"    {line}" for line in process.last_lines())
    said = f"{process.name} {how}. The end of its log ({process.log}):\n{tail}"
    raise RunError(f"{said}{_way_on(run_dir)}")


def _way_on(run_dir: Path) -> str:
    """What can be done with what is left."""
    steps = whole_steps(run_dir)
    return f"\n--resume goes on from the checkpoint of step {steps[-1]}." if steps else ""


def _is_done(process: Process, run_dir: Path) -> bool:
    """Whether one that ended well has said that it is done. Of the trainer's nodes the first says
    so for all."""
    name = "trainer" if process.name.startswith("trainer_") else process.name
    report = read_status(run_dir / "status" / f"{name}.json")
    return report is not None and (report.state == DONE or name != process.name)
