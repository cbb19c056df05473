"""The routes that need the run's key: pause, new weights, resume; sleep and wake up.

    /pause -> /update_weights -> /resume      requests keep their place and their KV
    /pause -> /sleep ... /wake_up -> (/update_weights) -> /resume       one GPU for two

On a GPU, sleeping gives the memory of weights and KV away, and requests are computed anew when
they go on. On a CPU, or without ``enable_sleep_mode``, there is nothing to give: requests wait.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse

from prime_rl import WeightsError
from prime_rl_broadcast.group import BroadcastGroup
from prime_rl_engine_kit.body import read_body
from prime_rl_engine_kit.errors import RequestError
from prime_rl_engine_kit.requests import UpdateBody, decode
from prime_rl_vllm.state import State

log = logging.getLogger(__name__)


class Admin:
    """One request at a time. The keys have been checked."""

    def __init__(self, state: State) -> None:
        self._state = state

    async def pause(self, http: HTTPRequest) -> JSONResponse:
        """Returns when no step is running."""
        if http.query_params.get("mode", "keep") != "keep":
            raise RequestError(
                "mode: this engine keeps requests in flight; only mode=keep is offered"
            )
        if http.query_params.get("clear_cache", "false").lower() not in ("false", "0"):
            raise RequestError("clear_cache: running requests keep their KV; only false is offered")
        async with self._state.admin:
            await self._hold()
            self._state.paused = True
        return JSONResponse({"status": "paused"})

    async def resume(self, _: HTTPRequest) -> JSONResponse:
        """Go on where ``pause`` stopped."""
        async with self._state.admin:
            if self._state.asleep:
                raise RequestError("the engine sleeps: POST /wake_up comes first", 409)
            self._state.paused = False
            await self._let_go()
        return JSONResponse({"status": "resumed"})

    async def sleep(self, http: HTTPRequest) -> JSONResponse:
        """Pause, and give the accelerator's memory away if that was set up."""
        if http.query_params.get("level", "1") != "1":
            raise RequestError("level: the weights are kept on the host; only 1 is offered")
        state = self._state
        async with state.admin:
            if not state.asleep and self._can_sleep():
                await state.engine.sleep(level=1, mode="keep")
            else:
                await self._hold()
            state.asleep = state.paused = True
        return JSONResponse({"status": "asleep"})

    async def wake_up(self, _: HTTPRequest) -> JSONResponse:
        """Take the memory back. Still paused."""
        state = self._state
        async with state.admin:
            if state.asleep and self._can_sleep():
                await state.engine.wake_up()
                await self._hold()  # waking up resumes
            state.asleep = False
        return JSONResponse({"status": "awake"})

    async def update_weights(self, http: HTTPRequest) -> JSONResponse:
        """All or nothing: from a folder that is broken or does not fit, no tensor is taken."""
        body = decode(await read_body(http), UpdateBody)
        state, start = self._state, time.perf_counter()
        async with state.admin:
            if state.asleep and self._can_sleep():
                raise RequestError("the engine sleeps and has no weights: POST /wake_up first", 409)
            new = state.version + 1 if body.version is None else body.version
            if body.meeting is None:
                await self._stage(body.weight_dir)
                await self._hold()
                await self._load(new)
            else:
                await self._hold()
                await self._receive(body.meeting, new)
            await self._let_go()
        state.weight_update_seconds = time.perf_counter() - start
        log.info("weights version %d loaded in %.3f s", new, state.weight_update_seconds)
        return JSONResponse({"status": "ok", "version": new})

    # -- the engine ---------------------------------------------------------------------------

    def _can_sleep(self) -> bool:
        return bool(self._state.engine.model_config.enable_sleep_mode)

    async def _hold(self) -> None:
        await self._state.engine.pause_generation(mode="keep", clear_cache=False)
        self._state.pauses += 1  # from here on nothing is computed under the present weights

    async def _let_go(self) -> None:
        if not self._state.paused:
            await self._state.engine.resume_generation()

    async def _stage(self, weight_dir: str) -> None:
        """Every worker has read and checked the folder. Raises ``RequestError``."""
        problems = await self._rpc("prime_rl_stage", weight_dir)
        refused = [problem for problem in problems if problem is not None]
        if refused:
            await self._rpc("prime_rl_drop")
            raise self._refusal(refused[0])

    async def _load(self, version: int) -> None:
        """Requests wait meanwhile."""
        async with self._for_good(version):
            await self._rpc("prime_rl_load")

    async def _receive(self, meeting: BroadcastGroup, version: int) -> None:
        """The same from the trainer's memory. Raises ``RequestError`` if it is refused."""
        async with self._for_good(version):
            problems = await self._rpc("prime_rl_receive", msgspec.to_builtins(meeting))
            refused = [problem for problem in problems if problem is not None]
            if refused and len(refused) < len(problems):  # the others have new weights
                raise WeightsError(f"one of {len(problems)} workers: {refused[0]}")
            if refused:
                await self._let_go()
                raise self._refusal(refused[0])

    @asynccontextmanager
    async def _for_good(self, version: int) -> AsyncIterator[None]:
        """The model has ``version`` then. A failure leaves no model to go on with: it ends us."""
        state = self._state
        try:
            yield
            await state.engine.update_weight_version(str(version))
        except RequestError:
            raise
        except Exception as error:
            log.exception("loading version %d failed half-way; the server ends", version)
            os.kill(os.getpid(), signal.SIGTERM)
            raise RequestError(
                f"loading version {version} failed half-way, so the server ends: {error}", 500
            ) from error
        state.version = version
        state.weight_updates += 1

    def _refusal(self, problem: str) -> RequestError:
        return RequestError(f"weights refused, version {self._state.version} serves on: {problem}")

    async def _rpc(self, method: str, *args: Any) -> list[Any]:
        answers: list[Any] = await self._state.engine.collective_rpc(method, args=args)
        return answers
