"""The orchestrator's end of the fork server."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from prime_rl.variables import for_workers

NUMPY_THREADS = {"OPENBLAS_NUM_THREADS": "1"}
"""The fork server must have one thread."""
MOST_LINE = 1 << 16
"""Bytes of an answer."""

log = logging.getLogger(__name__)


class Answer(msgspec.Struct):
    """One line of the fork server (``forkserver.py``)."""

    id: str
    pid: int | None = None
    status: int | None = None
    """Its exit code, when it has ended."""
    failed: str | None = None
    """Why it could not start."""


@dataclass(eq=False)
class Fork:
    """One worker's process."""

    id: str
    ended: asyncio.Future[str]
    """How it ended: ``was ended by SIGSEGV``."""
    pid: int | None = None
    failure: str | None = None
    """Why it could not start."""


class Forks:
    """Starts processes by a fork server, and that where there is none."""

    def __init__(self, disabled: Sequence[str] = ()) -> None:
        """``disabled``: plugins that the run does not load (``plugins.disabled``)."""
        self._disabled = disabled
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
        self._reader: asyncio.Task[None] | None = None
        self._forks: dict[str, Fork] = {}
        self._numbers = itertools.count()

    async def start(self, name: str, address: str, request: Mapping[str, Any]) -> Fork:
        """Start a worker that serves ``request`` at ``address``."""
        async with self._starting:
            if self._process is None:
                await self._start_server()
        fork = Fork(f"{name} {next(self._numbers)}", asyncio.get_running_loop().create_future())
        self._forks[fork.id] = fork
        self._send({"id": fork.id, "address": address, **request})
        return fork

    def kill(self, fork: Fork) -> None:
        """Kill a worker. ``ended`` follows."""
        if not fork.ended.done():
            self._send({"kill": fork.id})

    async def close(self) -> None:
        """End all workers, and what they have started."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            with suppress(ProcessLookupError):
                self._process.terminate()  # while it imports, it does not read its stdin
            await self._process.wait()
        if self._reader is not None:
            await self._reader

    async def _start_server(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "prime_rl_env_workers.forkserver", *self._disabled),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=NUMPY_THREADS | for_workers(),
            start_new_session=True,
        )
        self._reader = asyncio.create_task(self._read(self._process))

    def _send(self, request: Mapping[str, Any]) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Hear what the fork server answers, until it ends; then every worker has ended."""
        assert process.stdout is not None
        rest = b""
        try:
            while data := await process.stdout.read(MOST_LINE):
                *lines, rest = (rest + data).split(b"\n")
                rest = rest[-MOST_LINE:]
                for line in filter(None, lines):
                    self._hear(line)
        except Exception:  # nobody would hear the end of a worker any more
            log.exception("the answers of the process that forks workers cannot be read")
            process.kill()

        how = ending(await process.wait())
        self._process = None
        for fork in [*self._forks.values()]:
            self._end(fork, f"ended with the process that forks workers, which {how}")

    def _hear(self, line: bytes) -> None:
        try:
            answer = msgspec.json.decode(line, type=Answer)
        except (ValueError, RecursionError):
            text = "the process that forks workers wrote %r where its answers go; it is ignored"
            log.warning(text, line[:200])
            return

        fork = self._forks.get(answer.id)
        if fork is None:
            return
        fork.pid = answer.pid or fork.pid
        fork.failure = answer.failed
        if answer.status is not None:
            self._end(fork, ending(answer.status))

    def _end(self, fork: Fork, how: str) -> None:
        del self._forks[fork.id]
        if not fork.ended.done():
            fork.ended.set_result(how)


def ending(code: int) -> str:
    """How a process has ended, by its exit code."""
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
