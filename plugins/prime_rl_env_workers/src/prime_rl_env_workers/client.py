# mypy: allow-subclassing-any
"""Requests to one worker."""

from __future__ import annotations

from contextlib import suppress

import zmq
from verifiers.v1.serve.client import EnvClient
from verifiers.v1.serve.types import HealthRequest, HealthResponse

from prime_rl.wire.sockets import curve_keys, know_server


class WorkerLost(Exception):
    """The worker that ran an episode has ended or was replaced; the text names it and says why."""


class BadResult(Exception):
    """The result or the error of an episode that gives no rollout."""


class Alive(HealthResponse):
    """The answer to ``health``."""

    instance: str = ""
    """Which process answers. Empty: a server of another make."""


class WorkerClient(EnvClient):
    """verifiers' client. When its worker has gone, every request fails at once."""

    def __init__(self, address: str, key: bytes | None = None) -> None:
        """``key``: 32 bytes, for a server that asks for a key."""
        # verifiers connects at once, and the key of a connection is set before it.
        super().__init__(address if key is None else "inproc://nowhere")
        self.address = address
        if key is not None:
            self.socket.close()  # type: ignore[has-type]  # of a class without types
            public, _ = curve_keys(key)
            self.socket = self.ctx.socket(zmq.DEALER)
            self.socket.setsockopt(zmq.LINGER, 0)
            self.socket.setsockopt(zmq.SNDHWM, 0)
            self.socket.setsockopt(zmq.RCVHWM, 0)
            know_server(self.socket, public)
            self.socket.connect(address)

    async def alive(self) -> Alive:
        """Wait for the answer of the worker's event loop. Raises ``WorkerLost``."""
        answer: Alive = await self._request(HealthRequest(), Alive)
        return answer

    def lose(self, error: WorkerLost) -> int:
        """Fail the requests in flight. Returns how many there were."""
        waiting = [future for future in self._pending.values() if not future.done()]
        self._pending.clear()
        for future in waiting:
            future.set_exception(error)
        return len(waiting)

    async def close(self) -> None:
        with suppress(Exception):
            await super().close()
