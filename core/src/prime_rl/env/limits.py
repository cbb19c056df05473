"""The time limit of episodes whose engines sleep while the trainer has their memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class AwakeTime:
    """Time in which the engines are awake. An episode in flight keeps its place while they sleep,
    and does nothing."""

    def __init__(self) -> None:
        self._asleep = False
        self._limits: dict[asyncio.Timeout, float] = {}
        """The seconds that are left, as of the moment at which the engines fell asleep."""

    def stop(self) -> None:
        """The engines fall asleep."""
        if self._asleep:
            return
        self._asleep = True
        now = asyncio.get_running_loop().time()
        for limit in self._limits:
            when = limit.when()
            if when is not None and not limit.expired():
                self._limits[limit] = when - now
                limit.reschedule(None)

    def go_on(self) -> None:
        """The engines are awake."""
        if not self._asleep:
            return
        self._asleep = False
        now = asyncio.get_running_loop().time()
        for limit, left in self._limits.items():
            if not limit.expired():
                limit.reschedule(now + left)

    @asynccontextmanager
    async def limit(self, seconds: float | None) -> AsyncIterator[None]:
        """Raises ``TimeoutError`` after so many seconds in which the engines were awake; None: no
        limit."""
        if seconds is None:
            yield
            return

        limit = asyncio.timeout(None if self._asleep else seconds)
        try:
            async with limit:
                self._limits[limit] = seconds
                try:
                    yield
                finally:
                    del self._limits[limit]
        except TimeoutError as error:
            if not limit.expired():  # it is of the episode's own
                raise
            text = f"the episode exceeded its limit of {seconds:g} s (timeout in the env's table)"
            raise TimeoutError(text) from error
