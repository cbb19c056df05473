"""Between the event loop and the engine's thread: await requests, abort those of lost clients."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence

from starlette.requests import Request as HTTPRequest

from prime_rl_embedded.loop import EngineLoop
from prime_rl_embedded.requests import Request
from prime_rl_engine_kit.body import while_wanted
from prime_rl_engine_kit.errors import RequestError


def notify(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: object) -> None:
    """Call ``function`` in the event loop, from any thread. Does nothing if the loop is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *args)


async def complete(engine: EngineLoop, http: HTTPRequest, requests: Sequence[Request]) -> None:
    """Run requests to the end. Raises ``ClientGone``, or ``RequestError`` if the engine failed or
    its queue is full."""
    engine.check_room(len(requests))
    try:
        await while_wanted(http, _finish(engine, requests))
    finally:
        for request in requests:
            if request.finish_reason is None:
                engine.abort(request)
    raise_if_failed(engine, requests)


async def _finish(engine: EngineLoop, requests: Sequence[Request]) -> None:
    await asyncio.gather(*(_submit(engine, request) for request in requests))


def _submit(engine: EngineLoop, request: Request) -> asyncio.Future[None]:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def finish() -> None:
        if not future.done():
            future.set_result(None)

    request.on_finish = lambda _: notify(loop, finish)
    engine.submit(request)
    return future


async def stream_tokens(engine: EngineLoop, request: Request) -> AsyncGenerator[int]:
    """Yield the number of tokens whenever it grows. Leaving the iteration aborts the request."""
    engine.check_room(1)
    loop = asyncio.get_running_loop()
    news: asyncio.Queue[int | None] = asyncio.Queue()
    request.on_token = lambda r: notify(loop, news.put_nowait, len(r.token_ids))
    request.on_finish = lambda _: notify(loop, news.put_nowait, None)
    engine.submit(request)
    try:
        while (count := await news.get()) is not None:
            yield count
    finally:
        if request.finish_reason is None:
            engine.abort(request)

    raise_if_failed(engine, [request])


def raise_if_failed(engine: EngineLoop, requests: Sequence[Request]) -> None:
    for request in requests:
        if request.finish_reason == "error":
            status = 500 if engine.closed is None else 503
            raise RequestError(request.error or "the engine failed", status)
