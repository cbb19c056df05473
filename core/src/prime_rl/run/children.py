"""The processes of a run: started with their own log and session, watched, and ended together."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from prime_rl.plugins.launchers import Process
from prime_rl.rundir.launch import PARENT_PID

QUIET_CPU = {
    # One thread per process: spinning OpenMP threads of several processes on few cores cost up to
    # 30x.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}
"""Defaults of every child's environment. The user's environment overrides them."""

FIRST_PORT = 20000
"""Lowest port that a run chooses, above the ports of well-known services."""
TRIES = 100
"""Random ports to try before the kernel chooses."""

STDERR = 2

GRACE_SECONDS = 10.0
"""Seconds between SIGTERM and SIGKILL."""


@dataclass(frozen=True, eq=False)
class Child(Process):
    """A child process on this machine."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path | None
    """None: the child writes to our stderr."""

    @property
    def exit_code(self) -> int | None:
        """None while it runs; -N if signal N ended it."""
        return self.process.poll()


def start(
    name: str,
    argv: Sequence[str],
    env: Mapping[str, str],
    log: Path | None = None,
    cwd: Path | None = None,
) -> Child:
    """Start a child in its own session: Ctrl-C reaches only us, and we end the children in order.

    ``log`` receives stdout and stderr; None: our stderr. ``cwd``: None for our own.
    """
    with nullcontext(STDERR) if log is None else log.open("ab") as file:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=cwd,
            env={**QUIET_CPU, **os.environ, **env, PARENT_PID: str(os.getpid())},
        )
    return Child(name, process, log)


def ending(code: int) -> str:
    """How a process has ended, by its exit code."""
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def end(children: Sequence[Child], grace: float = GRACE_SECONDS) -> None:
    """Send SIGTERM to every child, and after ``grace`` seconds SIGKILL to its whole session."""
    for child in children:
        if child.exit_code is None:
            _signal(child, signal.SIGTERM)
    deadline = time.monotonic() + grace
    for child in children:
        with suppress(subprocess.TimeoutExpired):
            child.process.wait(max(0.0, deadline - time.monotonic()))
    for child in children:
        _signal(child, signal.SIGKILL)  # the whole session: grandchildren included
        child.process.wait()


def _signal(child: Child, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.process.pid, number)


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Distinct ports without a listener.

    The caller binds them seconds later. They are therefore outside the kernel's ephemeral range,
    and random, so that two runs hardly choose the same.
    """
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            _bind(each, host)
        return [each.getsockname()[1] for each in sockets]


def _bind(each: socket.socket, host: str) -> None:
    numbers = range(FIRST_PORT, _first_ephemeral())
    for number in random.SystemRandom().sample(numbers, min(TRIES, len(numbers))):
        with suppress(OSError):
            return each.bind((host, number))
    each.bind((host, 0))  # any port; or raise why none can be bound


def _first_ephemeral() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):  # not Linux
        return 32768


@contextmanager
def sigterm_is_ctrl_c() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C, so that the clean-up runs."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with _handled_by(interrupt, signal.SIGTERM):
        yield


@contextmanager
def first_signal_asks() -> Iterator[Callable[[], bool]]:
    """The first SIGINT or SIGTERM requests a stop, the second raises ``KeyboardInterrupt``. Yields
    a function that returns whether the first has arrived."""
    heard: list[int] = []

    def hear(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        if len(heard) > 1:
            raise KeyboardInterrupt

    with _handled_by(hear, signal.SIGINT, signal.SIGTERM):
        yield lambda: bool(heard)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore SIGINT and SIGTERM during the clean-up."""
    with _handled_by(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM):
        yield


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
