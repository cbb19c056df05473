"""A fork server: a process that imports once, and is forked for each process that is asked for::

    caller --start--> fork server     imports, is alone in its session, has no thread
       +----asks----->    +- fork --> the process that a command line names

torch and transformers take four seconds of CPU to import, verifiers and what workers need take
six; a fork takes 50 ms and shares the memory. There are three callers, with their own imports:

- the supervisor, for engine and trainer (``forks``). It gives its forks away: they become the
  supervisor's children, and outlive the server.
- the orchestrator, for environment workers (``prime_rl_env_workers.forks``). The server keeps its
  forks: it reports how each ends, and they end with it, and it with the orchestrator.
- the tests, for whole command lines (``tests/warm.py``). It keeps them too.

Requests and answers are JSON, one per packet::

    {"id": "a", "argv": [...], "env": {...}}, and files: the n-th is the fork's descriptor n.
                                              "hidden": variables that /proc does not show
    {"kill": "a"}
                                 {"id": "a", "pid": 71}
                                 {"id": "a", "status": -11}    of one that it keeps
                                 {"id": "a", "status": 1}      of one that it could not fork

A fork is in each respect the process that its command names: session, files, environment, command
line, also as the kernel shows them, for by ``PRIME_RL_PROCESS`` a run finds its processes. No fork
has the connection, so a write into a descriptor that is not its own cannot reach the server.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO

from prime_rl.errors import ConfigError
from prime_rl.rundir.attempts import PROCESS
from prime_rl.rundir.launch import PARENT_PID
from prime_rl.rundir.processes import exit_with_parent, lasting_imports

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
ROOM = "-" * 2048
"""Space for command line and environment of forks, which overwrite the fork server's."""
ROOM_VARIABLE = "PRIME_RL_ROOM"
LARGEST = 1 << 17
"""Bytes of a packet: arguments and environment."""
MOST_FILES = 8
GRACE_SECONDS = 5.0
"""How long forks that the server keeps may take to end, before they are killed."""

Run = Callable[[Sequence[str]], None]
"""Runs a command line in this process."""


# -- in the caller --------------------------------------------------------------------------------


def start(
    command: Sequence[str], env: Mapping[str, str], log: Any
) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start a fork server, whose ``command`` calls ``main``. It ends when our end of the
    connection is closed, and when we end. ``log``: a file or its descriptor."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [*command, ROOM],
            stdin=theirs.fileno(),
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**env, PARENT_PID: str(os.getpid()), ROOM_VARIABLE: ROOM},
            start_new_session=True,
        )
    return ours, process


def ask(connection: socket.socket, request: Mapping[str, Any], files: Sequence[int] = ()) -> None:
    """Send a request. A server that has ended hears nothing: the answers end too. Raises
    ``ConfigError`` for one that does not fit a packet."""
    packet = json.dumps(request).encode()
    if len(packet) > LARGEST:
        raise ConfigError(
            f"the environment variables of a process take {len(packet):,} bytes, and it is forked "
            f"with at most {LARGEST:,}. Unset those that the run does not need."
        )
    with suppress(ConnectionError):
        socket.send_fds(connection, [packet], files)


