"""The processes of a run, from their start to the next attempt."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from prime_rl.plugins.launchers import Place, Process, ProcessCommand, Task
from prime_rl.plugins.view import RunView
from prime_rl.rundir.attempts import kill_left
from prime_rl.rundir.checkpoints import Checkpoint
from prime_rl.rundir.control import STOP
from prime_rl.rundir.directory import new_attempt, write_config
from prime_rl.rundir.status import DONE, Status
from prime_rl_app.children import Pause
from prime_rl_app.commands import Commands, RunKeys
from prime_rl_app.placement import engine_url, lay_out, plan
from prime_rl_app.resolve import Resolved
from prime_rl_app.resume import newest, rewind

GUARD = "guard"
"""Name of the process that ends what outlives us."""


class Attempts:
    """The processes of a run. Its engines serve one attempt after the other."""

    def __init__(self, resolved: Resolved, view: RunView) -> None:
        self._resolved = resolved
        self._config = resolved.config
        self._view = view
        self._launcher = resolved.launcher
        self._run_dir = view.run_dir
        self._places: dict[str, Place] = {}
        self._keys = RunKeys.of_run(self._config, self._launcher.is_remote)
        self.commanded: Callable[[Task, ProcessCommand], None] = lambda task, command: None
        """Learns how each task is started."""
        self.engines: tuple[Task, ...] | None = None
        """Engines of the policy, some of which have joined since the start; None before the
        start."""
        self.processes: list[Process] = []

    def start(self, checkpoint: Checkpoint | None) -> None:
        """Start at once all processes that do not run: they import in parallel and then wait for
        each other. What the launcher waits for is printed, and written to its status."""
        launcher = self._launcher
        run_dir = self._run_dir
        reports = [f"status/{name}.json" for name in ("model", "orchestrator", "trainer")]
        agents = (run_dir / "status").glob("trainer_*.json")
        # Files of the attempt before: they say that it was done, or why it failed.
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
        launch = plan(
            self._resolved,
            layout,
            places=self._places,
            checkpoint=checkpoint,
            engines_kept=bool(kept),
        )
        status.report(DONE)
        launch.write(run_dir)
        seen = run_dir.absolute() if launcher.is_remote else run_dir
        self.commands = Commands(
            config=self._config,
            launch=launch,
            run_dir=seen,
            engine=self._resolved.engine,
            keys=self._keys,
        )
        for task in layout.tasks:
            command = self.commands.of(task)
            self.commanded(task, command)
            if task in new:  # one by one, so that a failure ends those that have started
                self.processes.append(launcher.start(task, command))

    def join(self, task: Task, place: Place) -> Process:
        """Start an engine that joins the run, or returns at another place."""
        others = [each for each in self.engines or () if each.name != task.name]
        self.engines = (*others, task)
        self._places[task.name] = place
        self.announce()
        command = self.commands.of(task)
        self.commanded(task, command)
        return self._launcher.start(task, command)

    def announce(self, elsewhere: Sequence[str] = ()) -> None:
        """Tell the orchestrator where the policy's engines are now: the engines of the run, else
        those of the user."""
        names = [task.name for task in self.engines or ()]
        urls = [engine_url(self._config, e, self._places[e.name]) for e in self.engines or ()]
        launch = self.commands.launch
        launch = replace(launch, engine_urls=[*urls, *elsewhere], engine_names=names)
        launch.write(self._run_dir)
        self.commands = dataclasses.replace(self.commands, launch=launch)

    def go_back(self) -> Checkpoint | None:
        """End what does not serve the next attempt, and drop what followed the newest checkpoint,
        which is returned; None: there is none."""
        new_attempt(self._run_dir)  # from here on the old processes write nothing
        keep = "" if self._config.deployment.colocated else "inference"
        running = [each for each in self.processes if not isinstance(each, Pause)]
        self._launcher.end([each for each in running if not is_of(keep, each)])
        self.processes[:] = [each for each in self.processes if is_of(keep, each)]
        kept = {GUARD, *(process.name for process in self.processes)}
        kill_left(self._run_dir, kept)
        checkpoint, damaged = newest(self._run_dir)
        for line in damaged:
            self._view.print(line)
        rewind(self._run_dir, 0 if checkpoint is None else checkpoint.step, kept)
        write_config(self._run_dir, self._config)
        return checkpoint


def is_of(part: str, process: Process) -> bool:
    return process.name.split("_")[0] == part
