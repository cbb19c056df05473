"""Read the body of a request, and cancel its work if the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request as HTTPRequest

from prime_rl_engine_kit.errors import RequestError

MAX_BODY_BYTES = 64 * 2**20

Result = TypeVar("Result")


class ClientGone(Exception):
    """The client closed the connection before its answer was ready."""


async def read_body(http: HTTPRequest) -> bytes:
    """Raises ``RequestError`` (413) beyond 64 MiB."""
    data = bytearray()
    async for chunk in http.stream():
        data += chunk
        if len(data) > MAX_BODY_BYTES:
            raise RequestError(f"the body has more than {MAX_BODY_BYTES // 2**20} MiB", 413)
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
