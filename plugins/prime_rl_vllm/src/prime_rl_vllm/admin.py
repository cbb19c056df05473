"""The admin routes: pause, new weights, resume; sleep and wake up.

    /pause -> /update_weights -> /resume      requests keep their place and their KV
    /pause -> /sleep ... /wake_up -> (/update_weights) -> /resume       the trainer uses the GPU

On a GPU, sleeping frees the memory of weights and KV, and requests are recomputed when they
continue. On a CPU, or without ``enable_sleep_mode``, sleeping frees nothing: requests only wait.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from msgspec import structs
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse

from prime_rl import WeightsError
from prime_rl_broadcast.group import BroadcastGroup
from prime_rl_engine_kit.body import read_body
from prime_rl_engine_kit.errors import RequestError
from prime_rl_engine_kit.model_files import weight_dir
from prime_rl_engine_kit.requests import MAX_UPDATE_BYTES, decode_update
from prime_rl_vllm.lora import check_native
from prime_rl_vllm.prefill import hold_prefill
from prime_rl_vllm.state import State

log = logging.getLogger(__name__)

POLL_SECONDS = 0.05
ADAPTER_ID = 1
"""There is one at a time."""


class Admin:
    """Handles one request at a time. ``Front`` has checked the admin key."""

    def __init__(self, state: State) -> None:
        self._state = state

    async def pause(self, http: HTTPRequest) -> JSONResponse:
        """Answers when no step is running."""
        if http.query_params.get("mode", "keep") != "keep":
            raise RequestError(
                "mode: this engine keeps requests in flight; it supports only mode=keep"
            )

        if http.query_params.get("clear_cache", "false").lower() not in ("false", "0"):
            raise RequestError("clear_cache: running requests keep their KV; it must be false")
        async with self._state.admin:
            await self._hold()
            self._state.paused = True

        return JSONResponse({"status": "paused"})

    async def resume(self, _: HTTPRequest) -> JSONResponse:
        async with self._state.admin:
            if self._state.asleep:
                raise RequestError("the engine is asleep: POST /wake_up first", 409)
            self._state.paused = False
            await self._let_go()
        return JSONResponse({"status": "resumed"})

    async def sleep(self, http: HTTPRequest) -> JSONResponse:
        """Pause, and free the accelerator's memory if ``enable_sleep_mode`` is set."""
        if http.query_params.get("level", "1") != "1":
            raise RequestError(
                "level: this engine keeps its weights on the host; it supports only level=1"
            )

        state = self._state
        async with state.admin:
            if not state.asleep and self._can_sleep():
                await state.engine.sleep(level=1, mode="keep")
            else:
                await self._hold()
            state.asleep = state.paused = True

        return JSONResponse({"status": "asleep"})

    async def wake_up(self, _: HTTPRequest) -> JSONResponse:
        """Take the memory back. The engine stays paused."""
        state = self._state
        async with state.admin:
            if state.asleep and self._can_sleep():
                await state.engine.wake_up()
                await self._hold()  # vLLM resumes on waking
            state.asleep = False
        return JSONResponse({"status": "awake"})

    async def update_weights(self, http: HTTPRequest) -> JSONResponse:
        """All or nothing: weights that are broken or do not fit change no parameter."""
        roots = self._state.weights_roots
        receives = self._state.receives
        workers = 1 if receives is None else receives["workers"]
        body = decode_update(await read_body(http, MAX_UPDATE_BYTES), roots, workers)
        if body.meeting is not None and receives is None:
            raise RequestError("meeting: this engine takes weights from files only")
        state = self._state
        start = time.perf_counter()
        async with state.admin:
            if state.asleep and self._can_sleep():
                raise RequestError(
                    "the engine is asleep, without weights: POST /wake_up first", 409
                )

            new = state.version + 1 if body.version is None else body.version
            if body.meeting is None:
                path = await self._stage(body.weight_dir)
                await self._hold()
                held_at = time.perf_counter()
                await self._load(path, new)
            else:
                await self._hold()
                held_at = time.perf_counter()
                await self._receive(body.meeting, new)

            await self._let_go()
            paused = time.perf_counter() - held_at

        state.weight_update_seconds = time.perf_counter() - start
        log.info(
            "weights version %d loaded in %.3f s, paused for %.3f s",
            new,
            state.weight_update_seconds,
            paused,
        )
        return JSONResponse({"status": "ok", "version": new, "paused_seconds": paused})

    # -- the engine ---------------------------------------------------------------------------

    def _can_sleep(self) -> bool:
        return bool(self._state.engine.model_config.enable_sleep_mode)

    async def _hold(self) -> None:
        # All engines wait before one of them has other weights: no prompt is computed with newer
        # ones than its tokens are sampled from.
        await asyncio.gather(
            self._state.engine.pause_generation(mode="keep", clear_cache=False),
            *(hold_prefill(self._state, engine) for engine in self._state.prefill),
        )
        self._state.pauses += 1  # new salt: later requests may run under the next weights

    async def _let_go(self) -> None:
        if not self._state.paused:
            await asyncio.gather(*(e.resume_generation() for e in self._state.engines))

    async def _stage(self, given: str) -> Path:
        """Let every worker read and check the folder while requests go on; its path. Raises
        ``RequestError``."""
        try:
            path = await asyncio.to_thread(weight_dir, given, self._state.weights_roots)
            if self._state.serves_adapters:
                config = self._state.engine.vllm_config.lora_config
                await asyncio.to_thread(check_native, path, config.max_lora_rank)
        except WeightsError as error:
            raise self._refusal(str(error)) from error

        await self._state.ask_workers("prime_rl_stage", str(path))
        answers = await self._state.ask_workers("prime_rl_staged")
        while None in answers:  # a worker still reads
            await asyncio.sleep(POLL_SECONDS)
            answers = await self._state.ask_workers("prime_rl_staged")
        refused = [problem for (problem,) in answers if problem is not None]
        if refused:
            await self._state.ask_workers("prime_rl_drop")
            raise self._refusal(refused[0])

        return path

    async def _load(self, path: Path, version: int) -> None:
        async with self._for_good(version):
            if not self._state.serves_adapters:
                await self._state.ask_workers("prime_rl_load")
                return

            from vllm.lora.request import LoRARequest

            await self._state.ask_workers("prime_rl_drop")
            adapter = LoRARequest("policy", ADAPTER_ID, str(path))
            # ``load_inplace`` in a request would read the files again at each of its steps.
            loaded = structs.replace(adapter, load_inplace=True)
            await asyncio.gather(*(engine.add_lora(loaded) for engine in self._state.engines))
            self._state.adapter = adapter

    async def _receive(self, meeting: BroadcastGroup, version: int) -> None:
        """Load weights from the trainer's memory. Raises ``RequestError`` if they are refused."""
        async with self._for_good(version):
            problems = await self._state.ask_workers(
                "prime_rl_receive", msgspec.to_builtins(meeting)
            )
            refused = [problem for problem in problems if problem is not None]
            if refused and len(refused) < len(problems):  # the other workers have the new weights
                raise WeightsError(f"one of {len(problems)} workers: {refused[0]}")
            if refused:
                await self._let_go()
                raise self._refusal(refused[0])

    @asynccontextmanager
    async def _for_good(self, version: int) -> AsyncIterator[None]:
        """Set ``version`` at the end. After a failure the model is unusable, so the server ends."""
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
        return RequestError(
            f"weights refused, still serving version {self._state.version}: {problem}"
        )
