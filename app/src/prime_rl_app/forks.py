"""Engine and trainer start from one process that has imported torch and transformers::

    supervisor --start--> fork server        imports once, is alone in its session, has no thread
         |                     +- fork -+- fork --> engine   becomes a child of the supervisor
         |                     +- fork -+- fork --> trainer
         +--Popen--> orchestrator, and all that cannot be forked

Each of the two takes three CPU seconds to import the same. A package declares by an entry point
``prime_rl.forks`` which of its modules may start so, and what is imported before: ``"MODULE" =
"IMPORTED"``. Everything else starts as before: on other systems than Linux, with a GPU in sight
(CUDA does not survive a fork), with other interpreter options, and with environment variables
that libraries read while they are imported and that the first such process did not have.

A fork is in each respect the process that its command names: session, files, environment, command
line, also as the kernel shows them, for by ``PRIME_RL_PROCESS`` a run finds its processes.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, cast

from prime_rl.entries import entries
from prime_rl.rundir.attempts import PROCESS
from prime_rl.rundir.machine import visible_gpus
from prime_rl.rundir.processes import exit_with_parent, lasting_imports

GROUP = "prime_rl.forks"
_PR_SET_CHILD_SUBREAPER = 36
OWN = ("PRIME_RL_", "NO_PROXY", "no_proxy")
"""Variables that no library reads while it is imported. Forks may differ in them."""
GUARD = "guard"
"""The run's name for what serves all its attempts, and ends with it."""
ROOM = "-" * 2048
"""Space for command line and environment of forks, which overwrite the fork server's."""
LARGEST = 1 << 17
"""Bytes of a request: arguments and environment."""
POLL_SECONDS = 0.02


class Forks:
    """Starts processes as ``subprocess.Popen`` does, and forks those that it can."""

    def __init__(self) -> None:
        self._modules = {entry.name: entry.value for entry in entries(GROUP)}
        self._server: _Server | None = None

    def __call__(
        self, argv: Sequence[str], *, stdout: Any, env: Mapping[str, str], **given: Any
    ) -> subprocess.Popen[bytes]:
        if self._can_fork(argv, env):
            if self._server is None or self._server.process.poll() is not None:
                self._server = _Server(sorted({*self._modules.values()}), env, stdout)
            if _read_early(env) == self._server.read_early:
                return Fork(self._server, argv, env, stdout)
        popen: Any = subprocess.Popen
        return cast(subprocess.Popen[bytes], popen(argv, stdout=stdout, env=env, **given))

    def _can_fork(self, argv: Sequence[str], env: Mapping[str, str]) -> bool:
        words = [*argv[:3], *argv[3:4]]
        known = words[:3] == [sys.executable, "-P", "-m"] and words[-1] in self._modules
        size = sum(len(word) for word in (*argv, *env, *env.values()))
        return known and size < LARGEST / 4 and sys.platform == "linux" and not visible_gpus()


class _Server:
    """The supervisor's end of the fork server."""

    def __init__(self, imports: Sequence[str], env: Mapping[str, str], log: Any) -> None:
        self.read_early = _read_early(env)
        attempt, _, rest = env.get(PROCESS, "").partition(":")
        named = {PROCESS: f"{attempt}:{GUARD}:{rest.partition(':')[2]}"} if attempt else {}
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "prime_rl_app.forks", *imports, ROOM],
                stdin=theirs.fileno(),
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**env, **named, "PRIME_RL_ROOM": ROOM},
                start_new_session=True,
            )

        weakref.finalize(self, _close, self.socket, self.process)
        self.waiting: list[Fork] = []
        """Forks whose process ids have not arrived, in order."""

    def ask(self, fork: Fork, request: Mapping[str, Any], log: int) -> None:
        _adopt(True)  # the kernel gives us the child of a fork that has ended
        self.waiting.append(fork)
        with suppress(OSError):  # it has ended: `listen` finds that
            socket.send_fds(self.socket, [json.dumps(request).encode()], [log])

    def listen(self) -> None:
        """Take the process ids that have arrived."""
        while self.waiting:
            try:
                answer = self.socket.recv(LARGEST, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except ConnectionError:
                answer = b""

            if not answer:
                # 0: another caller has waited for it. It ends by itself with the supervisor only.
                code = self.process.wait() or -signal.SIGKILL
                for fork in self.waiting:
                    fork.returncode = code
                self.waiting.clear()
            else:
                self.waiting.pop(0).adopted(int(answer))

        _adopt(False)


class Fork(subprocess.Popen[bytes]):
    """A process that the fork server starts. Until it has, its id is the server's: who kills the
    one kills the other."""

    _child_created = False  # for Popen's finalizer

    def __init__(
        self, server: _Server, argv: Sequence[str], env: Mapping[str, str], log: Any
    ) -> None:
        self.args = argv
        self.pid = server.process.pid
        self.returncode = None
        self.stdin = self.stdout = self.stderr = None
        self._server: _Server | None = server
        file = log if isinstance(log, int) else log.fileno()
        server.ask(self, {"argv": [*argv], "env": dict(env)}, file)

    def adopted(self, pid: int) -> None:
        self.pid = pid
        self._server = None

    def poll(self) -> int | None:
        if self._server is not None:
            self._server.listen()
        if self._server is None and self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # another caller has waited for it
                pid = self.pid
                status = 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)

        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(POLL_SECONDS)
        return code


