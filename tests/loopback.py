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


@asynccontextmanager
async def listening(app: web.Application, port: int = 0, **options: Any) -> AsyncIterator[str]:
    """The URL of ``app``. Port 0: a free one. Options are ``web.AppRunner``'s."""
    runner = web.AppRunner(app, **options)
    await runner.setup()
    listener = socket.create_server(("127.0.0.1", port))
    await web.SockSite(runner, listener).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        # asyncio never closes a connection that it is still setting up when its server closes.
        asyncio.get_running_loop().remove_reader(listener)
        for _ in range(ACCEPTING):
            await asyncio.sleep(0)
        await runner.cleanup()
