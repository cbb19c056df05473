"""The routes of the run: pause, update, resume, sleep, wake up. They need its key."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse
from torch import Tensor

from prime_rl import WeightsError
from prime_rl_broadcast.connection import Member
from prime_rl_embedded.loop import EngineLoop
from prime_rl_embedded.weights import apply_weights, read_weights, receive_weights
from prime_rl_engine_kit.body import read_body
from prime_rl_engine_kit.errors import RequestError
from prime_rl_engine_kit.keys import Keys
from prime_rl_engine_kit.requests import UpdateBody, decode


class Admin:
    """Swaps weights under running requests, which keep their KV and go on with the new weights."""

    def __init__(self, engine: EngineLoop, keys: Keys) -> None:
        self.engine = engine
        self._keys = keys
        self._updating = asyncio.Lock()
        self._attendance = Member()

    def _check(self, http: HTTPRequest) -> None:
        self._keys.check_admin(http.headers.get("authorization", ""))

    async def pause(self, http: HTTPRequest) -> JSONResponse:
        """Returns when no step is running. Requests in flight keep their place and their KV."""
        self._check(http)
        if http.query_params.get("mode", "keep") != "keep":
            raise RequestError(
                "mode: this engine keeps requests in flight; only mode=keep is offered"
            )
        if http.query_params.get("clear_cache", "false").lower() not in ("false", "0"):
            raise RequestError("clear_cache: running requests keep their KV; only false is offered")
        await asyncio.wrap_future(self.engine.pause())
        return JSONResponse({"status": "paused"})

    async def resume(self, http: HTTPRequest) -> JSONResponse:
        """Go on where ``pause`` stopped."""
        self._check(http)
        if self.engine.scheduler.asleep:
            raise RequestError("the engine sleeps: POST /wake_up comes first", 409)
        await asyncio.wrap_future(self.engine.resume())
        return JSONResponse({"status": "resumed"})

    async def sleep(self, http: HTTPRequest) -> JSONResponse:
        """Pause, and move weights and KV to the host. Requests in flight keep their place."""
        self._check(http)
        if http.query_params.get("level", "1") != "1":
            raise RequestError(
                "level: this engine keeps its weights on the host; only 1 is offered"
            )
        await asyncio.wrap_future(self.engine.sleep())
        return JSONResponse({"status": "asleep"})

    async def wake_up(self, http: HTTPRequest) -> JSONResponse:
        """The memory is taken again; ``resume`` lets requests go on."""
        self._check(http)
        await asyncio.wrap_future(self.engine.wake())
        return JSONResponse({"status": "awake"})

    async def update_weights(self, http: HTTPRequest) -> JSONResponse:
        """All or nothing: from a folder that is broken or does not fit, no tensor is taken."""
        self._check(http)
        body = decode(await read_body(http), UpdateBody)
        async with self._updating:
            version = await self._swap(body)
        return JSONResponse({"status": "ok", "version": version})

    async def _swap(self, body: UpdateBody) -> int:
        scheduler = self.engine.scheduler
        module = scheduler.model.module
        try:
            weights = await asyncio.to_thread(self._take, body, module)
        except WeightsError as error:
            raise RequestError(
                f"weights refused, version {scheduler.version} serves on: {error}"
            ) from error
        new = scheduler.version + 1 if body.version is None else body.version
        swap = self.engine.call(
            lambda: scheduler.swap_weights(lambda: apply_weights(weights, module), new)
        )
        await asyncio.wrap_future(swap)
        return new

    def _take(self, body: UpdateBody, module: Any) -> dict[str, Tensor]:
        if body.meeting is None:
            return read_weights(Path(body.weight_dir), module)
        return receive_weights(body.meeting, self._attendance, module)
