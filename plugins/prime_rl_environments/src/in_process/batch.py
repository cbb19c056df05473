"""Engine requests of one tick of the event loop, sent together.

The siblings of a group, and the rollouts that a batch starts, ask at the same moment. An engine
that lists ``generate_batch`` in its model card takes them in one HTTP request, and answers each one
when it is ready (``prime_rl_engine_kit.batch``).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from typing import Any

import aiohttp
import msgspec

from in_process.seam import ProviderError
from prime_rl_engine_kit import batch
from prime_rl_engine_kit.batch import Abort, Answer, BatchRequest, RequestBatch, take_answers

Waiting = tuple[BatchRequest, "asyncio.Future[Answer]"]


class BatchConnection:
    """Sends requests to one engine."""

    def __init__(
        self, session: aiohttp.ClientSession, root: str, timeout: aiohttp.ClientTimeout
    ) -> None:
        """``root``: the engine's address without ``/v1``. ``timeout``: ``sock_read`` limits one
        request, not a whole batch."""
        self._session = session
        self._root = root
        self._seconds = timeout.sock_read
        self._timeout = aiohttp.ClientTimeout(total=None, connect=timeout.connect)
        self._waiting: list[Waiting] = []
        self._unwanted: list[str] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def send(self, request: BatchRequest) -> Answer:
        """Raises ``ProviderError`` with the engine's status and reason, 503 if it cannot be
        reached, 504 on a timeout. Cancelling aborts the request."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._flush)
        self._waiting.append((request, future))
        try:
            async with asyncio.timeout(self._seconds):
                answer = await future
        except TimeoutError as error:
            self._abort(request.request_id)
            raise ProviderError(f"{self._root}{batch.ROUTE}: timed out", status_code=504) from error
        except asyncio.CancelledError:
            self._abort(request.request_id)
            raise

        if answer.status != 200:
            text = f"{self._root}{batch.ROUTE}: HTTP {answer.status}: {answer.error}"
            raise ProviderError(text, status_code=answer.status)

        return answer

    async def close(self) -> None:
        """Cancel what runs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _flush(self) -> None:
        waiting = [each for each in self._waiting if not each[1].done()]
        self._waiting.clear()
        for start in range(0, len(waiting), batch.MAX_REQUESTS):
            self._start(self._run(waiting[start : start + batch.MAX_REQUESTS]))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, members: Sequence[Waiting]) -> None:
        missing = {index: future for index, (_, future) in enumerate(members)}
        failure: BaseException | None = None
        try:
            await self._exchange([request for request, _ in members], missing)
        except aiohttp.ClientError as error:
            reason = f"{type(error).__name__}: {error}"
            failure = ProviderError(f"{self._root}{batch.ROUTE}: {reason}", status_code=503)
        except ProviderError as error:
            failure = error
        finally:
            text = f"{self._root}{batch.ROUTE}: the engine ended its reply early"
            failure = failure or ProviderError(text, status_code=503)
            for future in missing.values():
                if not future.done():
                    future.set_exception(failure)

    async def _exchange(
        self, requests: Sequence[BatchRequest], missing: dict[int, asyncio.Future[Answer]]
    ) -> None:
        """Send a batch, and hand out its answers as they come."""
        async with self._session.post(
            self._root + batch.ROUTE,
            data=msgspec.msgpack.encode(RequestBatch(list(requests))),
            headers={"Content-Type": "application/msgpack"},
            timeout=self._timeout,
        ) as response:
            if response.status != 200:
                reason = (await response.text())[:2000]
                text = f"{self._root}{batch.ROUTE}: HTTP {response.status}: {reason}"
                raise ProviderError(text, status_code=response.status)

            buffer = bytearray()
            async for data in response.content.iter_any():
                buffer += data
                for answer in take_answers(buffer):
                    future = missing.pop(answer.index)
                    if not future.done():
                        future.set_result(answer)

    def _abort(self, request_id: str) -> None:
        if not self._unwanted:
            self._start(self._send_aborts())
        self._unwanted.append(request_id)

    async def _send_aborts(self) -> None:
        names = self._unwanted
        self._unwanted = []
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            body = msgspec.msgpack.encode(Abort(names))
            async with self._session.post(self._root + batch.ABORT_ROUTE, data=body):
                pass
