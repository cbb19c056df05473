"""The processes of a run: started with their own log and session, watched, and ended together; and
the launcher ``local``, whose processes are children of this one."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import ClassVar, cast

from prime_rl.plugins.base import PluginConfig
from prime_rl.plugins.launchers import Launcher, Place, Process, ProcessCommand, Task
from prime_rl.rundir.launch import PARENT_PID
from prime_rl.rundir.machine import VISIBLE, free_ports, visible_gpus
from prime_rl.variables import inherited
from prime_rl_app.forks import Forks

QUIET_CPU = {
    # One thread per process: spinning OpenMP threads of several processes on few cores cost up to
    # 30x.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    # Tensors in huge pages: a step allocates most of its memory anew, and faults once per 2 MiB.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "PYTHONUNBUFFERED": "1",
}
"""Defaults of every child's environment. The user's environment overrides them."""

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that stop a run."""
GRACE_SECONDS = 10.0
"""Seconds between SIGTERM and SIGKILL."""
SAME_SECONDS = 1.0
"""A SIGTERM that follows another so soon is the same request."""


@dataclass(frozen=True, eq=False)
class Child(Process):
    """A child process on this machine."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path | None
    """None: the child writes to our stderr."""

    @property
    def exit_code(self) -> int | None:
        return self.process.poll()

    def kill(self) -> None:
        """End its whole session at once, also if it is stopped."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)


class Pause(Process):
    """Stands in for an engine that will be started again."""

    exit_code = None

    def __init__(self, process: Process, until: float) -> None:
        self.name = process.name
        self.log = process.log
        self.until = until


def start(
    name: str,
    argv: Sequence[str],
    env: Mapping[str, str],
    log: Path | None = None,
    popen: Callable[..., subprocess.Popen[bytes]] | None = None,
    inherits: Sequence[str] | None = (),
) -> Child:
    """Start a child in its own session: Ctrl-C reaches only us, and we end the children in order.

    ``log`` receives stdout and stderr; None: our stderr. ``env``: added to what it inherits, which
    has no key of the user but those that ``inherits`` names; None: all of our environment.
    """
    with nullcontext(2) if log is None else log.open("ab") as file:
        process = (popen or subprocess.Popen)(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**QUIET_CPU, **inherited(inherits), **env, PARENT_PID: str(os.getpid())},
        )

    return Child(name, process, log)


def ending(code: int) -> str:
    """How a process has ended, by its exit code. One that ends itself after a signal exits with 128
    and the number of the signal."""
    if code in (128 + signal.SIGINT, 128 + signal.SIGTERM):
        code = 128 - code
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def end(children: Sequence[Child], grace: float = GRACE_SECONDS) -> None:
    """Send SIGTERM to every child, and after ``grace`` seconds SIGKILL to its whole session."""
    for child in children:
        if child.exit_code is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.process.pid, signal.SIGTERM)

    deadline = time.monotonic() + grace
    for child in children:
        with suppress(subprocess.TimeoutExpired):
            child.process.wait(max(0.0, deadline - time.monotonic()))

    for child in children:
        child.kill()  # grandchildren included
        child.process.wait()


def sigterm_is_ctrl_c() -> AbstractContextManager[None]:
    """Treat SIGTERM, and SIGHUP of a terminal that closes, like Ctrl-C, so that the clean-up
    runs."""
    return _handled_by(signal.default_int_handler, signal.SIGTERM, signal.SIGHUP)


def uninterrupted() -> AbstractContextManager[None]:
    """Ignore SIGINT, SIGTERM and SIGHUP during the clean-up."""
    return _handled_by(signal.SIG_IGN, *STOPS)


@contextmanager
def first_signal_asks() -> Iterator[Callable[[], bool]]:
    """The first SIGINT, SIGTERM or SIGHUP requests a stop, the second raises ``KeyboardInterrupt``.
    Yields a function that returns whether the first has arrived."""
    heard: list[int] = []
    last_term = -math.inf

    def hear(number: int, frame: FrameType | None) -> None:
        nonlocal last_term
        # A terminal that closes sends SIGHUP twice: from the kernel, and from the shell.
        if number == signal.SIGHUP and number in heard:
            return
        # GNU `timeout` and some schedulers send SIGTERM to the process and to its group at once.
        if number == signal.SIGTERM:
            now = time.monotonic()
            if now - last_term < SAME_SECONDS:
                return
            last_term = now
        heard.append(number)
        if len(heard) > 1:
            raise KeyboardInterrupt

    with _handled_by(hear, *STOPS):
        yield lambda: bool(heard)


@contextmanager
def _handled_by(
    handler: Callable[[int, FrameType | None], None] | signal.Handlers, *numbers: signal.Signals
) -> Iterator[None]:
    """Handle signals, except those that are ignored: shells make background jobs ignore Ctrl-C."""
    before = {number: signal.getsignal(number) for number in numbers}
    heard = [number for number, old in before.items() if old is not signal.SIG_IGN]
    for number in heard:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in heard:
            signal.signal(number, before[number])


class LocalLauncher(Launcher):
    """``[launcher] type = "local"``: children of ``prime-rl run``, on loopback."""

    name = "local"
    is_remote: ClassVar[bool] = False

    def __init__(self, config: PluginConfig) -> None:
        super().__init__(config)
        self._children: dict[str, Child] = {}
        self._popen = Forks()

    def num_gpus(self) -> int:
        return len(visible_gpus())

    def place(
        self, tasks: Sequence[Task], run_dir: Path, tell: Callable[[str], None]
    ) -> Mapping[str, Place]:
        ports = iter(free_ports(sum(task.num_ports for task in tasks)))
        return {
            task.name: Place(None, tuple(next(ports) for _ in range(task.num_ports)))
            for task in tasks
        }

    def start(self, task: Task, command: ProcessCommand) -> Process:
        if task.name in self._children:  # what a dead engine left behind holds its GPU memory
            end([self._children.pop(task.name)])
        env = dict(command.env)
        if task.gpus is not None:
            devices = visible_gpus()
            env[VISIBLE] = ",".join(devices[number] for number in task.gpus)
            if VISIBLE not in os.environ:  # nvidia-smi orders by bus, CUDA by speed
                env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"

        child = start(
            task.name,
            command.argv,
            env,
            log=command.log,
            popen=self._popen,
            inherits=command.inherits,
        )
        return self._children.setdefault(task.name, child)

    def end(self, processes: Sequence[Process]) -> None:
        end(cast(Sequence[Child], processes))
