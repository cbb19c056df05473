"""The admin routes: pause, update, resume, sleep, wake up. They require the run's admin key."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
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
from prime_rl_engine_kit.model_files import weight_dir
from prime_rl_engine_kit.requests import MAX_UPDATE_BYTES, UpdateBody, decode_update


class Admin:
    """Swaps weights while requests run: they keep their KV and continue with the new weights."""

    def __init__(self, engine: EngineLoop, keys: Keys, roots: Sequence[Path] | None = None) -> None:
        """``roots``: weight updates lie in one of these folders; None: anywhere."""
        self.engine = engine
        self._keys = keys
        self._roots = roots
        self._updating = asyncio.Lock()
        self._member = Member()

    def _check(self, http: HTTPRequest) -> None:
        self._keys.check_admin(http.headers.get("authorization", ""))

    async def pause(self, http: HTTPRequest) -> JSONResponse:
        """Answers when no step is running. Requests in flight keep their place and their KV."""
        self._check(http)
        if http.query_params.get("mode", "keep") != "keep":
            raise RequestError(
                "mode: this engine keeps requests in flight; it supports only mode=keep"
            )

        if http.query_params.get("clear_cache", "false").lower() not in ("false", "0"):
            raise RequestError("clear_cache: running requests keep their KV; it must be false")
        await asyncio.wrap_future(self.engine.pause())
        return JSONResponse({"status": "paused"})

    async def resume(self, http: HTTPRequest) -> JSONResponse:
        self._check(http)
        if self.engine.scheduler.asleep:
            raise RequestError("the engine is asleep: POST /wake_up first", 409)
        await asyncio.wrap_future(self.engine.resume())
        return JSONResponse({"status": "resumed"})

    async def sleep(self, http: HTTPRequest) -> JSONResponse:
        """Pause, and move weights and KV to the host. Requests in flight keep their place."""
        self._check(http)
        if http.query_params.get("level", "1") != "1":
            raise RequestError(
                "level: this engine keeps its weights on the host; it supports only level=1"
            )
        await asyncio.wrap_future(self.engine.sleep())
        return JSONResponse({"status": "asleep"})

    async def wake_up(self, http: HTTPRequest) -> JSONResponse:
        """Take the memory back. Requests continue after ``resume``."""
        self._check(http)
        await asyncio.wrap_future(self.engine.wake())
        return JSONResponse({"status": "awake"})

    async def update_weights(self, http: HTTPRequest) -> JSONResponse:
        """All or nothing: weights that are broken or do not fit change no parameter."""
        self._check(http)
        body = decode_update(await read_body(http, MAX_UPDATE_BYTES), self._roots)
        async with self._updating:
            version, seconds = await self._swap(body)
        return JSONResponse({"status": "ok", "version": version, "paused_seconds": seconds})

    async def _swap(self, body: UpdateBody) -> tuple[int, float]:
        """The new version, and the seconds for which no step could run."""
        scheduler = self.engine.scheduler
        module = scheduler.model.module
        try:
            weights = await asyncio.to_thread(self._load, body, module)
        except WeightsError as error:
            raise RequestError(
                f"weights refused, still serving version {scheduler.version}: {error}"
            ) from error

        new = scheduler.version + 1 if body.version is None else body.version

        def apply() -> None:
            apply_weights(weights, module)
            scheduler.model.forward.weights_changed()

        def swap() -> float:
            started = time.perf_counter()
            scheduler.swap_weights(apply, new)
            return time.perf_counter() - started

        return new, await asyncio.wrap_future(self.engine.call(swap))

    def _load(self, body: UpdateBody, module: Any) -> dict[str, Tensor]:
        if body.meeting is None:
            return read_weights(weight_dir(body.weight_dir, self._roots), module)
        return receive_weights(body.meeting, self._member, module)
