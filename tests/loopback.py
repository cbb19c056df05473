"""A server on loopback in a test's own event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

ACCEPTING = 5
"""Turns of the event loop: more than it takes until an accepted connection is the server's."""


class Server:
    """Serves ``app``; after ``refuse`` nothing listens at its address, until ``accept``."""

    def __init__(self, app: web.Application, port: int = 0, **options: Any) -> None:
        self._runner = web.AppRunner(app, **options)
        self._port = port
        self._change = asyncio.get_running_loop().create_task(self._runner.setup())
        self.accept()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def accept(self) -> None:
        self._change = asyncio.create_task(self._accept(self._change))

    def refuse(self) -> None:
        self._change = asyncio.create_task(self._refuse(self._change))

    async def ready(self) -> None:
        """Until the last change has been made."""
        await self._change

    async def close(self) -> None:
        self.refuse()
        await self._change
        await self._runner.cleanup()

    async def _accept(self, before: asyncio.Task[None]) -> None:
        await before
        self._listener = socket.create_server(("127.0.0.1", self._port))
        self._port = self._listener.getsockname()[1]
        await web.SockSite(self._runner, self._listener).start()

    async def _refuse(self, before: asyncio.Task[None]) -> None:
        await before
        if not self._runner.sites:
            return
        # asyncio never closes a connection that it is still setting up when its server closes.
        asyncio.get_running_loop().remove_reader(self._listener)
        for _ in range(ACCEPTING):
            await asyncio.sleep(0)
        for site in {*self._runner.sites}:
            await site.stop()


@asynccontextmanager
async def listening(app: web.Application, port: int = 0, **options: Any) -> AsyncIterator[str]:
    """The URL of ``app``. Port 0: a free one. Options are ``web.AppRunner``'s."""
    server = Server(app, port, **options)
    await server.ready()
    try:
        yield server.url
    finally:
        await server.close()
