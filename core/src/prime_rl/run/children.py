"""The processes of a run: started with their own log and session, watched, and ended together."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from prime_rl.plugins.launchers import Process
from prime_rl.run.launch import PARENT_PID

QUIET_CPU = {
    # One thread a process: spinning OpenMP threads of several processes on few cores cost up to
    # 30x.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}
"""Defaults of every child's environment; what the user has set stays."""

FIRST_PORT = 20000
"""Of those that runs choose: above what services are known by."""
TRIES = 100

STDERR = 2

GRACE_SECONDS = 10.0
"""Between asking a child to end and making it."""


@dataclass(frozen=True, eq=False)
class Child(Process):
    """One running process of this machine."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path | None
    """None: it writes to our own stderr."""

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
    """Start a child in its own session, so that Ctrl-C reaches it through us only, in order.

    ``log`` takes what it writes; None: our stderr does. ``cwd``: None: our own.
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


def end(children: Sequence[Child], grace: float = GRACE_SECONDS) -> None:
    """Ask every child to end; after ``grace`` seconds, make them, with whatever they started."""
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
    """Ports nobody listens on now, all different.

    Whoever binds one does so seconds later. So they are none of those that the system hands out
    meanwhile, to connections that go out for instance, and two runs hardly choose the same.
    """
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            _bind(each, host)
        return [each.getsockname()[1] for each in sockets]


def _bind(each: socket.socket, host: str) -> None:
    numbers = range(FIRST_PORT, _first_handed_out())
    for number in random.SystemRandom().sample(numbers, min(TRIES, len(numbers))):
        with suppress(OSError):
            return each.bind((host, number))
    each.bind((host, 0))  # any; or the error that all had


def _first_handed_out() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):  # not Linux
        return 32768


@contextmanager
def sigterm_is_ctrl_c() -> Iterator[None]:
    """Being asked to end is treated like Ctrl-C: clean up, leave nobody behind."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """A second Ctrl-C does not cut the clean-up short."""
    before = [signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(number, handler)