def _read_early(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if not name.startswith(OWN)}


def _close(connection: socket.socket, server: subprocess.Popen[bytes]) -> None:
    connection.close()
    server.kill()
    server.wait()


def _adopt(on: bool) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(on))


# -- in the fork server ---------------------------------------------------------------------


def serve(connection: socket.socket) -> None:
    """Fork for each request, until the supervisor has ended."""
    while True:
        message, files, _, _ = socket.recv_fds(connection, LARGEST, 1)
        if not message:
            return
        answer, told = os.pipe()
        gate, opened = os.pipe()
        between = os.fork()
        if not between:
            connection.close()
            os.close(answer)
            _fork_again(told, gate, opened, message, files)

        os.close(told)
        os.waitpid(between, 0)  # from here on the supervisor is the parent of the fork
        pid = os.read(answer, 64)
        for end in (answer, gate, opened, *files):
            os.close(end)
        if not pid:
            sys.exit("the fork server cannot fork; its log says why")
        connection.send(pid)


def _fork_again(told: int, gate: int, opened: int, message: bytes, files: list[int]) -> NoReturn:
    """Tell the number of our child, which goes on when the gate opens, and end."""
    try:
        child = os.fork()
        if child:
            os.write(told, str(child).encode())
        else:
            for end in (told, opened):
                os.close(end)
            os.read(gate, 1)
            os.close(gate)
            become(json.loads(message), files)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def become(request: Mapping[str, Any], files: Sequence[int]) -> NoReturn:
    """Be the process that was asked for, in this fork, from start to end."""
    code = 1
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        for number, file in enumerate((null, files[0], files[0])):
            os.dup2(file, number)
        for file in (null, *files):
            os.close(file)
        os.environ.clear()
        os.environ.update(request["env"])  # copies: nothing points to what `show` overwrites
        show(request["argv"], request["env"])
        _, _, _, module, *arguments = sys.orig_argv = request["argv"]
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
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


def show(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Overwrite what the kernel shows of this process: command line and environment, as far as they
    fit (proc(5): ``arg_start`` to ``env_end``)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arg_start, arg_end, env_start, env_end = map(int, fields[45:49])
    named = sorted(env.items(), key=lambda item: item[0] != PROCESS)  # the one that must fit
    block = b"\0".join(os.fsencode(f"{name}={value}") for name, value in named)
    size = env_end - env_start
    ctypes.memmove(env_start, block[: size - 1].ljust(size, b"\0"), size)
    # As of any program that names itself: one text, to the first zero, if the last byte is none.
    size = arg_end - arg_start
    title = os.fsencode(" ".join(argv))[: size - 2]
    ctypes.memmove(arg_start, title.ljust(size - 1, b"\0") + b"-", size)


def main(imports: Sequence[str]) -> None:
    """Import, then serve. Ends with the supervisor."""
    exit_with_parent()
    connection = socket.socket(fileno=os.dup(0))
    with lasting_imports():
        for name in imports:
            with suppress(ImportError):  # the process that needs it says so
                importlib.import_module(name)
    serve(connection)


if __name__ == "__main__":
    main(sys.argv[1:-1])