def adopt(on: bool) -> None:
    """Become the parent of what is below us and has lost its own, as the kernel offers it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(on))


# -- the server -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kept:
    """A fork that has not ended, and is our child."""

    id: str
    caller: socket.socket
    kill_left: str | None
    """The ``PRIME_RL_PROCESS`` of what is killed when it has ended: all that it has started."""


class ForkServer:
    """The state of this process."""

    def __init__(self, connection: socket.socket, keeps: bool, run: Run) -> None:
        """``connection``: to the caller, or where callers connect, each for one process."""
        self._main = connection
        self._listens = bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
        self._keeps = keeps
        self._run = run
        self._callers: list[socket.socket] = [] if self._listens else [connection]
        self._kept: dict[int, Kept] = {}
        """By process id."""
        self._wake, self._waker = os.pipe()
        for end in (self._wake, self._waker):
            os.set_blocking(end, False)

    def serve(self) -> None:
        """Until the caller closes the connection or ends, or SIGTERM arrives."""
        stops: list[int] = []
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGTERM, lambda number, frame: stops.append(number))
        while not stops and (self._listens or self._callers):
            sources: list[Any] = [*self._callers, self._wake]
            if self._listens:
                sources.append(self._main)
            for source in select.select(sources, [], [])[0]:
                if source is self._wake:
                    with suppress(BlockingIOError):
                        os.read(self._wake, 4096)
                    self._reap()
                elif self._listens and source is self._main:
                    self._callers.append(self._main.accept()[0])
                else:
                    self._hear(source)

        self._end_all()

    def _hear(self, caller: socket.socket) -> None:
        try:
            message, files, _, _ = socket.recv_fds(caller, LARGEST, MOST_FILES)
        except ConnectionError:
            message, files = b"", []
        if not message:
            self._callers.remove(caller)
            return

        request = json.loads(message)
        if "kill" in request:
            for pid, kept in self._kept.items():  # not reaped: the number is still its own
                if kept.caller is caller and kept.id == request["kill"]:
                    os.kill(pid, signal.SIGKILL)
            return

        try:
            pid = self._fork(request, files) if self._keeps else self._give_away(request, files)
        except OSError as error:
            print(f"the fork server cannot fork: {error}", file=sys.stderr, flush=True)
            _answer(caller, id=request["id"], status=1)
            return
        finally:
            for file in files:
                os.close(file)

        if self._keeps:
            kill_left = request.get("kill_left")
            self._kept[pid] = Kept(request["id"], caller=caller, kill_left=kill_left)
        _answer(caller, id=request["id"], pid=pid)

    def _fork(self, request: dict[str, Any], files: list[int]) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            return pid

        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # it died before the call above
                os._exit(1)
            self._close()
            if PARENT_PID in request["env"]:
                request["env"][PARENT_PID] = str(parent)
            become(request, files, self._run)
        finally:
            os._exit(1)

    def _give_away(self, request: dict[str, Any], files: list[int]) -> int:
        """Fork twice: when the process between has ended, the kernel gives its child to the
        supervisor, the next process above that adopts."""
        answer, told = os.pipe()
        gate, opened = os.pipe()
        between = os.fork()
        if not between:
            self._close()
            os.close(answer)
            _fork_again(told, gate, opened=opened, request=request, files=files, run=self._run)

        os.close(told)
        os.waitpid(between, 0)  # from here on the supervisor is the parent of the fork
        text = os.read(answer, 64)
        for end in (answer, gate, opened):
            os.close(end)
        if not text:
            raise OSError("the log says why")
        return int(text)

    def _close(self) -> None:
        """In a fork: leave nothing of the server."""
        signal.set_wakeup_fd(-1)
        for each in (self._main, *self._callers, *(kept.caller for kept in self._kept.values())):
            each.close()
        for end in (self._wake, self._waker):
            os.close(end)

    def _reap(self) -> None:
        """Report the forks that have ended, and end what they have left."""
        for pid, status in iter(_ended_child, (0, 0)):
            kept = self._kept.pop(pid, None)
            if kept is None:
                continue
            if kept.kill_left is not None:
                _kill_left(kept.kill_left)
            _answer(kept.caller, id=kept.id, status=os.waitstatus_to_exitcode(status))

    def _end_all(self) -> None:
        marks = [kept.kill_left for kept in self._kept.values() if kept.kill_left is not None]
        for pid in self._kept:
            os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while self._kept and time.monotonic() < deadline:
            time.sleep(0.02)
            self._reap()

        for pid in self._kept:
            os.kill(pid, signal.SIGKILL)
        for mark in marks:
            _kill_left(mark)


def _answer(caller: socket.socket, **fields: Any) -> None:
    with suppress(OSError):  # nothing waits for it any more
        caller.send(json.dumps(fields).encode())


def _ended_child() -> tuple[int, int]:
    """Process id and status of a child that has ended; ``(0, 0)`` without one."""
    try:
        return os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return 0, 0


def _kill_left(mark: str) -> None:
    """Kill what a fork that has ended has started: it is our child now (``adopt``)."""
    import psutil

    while True:
        left = []
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if child.status() != psutil.STATUS_ZOMBIE and child.environ().get(PROCESS) == mark:
                    child.kill()
                    left.append(child)
        if not left:
            return
        psutil.wait_procs(left, timeout=GRACE_SECONDS)


# -- in the fork ----------------------------------------------------------------------------------


def _fork_again(
    told: int, gate: int, opened: int, request: Mapping[str, Any], files: list[int], run: Run
) -> NoReturn:
    """Fork a child that waits for the gate to open, send its process id, and exit."""
    try:
        child = os.fork()
        if child:
            os.write(told, str(child).encode())
        else:
            for end in (told, opened):
                os.close(end)
            os.read(gate, 1)
            os.close(gate)
            become(request, files, run)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def become(request: Mapping[str, Any], files: Sequence[int], run: Run) -> NoReturn:
    """Be the process that was asked for, in this fork, from start to end."""
    code = 1
    try:
        if request.get("session", True):
            os.setsid()
        _place(files)
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stdout = _text_to(1)
        sys.stderr = _text_to(2, errors="backslashreplace")
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(request["env"])  # copies: nothing points to what `show` overwrites
        if "cwd" in request:
            os.chdir(request["cwd"])
        hidden = request.get("hidden", ())
        show(request["argv"], {n: v for n, v in request["env"].items() if n not in hidden})
        run(request["argv"])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _place(files: Sequence[int]) -> None:
    """The n-th file becomes descriptor n. First all move out of the way: one of them may have the
    number that another one gets."""
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, len(files)) for file in files]
    for file in {*files} - {*range(len(files))}:
        os.close(file)
    for number, file in enumerate(moved):
        os.dup2(file, number)
        os.close(file)


def _text_to(descriptor: int, errors: str = "strict") -> TextIO:
    """A stream by lines: what a process has printed is in its log also if it is killed."""
    return open(descriptor, "w", 1, encoding="utf-8", errors=errors, closefd=False)


def run_module(argv: Sequence[str]) -> None:
    """``python -P -m MODULE ARGUMENTS``."""
    _, _, _, module, *arguments = argv
    sys.orig_argv = [*argv]
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def show(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Overwrite what the kernel shows of this process: command line and environment, as far as they
    fit (proc(5): ``arg_start`` to ``env_end``)."""
    fields = Path("/proc/self/stat").read_text("utf-8").rpartition(")")[2].split()
    arg_start, arg_end, env_start, env_end = map(int, fields[45:49])
    named = sorted(env.items(), key=lambda item: item[0] != PROCESS)  # the one that must fit
    block = b"\0".join(os.fsencode(f"{name}={value}") for name, value in named)
    size = env_end - env_start
    ctypes.memmove(env_start, block[: size - 1].ljust(size, b"\0"), size)
    # As of any program that names itself: one text, to the first zero, if the last byte is none.
    size = arg_end - arg_start
    title = os.fsencode(" ".join(argv))[: size - 2]
    ctypes.memmove(arg_start, title.ljust(size - 1, b"\0") + b"-", size)


# -- the process ----------------------------------------------------------------------------------


def main(prepare: Callable[[], None], keeps: bool, run: Run = run_module) -> None:
    """Serve the caller at the other end of our standard input, and end with it. ``prepare``
    imports, when the first request arrives. ``keeps``: forks, and what these leave, are our
    children."""
    exit_with_parent()
    if keeps:
        adopt(True)
    connection = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    select.select([connection], [], [])
    with lasting_imports():
        prepare()
    ForkServer(connection, keeps=keeps, run=run).serve()


def import_all(names: Sequence[str]) -> None:
    for name in names:
        with suppress(ImportError):  # the process that needs it says so
            importlib.import_module(name)


if __name__ == "__main__":
    main(lambda: import_all(sys.argv[1:-1]), keeps=False)
