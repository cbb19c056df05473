"""``POST /inference/v1/generate_batch``: many requests in one body, each answered when it is ready.

Batch -> a Request each -> engine's thread -> finished -> one chunk for all that ended together
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, TypeVar

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse

from prime_rl_embedded.frontend import notify
from prime_rl_embedded.loop import EngineLoop
from prime_rl_embedded.requests import Request
from prime_rl_embedded.schema import Limits, generate_requests
from prime_rl_engine_kit.batch import (
    MAX_REQUESTS,
    Abort,
    Answer,
    BatchRequest,
    bytes_to_ids,
    frame,
    ids_to_bytes,
    logprobs_to_bytes,
)
from prime_rl_engine_kit.body import read_body
from prime_rl_engine_kit.errors import RequestError
from prime_rl_engine_kit.requests import GenerateBody, GenerateSampling

MEDIA_TYPE = "application/octet-stream"
MAX_ABORT_BYTES = 2**20
TOGETHER = 2**20
"""Bytes of requests that are read without a pause for other work of the event loop: some
milliseconds."""
LEAST = 2**12
"""Bytes that the smallest request counts as."""


class ReceivedRequest(BatchRequest, kw_only=True, omit_defaults=True):
    """A request of a client. Its sampling parameters are decoded later, with their own types."""

    sampling_params: msgspec.Raw = msgspec.Raw(b"\x80")  # type: ignore[assignment]  # narrower here


class ReceivedBatch(msgspec.Struct):
    """The body of a request. The length is checked before any request is decoded."""

    requests: Annotated[list[ReceivedRequest], msgspec.Meta(max_length=MAX_REQUESTS)]


class Batches:
    """The two routes, and the requests that run."""

    def __init__(self, engine: EngineLoop, limits: Limits) -> None:
        self.engine = engine
        self.limits = limits
        self._running: dict[str, Request] = {}

    async def generate(self, http: HTTPRequest) -> Response:
        batch = _decode(await read_body(http), ReceivedBatch)
        return StreamingResponse(
            self._answers(batch.requests), media_type="application/octet-stream"
        )

    async def abort(self, http: HTTPRequest) -> Response:
        names = _decode(await read_body(http, MAX_ABORT_BYTES), Abort).request_ids
        running = [self._running[name] for name in names if name in self._running]
        for request in running:
            self.engine.abort(request)
        return JSONResponse({"aborted": len(running)})

    async def _answers(self, requests: Sequence[ReceivedRequest]) -> AsyncIterator[bytes]:
        """Frames, as many at a time as are ready. Leaving the iteration aborts what still runs."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Queue[Answer] = asyncio.Queue()
        running: list[Request] = []
        try:
            num_read = 0
            for index, given in enumerate(requests):
                if num_read > TOGETHER:
                    await asyncio.sleep(0)
                    num_read = 0
                num_read += LEAST + len(given.token_ids) + len(given.sampling_params)
                try:
                    request = self._request(given)
                    self.engine.check_room(1)
                except RequestError as error:
                    ended.put_nowait(Answer(index=index, status=error.status, error=str(error)))
                    continue
                running.append(request)
                self._running[request.request_id] = request
                request.on_finish = lambda r, i=index: notify(
                    loop, ended.put_nowait, self._answer(i, r)
                )
                self.engine.submit(request)

            missing = len(requests)
            while missing:
                ready = [await ended.get()]
                while not ended.empty():
                    ready.append(ended.get_nowait())
                missing -= len(ready)
                yield b"".join(map(frame, ready))
        finally:
            for request in running:
                del self._running[request.request_id]
                if request.finish_reason is None:
                    self.engine.abort(request)

    def _request(self, given: ReceivedRequest) -> Request:
        """Raises ``RequestError``, also for what an answer of this route cannot hold."""
        length = len(given.token_ids) // 4
        if length > self.limits.max_model_len:
            raise RequestError(
                f"the prompt has {length} tokens; max_model_len is {self.limits.max_model_len}"
            )

        if len(given.sampling_params) > self.limits.max_body_bytes:
            raise RequestError(f"sampling_params has {len(given.sampling_params)} bytes")
        try:
            ids = bytes_to_ids(given.token_ids)
        except ValueError as error:
            raise RequestError(f"bad request: token_ids: {error}") from error

        sampling = _decode(given.sampling_params, GenerateSampling)
        for key, value, most in (
            ("n", sampling.n, 1),
            ("logprobs", sampling.logprobs, 1),
            ("prompt_logprobs", sampling.prompt_logprobs, None),
        ):
            if value is not None and (most is None or value > most):
                raise RequestError(f"{key} is {value}: use /inference/v1/generate")

        if given.request_id in self._running:
            raise RequestError(f"request_id {given.request_id!r} is running already")
        body = GenerateBody(
            token_ids=ids,
            sampling_params=sampling,
            model=given.model,
            cache_salt=given.cache_salt,
            request_id=given.request_id,
            priority=given.priority,
        )
        return generate_requests(body, self.limits)[0]

    def _answer(self, index: int, request: Request) -> Answer:
        """Called in the engine's thread."""
        if request.finish_reason == "error":
            status = 500 if self.engine.closed is None else 503
            return Answer(index=index, status=status, error=request.error or "the engine failed")

        answer = Answer(
            index=index,
            token_ids=ids_to_bytes(request.token_ids),
            logprobs=logprobs_to_bytes(request.logprobs),
            finish_reason=request.finish_reason,
            versions=request.version_spans(),
        )
        if request.routes is not None:
            start = request.params.routes_start
            routes = request.routes[start:]
            answer.routes = routes.tobytes()
            answer.routes_shape = routes.shape
            answer.routes_dtype = routes.dtype.name
            answer.routes_start = start
        return answer


Body = TypeVar("Body")


def _decode(data: bytes | msgspec.Raw, kind: type[Body]) -> Body:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise RequestError(f"bad request body: {error}") from error
