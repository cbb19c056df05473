"""The orchestrator's end of the fork server (``prime_rl_app.forkserver``), which keeps its forks.

A worker that dies is replaced at once, and what it has started ends with it. All end when the
orchestrator does, however that ends.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from prime_rl.errors import ConfigError
from prime_rl.rundir.attempts import PROCESS
from prime_rl.variables import for_workers
from prime_rl_app import forkserver

NUMPY_THREADS = {"OPENBLAS_NUM_THREADS": "1"}
"""The fork server must have one thread."""
FAILED = b"\0failed: "
"""Before the reason of a worker that could not start, on its pipe. An environment may write into
the pipe too."""

log = logging.getLogger(__name__)


class ForkAnswer(msgspec.Struct):
    """One answer of the fork server."""

    id: str
    pid: int | None = None
    status: int | None = None
    """Its exit code, when it has ended."""


@dataclass(eq=False)
class WorkerFork:
    """One worker's process."""

    id: str
    ended: asyncio.Future[str]
    """How it ended: ``was ended by SIGSEGV``."""
    reason: int
    """Our end of the pipe on which it says why it cannot start."""
    pid: int | None = None
    failure: str | None = None
    """Why it could not start."""


class WorkerForks:
    """Starts processes by a fork server, and that where there is none."""

    def __init__(self, disabled: Sequence[str] = ()) -> None:
        """``disabled``: plugins that the run does not load (``plugins.disabled``)."""
        self._disabled = disabled
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._reader: asyncio.Task[None] | None = None
        self._forks: dict[str, WorkerFork] = {}
        self._numbers = itertools.count()

    async def start(self, name: str, address: str, request: Mapping[str, Any]) -> WorkerFork:
        """Start a worker that serves ``request`` at ``address``."""
        if self._process is None:
            self._start_server()
        assert self._connection is not None

        reason, reason_of_worker = os.pipe()
        for end in (reason, reason_of_worker):
            os.set_blocking(end, False)
        ended = asyncio.get_running_loop().create_future()
        fork = WorkerFork(f"{name} {next(self._numbers)}", ended=ended, reason=reason)
        self._forks[fork.id] = fork
        mark = marker(fork.id)
        command = {
            "id": fork.id,
            "argv": [sys.executable, "-P", "-m", "prime_rl_env_workers"],
            "env": {**_environment(), **request.get("env", {}), PROCESS: mark},
            # The keys of the env: programs of other envs can read what /proc shows.
            "hidden": [*request.get("env", {})],
            "kill_left": mark,
        }
        # A file, because it has the key of the connection and may be long.
        with tempfile.TemporaryFile() as file, os.fdopen(reason_of_worker, "wb"):
            file.write(json.dumps({"address": address, **request}).encode())
            file.seek(0)
            files = (file.fileno(), 2, 2, reason_of_worker)
            try:
                # Waits, where a server that still imports has got many requests.
                await asyncio.to_thread(forkserver.ask, self._connection, command, files)
            except ConfigError:
                del self._forks[fork.id]
                raise

        return fork

    def kill(self, fork: WorkerFork) -> None:
        """Kill a worker. ``ended`` follows."""
        if not fork.ended.done() and self._connection is not None:
            forkserver.ask(self._connection, {"kill": fork.id})

    async def close(self) -> None:
        """End all workers, and what they have started."""
        if self._process is not None:
            self._process.terminate()
        if self._reader is not None:
            await self._reader

    def _start_server(self) -> None:
        server = [sys.executable, "-P", "-m", "prime_rl_env_workers.forked", *self._disabled]
        # What an environment prints goes to our log.
        self._connection, self._process = forkserver.start(server, env=_environment(), log=2)
        self._reader = asyncio.create_task(self._read(self._connection, self._process))

    async def _read(self, connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
        """Hear what the fork server answers, until it ends; then every worker has ended."""
        try:
            while answer := await _receive(connection):
                self._hear(answer)
        except Exception:  # nobody would hear the end of a worker any more
            log.exception("the answers of the process that forks workers cannot be read")
            process.kill()

        how = ending(await asyncio.to_thread(process.wait))
        connection.close()
        self._process = self._connection = None
        for fork in [*self._forks.values()]:
            self._end(fork, f"ended with the process that forks workers, which {how}")

    def _hear(self, packet: bytes) -> None:
        try:
            answer = msgspec.json.decode(packet, type=ForkAnswer)
        except (ValueError, RecursionError):
            text = "the process that forks workers sent %r, which is no answer; it is ignored"
            log.warning(text, packet[:200])
            return

        fork = self._forks.get(answer.id)
        if fork is None:
            return
        fork.pid = answer.pid or fork.pid
        if answer.status is not None:
            self._end(fork, ending(answer.status))

    def _end(self, fork: WorkerFork, how: str) -> None:
        del self._forks[fork.id]
        fork.failure = _read_reason(fork.reason)
        if not fork.ended.done():
            fork.ended.set_result(how)


async def _receive(connection: socket.socket) -> bytes:
    """The next packet; empty: the other end is closed. The socket stays one that blocks, for
    requests."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(connection, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(connection)
    with suppress(ConnectionError):
        return connection.recv(forkserver.LARGEST, socket.MSG_DONTWAIT)
    return b""


def _read_reason(pipe: int) -> str | None:
    """Why a worker that has ended could not start; None: it did not say."""
    try:
        data = os.read(pipe, 1 << 16)
    except BlockingIOError:  # a process that it has left holds the other end
        data = b""
    finally:
        os.close(pipe)
    _, mark, text = data.rpartition(FAILED)
    return text.decode(errors="replace") if mark else None


def _environment() -> dict[str, str]:
    return NUMPY_THREADS | for_workers()


def marker(worker: str) -> str:
    """``PRIME_RL_PROCESS`` of a worker and of what it starts."""
    attempt, _, rest = os.environ.get(PROCESS, "0::").partition(":")
    return f"{attempt}:env worker {worker.replace(':', ' ')}:{rest.partition(':')[2]}"


def ending(code: int) -> str:
    """How a process has ended, by its exit code."""
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
