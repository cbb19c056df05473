# mypy: allow-subclassing-any
"""Requests to one worker."""

from __future__ import annotations

from contextlib import suppress

from verifiers.v1.serve.client import EnvClient
from verifiers.v1.serve.types import HealthRequest, HealthResponse


class WorkerLost(Exception):
    """The worker that ran an episode has ended or was replaced; the text names it and says why."""


class BadResult(Exception):
    """What an episode returned or raised, where no rollout can be made of it."""


class Alive(HealthResponse):
    """The answer to ``health``."""

    instance: str = ""
    """Which process answers. Empty: a server of another make."""


class WorkerClient(EnvClient):
    """verifiers' client. When its worker has gone, every request fails at once."""

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
