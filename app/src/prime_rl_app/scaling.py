"""Engines join and leave a run that trains (``prime-rl scale``).

prime-rl scale -> <run>/scale.json -> the supervisor starts or ends engines, and rewrites
configs/launch.json -> the orchestrator sends requests to the engines that are there now
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path

import msgspec

from prime_rl.errors import ConfigError, PrimeRLError, RunError
from prime_rl.plugins.launchers import Launcher, Place, Process, Task
from prime_rl.rundir.directory import read_config
from prime_rl.rundir.launch import Launch
from prime_rl.rundir.rows import read_table
from prime_rl.rundir.status import process_name, replace_text
from prime_rl_app.attempts import Attempts
from prime_rl_app.children import Pause

SCALE = "scale.json"
"""File in the run directory: the wish that was made last."""


class Wish(msgspec.Struct, frozen=True):
    """``scale.json``: the engines that the policy is to have."""

    replicas: int | None = None
    """Engines that the run starts."""
    base_url: list[str] | None = None
    """Engines that run elsewhere, where ``inference.base_url`` named them at the start."""

    def write(self, run_dir: Path) -> None:
        replace_text(run_dir / SCALE, msgspec.json.encode(self).decode() + "\n")

    @classmethod
    def read(cls, run_dir: Path) -> Wish | None:
        """None: none was made. Raises ``RunError`` if the file is damaged."""
        try:
            wish: Wish = read_table(run_dir / SCALE, cls)
        except FileNotFoundError:
            return None
        return wish


class Placing(Pause):
    """Stands in for an engine while the launcher, on a thread of its own, looks for a place."""

    def __init__(
        self, launcher: Launcher, run_dir: Path, task: Task, tell: Callable[[str], None]
    ) -> None:
        self.name = task.name
        self.log = None
        self.task = task
        self.place: Place | None = None
        self.problem: PrimeRLError | None = None

        def work() -> None:
            try:
                places = launcher.place(
                    [task], run_dir, lambda what: tell(f"{task.name} waits for {what}")
                )
            except PrimeRLError as error:
                self.problem = error
            else:
                self.place = places[task.name]

        threading.Thread(target=work, daemon=True).start()


class Scaling:
    """Starts and ends one engine after the other until the run has those that were wished for."""

    def __init__(
        self, attempts: Attempts, launcher: Launcher, run_dir: Path, tell: Callable[[str], None]
    ) -> None:
        self._attempts = attempts
        self._launcher = launcher
        self._run_dir = run_dir
        self._tell = tell
        self._seen = 0
        """When the wish was made that cannot be met, in nanoseconds."""
        self._next: Placing | None = None

    def look(self, processes: list[Process]) -> None:
        """Take one step toward the wish."""
        try:
            made = (self._run_dir / SCALE).stat().st_mtime_ns
        except OSError:
            return

        if made == self._seen and self._next is None:
            return
        try:
            self._approach(processes, Wish.read(self._run_dir) or Wish())
        except PrimeRLError as error:
            self._tell(f"scaling: {error}. `prime-rl scale` asks again.")
            self._seen = made
            self._next = None

    def _approach(self, processes: list[Process], wish: Wish) -> None:
        attempts = self._attempts
        if wish.base_url is not None:
            if Launch.read(self._run_dir).engine_urls != wish.base_url:
                attempts.announce(wish.base_url)
                self._tell(f"the engines are now {', '.join(wish.base_url)}")
            return

        placed = self._next
        if placed is not None:
            if placed.problem is not None:
                raise placed.problem
            if placed.place is not None:
                self._next = None
                processes.append(attempts.join(placed.task, placed.place))
                self._tell(f"{placed.name} joins the run")
            return

        engines = attempts.engines or ()
        wanted = len(engines) if wish.replicas is None else wish.replicas
        if len(engines) < wanted:
            task = another_engine(attempts, self._launcher)
            self._next = Placing(self._launcher, self._run_dir, task=task, tell=self._tell)
        elif len(engines) > wanted:
            name = engines[-1].name
            attempts.engines = engines[:-1]
            attempts.announce()
            leaving = [each for each in processes if each.name == name]
            self._launcher.end([each for each in leaving if not isinstance(each, Pause)])
            processes[:] = [each for each in processes if each.name != name]
            (self._run_dir / "status" / f"{name}.json").unlink(missing_ok=True)
            self._tell(f"{name} has left the run")


def another_engine(attempts: Attempts, launcher: Launcher) -> Task:
    """A further engine of the policy, not placed yet. Raises ``RunError`` if no GPU is left."""
    others = [each for each in attempts.layout.tasks if each not in attempts.layout.engines]
    tasks = [*(attempts.engines or ()), *others]
    needed = attempts.commands.engine.num_gpus
    names = {task.name for task in tasks}
    number = next(n for n in count() if process_name("inference", n) not in names)
    used = {gpu for task in tasks for gpu in task.gpus or ()}
    free = tuple(gpu for gpu in range(launcher.num_gpus()) if gpu not in used)
    if used and len(free) < needed:
        raise RunError(f"another engine needs {needed} GPUs, and {len(free)} are free")
    return Task(
        process_name("inference", number),
        "inference",
        number,
        num_gpus=needed if launcher.is_remote and free else 0,
        gpus=free[:needed] if used else None,
        num_ports=1,
    )


def check_wish(run_dir: Path, wish: Wish) -> None:
    """Raises ``ConfigError`` for a wish that this run cannot meet."""
    config = read_config(run_dir)
    elsewhere = config.inference.base_url is not None
    if (wish.replicas is None) == (wish.base_url is None):
        raise ConfigError("give a number of engines, or --base-url: `prime-rl scale RUN 3`")
    if wish.base_url is not None and not elsewhere:
        raise ConfigError(
            "--base-url: this run starts its engines itself. Give their number instead."
        )

    if wish.replicas is not None and elsewhere:
        raise ConfigError(
            "the engines of this run are elsewhere (inference.base_url). Name each that it is to "
            "have by --base-url."
        )

    if config.deployment.colocated:
        raise ConfigError("deployment.colocated: the engines have the trainer's GPUs and no others")


def bare(url: str) -> str:
    """An engine's base URL as the launch facts have it: without ``/v1``."""
    return url.rstrip("/").removesuffix("/v1")
