"""``prime-rl join RUN_DIR PART``: this machine runs one part of a run that another supervises.

    wait for the run -> take a task -> say where we are -> [wait for the order -> start -> report]
    -> until the run is over

``join.py`` is the other side, ``meeting.py`` what lies between them.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from prime_rl.config.run import RunConfig
from prime_rl.plugins.errors import ConfigError, RunError
from prime_rl.plugins.launchers import Task
from prime_rl.plugins.manager import load_plugins
from prime_rl.run import meeting
from prime_rl.run.addresses import numeric
from prime_rl.run.children import Child, end, free_ports, sigterm_is_ctrl_c, start, uninterrupted
from prime_rl.run.commands import Commands, Keys
from prime_rl.run.launch import ADMIN_KEY, Launch
from prime_rl.run.resolve import build_engine

POLL_SECONDS = 0.1
SEE_SECONDS = 30.0
"""How long a file may take to reach this machine through a shared disk's cache; less than it takes
to be given up as lost."""


def join(run_dir: Path, part: str, address: str, say: Callable[[str], None]) -> int:
    """Take part until the run is over; the exit code, which is not 0 if our process failed.

    Raises ``ConfigError`` if there is nothing to join as, ``RunError`` if the run went away."""
    key = os.environ.get(ADMIN_KEY, "")
    if not key:
        raise ConfigError(f"{ADMIN_KEY} is not set: give it the secret that `prime-rl run` has")
    with sigterm_is_ctrl_c():
        run_dir = run_dir.absolute()
        opened = _await_run(run_dir, say)
        directory = meeting.places_dir(run_dir) / opened.meeting
        task = _take(directory, opened, part)
        say(f"joined as {task.name}")
        return Member(run_dir, directory, task, numeric(address), key, say).serve()


def _await_run(run_dir: Path, say: Callable[[str], None]) -> meeting.Open:
    """Until somebody supervises: what a dead one left behind does not beat."""
    path = meeting.places_dir(run_dir) / meeting.OPEN
    first, told = None, False
    while True:
        opened = meeting.read(path, meeting.Open)
        if opened and first and opened.meeting == first.meeting and opened.beat != first.beat:
            return opened
        if opened is None or first is None or opened.meeting != first.meeting:
            first = opened
        if not told:
            say(f"waiting for a run with --launcher join in {run_dir}")
            told = True
        time.sleep(POLL_SECONDS)


def _take(directory: Path, opened: meeting.Open, part: str) -> Task:
    """The first task of a part that nobody has. Raises ``ConfigError`` if there is none."""
    tasks = [Task(**fields) for fields in opened.tasks]
    fitting = [task for task in tasks if task.part == part]
    for task in fitting:
        if meeting.claim(directory / f"{task.name}.claim"):
            return task
    parts = ", ".join(dict.fromkeys(task.part for task in tasks))
    raise ConfigError(
        f"nothing to join as {part!r}: the run has {len(fitting)} such places and all are taken "
        f"(parts of it: {parts}). deployment.trainer_nodes and inference.replicas say how many."
        if fitting
        else f"nothing to join as {part!r}: machines join this run as {parts or 'nothing'}"
    )


class Member:
    """One machine's part in a run."""

    def __init__(
        self,
        run_dir: Path,
        directory: Path,
        task: Task,
        address: str,
        key: str,
        say: Callable[[str], None],
    ) -> None:
        self.run_dir = run_dir
        self.task = task
        self._directory = directory
        self._say = say
        self._child: Child | None = None
        self._pulse = meeting.Pulse()
        self._failure = 0
        ports = free_ports(task.num_ports, address)
        proof = meeting.proof(key, directory.name)
        self._record = meeting.Agent(address, ports, socket.gethostname(), proof)

    def serve(self) -> int:
        """Follow orders until the run is over; not 0 if our last process failed by itself."""
        try:
            while True:
                self._report()
                if self._is_over():
                    return self._failure
                if order := meeting.read(self._path("order"), meeting.Order):
                    if order.end:
                        self._end()
                        return self._failure
                    if order.start != self._record.order:
                        self._follow(order)
                self._wait()
        except BaseException as error:
            with uninterrupted():
                self._end()
            if isinstance(error, ConfigError | RunError):
                self._record = replace(self._record, refused=str(error))
                self._report()
            raise

    def _wait(self) -> None:
        """One beat, or less if our process ends."""
        until = time.monotonic() + meeting.BEAT_SECONDS / 2
        while time.monotonic() < until:
            code = None if self._child is None else self._child.exit_code
            if code is not None and self._record.exit_code is None:
                self._say(f"{self.task.name} ended with code {code}")
                self._record = replace(self._record, exit_code=code)
                self._failure = code if code >= 0 else 1
                return
            time.sleep(POLL_SECONDS)

    def _report(self) -> None:
        self._record = replace(self._record, beat=self._record.beat + 1)
        with suppress(OSError):  # the next report says it again, unless the folder is cleared
            meeting.write(self._path("agent"), self._record)

    def _is_over(self) -> bool:
        """The supervisor has left, or another one has opened a meeting of its own. Raises
        ``RunError`` if it is lost."""
        opened = meeting.read(self._directory.parent / meeting.OPEN, meeting.Open)
        if opened is None or opened.meeting != self._directory.name:
            self._say("the run is over")
            self._end()
            return True
        if self._pulse.still_for(opened.beat) > meeting.LOST_SECONDS:
            raise RunError(f"the run gives no sign of life for {meeting.LOST_SECONDS:.0f} s")
        return False

    def _follow(self, order: meeting.Order) -> None:
        """Start the process, or start it again."""
        self._end()
        for needed in order.needs:
            _await_file(Path(needed))
        config = RunConfig.model_validate_json((self.run_dir / "configs" / "run.json").read_bytes())
        engine = build_engine(config, load_plugins(disabled=config.plugins.disabled))
        launch, keys = Launch.read(self.run_dir), Keys.of_run(config, is_remote=True)
        command = Commands(config, launch, self.run_dir, engine, keys).of(self.task)
        self._child = start(self.task.name, command.argv, command.env, command.log)
        self._record = replace(self._record, order=order.start, exit_code=None)
        self._failure = 0
        self._say(f"started {self.task.name}; its log is {command.log}")

    def _end(self) -> None:
        if self._child is not None:
            end([self._child])
            self._record = replace(self._record, exit_code=self._child.exit_code)
            self._report()

    def _path(self, kind: str) -> Path:
        return self._directory / f"{self.task.name}.{kind}"


def _await_file(path: Path) -> None:
    """Raises ``RunError`` if this machine does not see it."""
    deadline = time.monotonic() + SEE_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            raise RunError(
                f"{path} is not to be seen on {socket.gethostname()}. The run directory and the "
                "model must be on a disk that every machine shares, under the same path."
            )
        time.sleep(POLL_SECONDS)
