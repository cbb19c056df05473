"""Engine and trainer start from one process that has imported torch and transformers::

    supervisor --start--> fork server        ``forkserver``; it gives its forks away
         |                     +- fork --> engine, trainer: children of the supervisor
         +--Popen--> orchestrator, and all that cannot be forked

Each of the two takes three CPU seconds to import the same. A package declares by an entry point
``prime_rl.forks`` which of its modules may start so, and what is imported before: ``"MODULE" =
"IMPORTED"``. Everything else starts as before: on other systems than Linux, with a GPU in sight
(CUDA does not survive a fork), with other interpreter options, and with environment variables
that libraries read while they are imported and that the first such process did not have.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, cast

from prime_rl.entries import entries
from prime_rl.rundir.attempts import PROCESS
from prime_rl.rundir.machine import visible_gpus
from prime_rl_app import forkserver

GROUP = "prime_rl.forks"
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Names of the settings of torch's allocator on a GPU."""
OWN = ("PRIME_RL_", "NO_PROXY", "no_proxy", *ALLOCATOR)
"""Variables that no library reads while it is imported, or that say nothing without a GPU. Forks
may differ in them: trainers have settings of the allocator, and engines do not."""
GUARD = "guard"
"""The run's name for what serves all its attempts, and ends with it."""
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
                return Fork(self._server, argv, env=env, log=stdout)
        popen: Any = subprocess.Popen
        return cast(subprocess.Popen[bytes], popen(argv, stdout=stdout, env=env, **given))

    def _can_fork(self, argv: Sequence[str], env: Mapping[str, str]) -> bool:
        words = [*argv[:3], *argv[3:4]]
        known = words[:3] == [sys.executable, "-P", "-m"] and words[-1] in self._modules
        size = sum(len(word) for word in (*argv, *env, *env.values()))
        fits = size < forkserver.LARGEST / 4
        return known and fits and sys.platform == "linux" and not visible_gpus()


class _Server:
    """The supervisor's end of the fork server."""

    def __init__(self, imports: Sequence[str], env: Mapping[str, str], log: Any) -> None:
        self.read_early = _read_early(env)
        attempt, _, rest = env.get(PROCESS, "").partition(":")
        named = {PROCESS: f"{attempt}:{GUARD}:{rest.partition(':')[2]}"} if attempt else {}
        self.socket, self.process = forkserver.start(
            [sys.executable, "-P", "-m", forkserver.__name__, *imports],
            env={**env, **named},
            log=log,
        )
        weakref.finalize(self, _close, self.socket, self.process)
        self.waiting: dict[str, Fork] = {}
        """Forks whose process ids have not arrived, by the id of the request."""
        self._asked = 0

    def ask(self, fork: Fork, request: Mapping[str, Any], log: int) -> None:
        forkserver.adopt(True)  # the kernel gives us the child of a fork that has ended
        self._asked += 1
        self.waiting[str(self._asked)] = fork
        with open(os.devnull, "rb") as null:
            files = (null.fileno(), log, log)
            forkserver.ask(self.socket, {"id": str(self._asked), **request}, files)

    def listen(self) -> None:
        """Take the process ids that have arrived."""
        while self.waiting:
            try:
                answer = self.socket.recv(forkserver.LARGEST, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except ConnectionError:
                answer = b""

            if not answer:
                # 0: another caller has waited for it. It ends by itself with the supervisor only.
                code = self.process.wait() or -signal.SIGKILL
                for fork in self.waiting.values():
                    fork.returncode = code
                self.waiting.clear()
            else:
                started = json.loads(answer)
                fork = self.waiting.pop(started["id"])
                if "pid" in started:
                    fork.adopted(started["pid"])
                else:
                    fork.returncode = started["status"]

        forkserver.adopt(False)


class Fork(subprocess.Popen[bytes]):
    """A process that the fork server starts. Until then it has the id of the server, so killing one
    of them kills the other."""

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
