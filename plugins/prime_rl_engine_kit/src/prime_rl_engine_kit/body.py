"""Read the body of a request within bounds, and cancel its work if the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request as HTTPRequest

from prime_rl_engine_kit.errors import RequestError

MAX_BODY_BYTES = 64 * 2**20
MAX_UNREAD_BYTES = 2 * MAX_BODY_BYTES
"""Most bytes of all bodies that are incomplete."""
BODY_SECONDS = 30.0
"""For a body to come to its end."""

Result = TypeVar("Result")


class ClientGone(Exception):
    """The client closed the connection before its answer was ready."""


class _Unread:
    """Bytes of the bodies that this process is reading."""

    total = 0


async def read_body(http: HTTPRequest, most: int = MAX_BODY_BYTES) -> bytes:
    """Raises ``RequestError``: 413 beyond ``most`` bytes, 429 if the bodies of all clients that are
    still sending exceed 128 MiB, 408 after 30 seconds; and starlette's ``ClientDisconnect``."""
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in http.stream():
                data += chunk
                _Unread.total += len(chunk)
                if len(data) > most:
                    raise RequestError(f"the body has more than {most / 2**20:.3g} MiB", 413)
                if _Unread.total > MAX_UNREAD_BYTES:
                    limit = f"{MAX_UNREAD_BYTES // 2**20} MiB"
                    raise RequestError(f"the bodies that are being read exceed {limit}", 429)
    except TimeoutError:
        raise RequestError(f"the body did not come within {BODY_SECONDS:g} s", 408) from None
    finally:
        _Unread.total -= len(data)

    return bytes(data)


async def while_wanted(http: HTTPRequest, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of ``work``. Raises ``ClientGone`` and cancels it if the client disconnects."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(http))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _disconnected(http: HTTPRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
