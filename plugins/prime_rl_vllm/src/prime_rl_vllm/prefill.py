"""Prompts that other engines compute (``prefill_engines``).

    request -> [a prefill engine: the prompt, and a token that is dropped] -> where its KV is
            -> [the engine that samples: takes that KV over by NIXL, samples] -> reply

All engines are those of one server. They pause, load weights and continue together, so no prompt is
computed with newer weights than its tokens are sampled from, and no KV of older weights is found
under a new salt. As always, a request in flight keeps its KV over an update.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from prime_rl_vllm.arguments import num_gpus
from prime_rl_vllm.state import State

log = logging.getLogger(__name__)

LEASE_SECONDS = 3600
"""For which a prefill engine keeps KV that has not been taken over. Then vLLM frees it and does not
tell the other engine, which would read the KV of another prompt. The lease is renewed while that
engine makes steps, so it has to be longer than any pause."""
HOLD_SECONDS = 0.005


def engine_settings(settings: Mapping[str, Any], number: int, on_gpu: bool) -> dict[str, Any]:
    """vLLM's arguments of one engine of the server: 0 samples, the others compute prompts."""
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_connector_module_path": "prime_rl_vllm.nixl",
        "kv_role": "kv_producer" if number else "kv_consumer",
        # Of KV that cannot be taken over, the engine that samples computes the prompt itself.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kv_lease_duration": LEASE_SECONDS},
    }
    made = dict(settings) | {"kv_transfer_config": transfer}
    if number:
        made["disable_log_stats"] = True  # metrics have no label that would tell them apart
    if on_gpu:
        size = num_gpus(settings)
        # Among those of CUDA_VISIBLE_DEVICES.
        made["device_ids"] = ",".join(map(str, range(number * size, (number + 1) * size)))
    return made


def start_engines(namespaces: Sequence[argparse.Namespace]) -> list[Any]:
    """vLLM's ``AsyncLLM`` for each command line."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engines: list[Any] = []
    try:
        for namespace in namespaces:
            config = AsyncEngineArgs.from_cli_args(namespace).create_engine_config()
            engines.append(AsyncLLM.from_vllm_config(config, disable_log_stats=True))
    except BaseException:
        end_engines(engines)
        raise

    return engines


def end_engines(engines: Sequence[Any]) -> None:
    for engine in engines:
        engine.shutdown()


def hand_over_prompts(state: State) -> None:
    """Have a prefill engine compute the prompt of each request, on every route."""
    inner = state.engine.generate
    add = state.engine.add_request
    running = [0] * len(state.prefill)
    outside = set[int]()
    """Parameters, by their ``id``, of requests that the engine that samples does not have yet."""

    async def generate(
        prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any
    ) -> AsyncIterator[Any]:
        if not _can_hand_over(prompt, sampling_params):
            prefill = None
            where = None
        else:
            number = running.index(min(running))
            running[number] += 1
            prefill = asyncio.create_task(_prefill(state, number, prompt, **kwargs))
            prefill.add_done_callback(lambda _: count_down(number))
            try:
                # vLLM keeps a computed prompt until it is taken over, so an abort could come too
                # late: the prompt is computed to its end.
                where = await asyncio.shield(prefill)
            except asyncio.CancelledError:
                release(prefill)
                raise

        sampling_params = _with_transfer(sampling_params, where)
        outside.add(id(sampling_params))
        try:
            async with aclosing(inner(prompt, sampling_params, request_id, **kwargs)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            # It was refused, or its client left before it was added. Once it is added, the engine
            # takes the KV over or, at an abort, releases it.
            if id(sampling_params) in outside:
                outside.remove(id(sampling_params))
                if prefill is not None:
                    release(prefill)

    async def add_request(request_id: str, prompt: Any, params: Any, *args: Any, **kw: Any) -> Any:
        queue = await add(request_id, prompt, params, *args, **kw)
        outside.discard(id(params))
        return queue

    def count_down(number: int) -> None:
        running[number] -= 1

    def release(prefill: asyncio.Task[dict[str, Any] | None]) -> None:
        task = asyncio.create_task(_release(state, prefill))
        state.pending.add(task)
        task.add_done_callback(state.pending.discard)

    state.engine.generate = generate
    state.engine.add_request = add_request


async def _release(state: State, prefill: asyncio.Task[dict[str, Any] | None]) -> None:
    """Have the prefill engine free the KV of a prompt that is not needed any more."""
    try:
        where = await prefill
        if where is None:
            return
        await state.engine.notify_kv_transfer_request_rejected(f"left-{uuid.uuid4().hex}", where)
    except Exception as error:  # the engine has died, and the server ends
        log.warning("KV of a prompt was not released: %s: %s", type(error).__name__, error)


def _can_hand_over(prompt: Any, sampling_params: Any) -> bool:
    """The engine that samples computes a prompt itself if it needs more of it than its KV: scores,
    or KV for several choices, which can be taken over once. So it does with images, which the
    server hands out to one engine."""
    is_tokens = (
        isinstance(prompt, Mapping)
        and bool(prompt.get("prompt_token_ids"))
        and prompt.get("type", "token") == "token"
        and not prompt.get("multi_modal_data")
    )
    is_single = (sampling_params.n or 1) == 1
    return is_tokens and is_single and sampling_params.prompt_logprobs is None


async def _prefill(
    state: State, number: int, prompt: Mapping[str, Any], **kwargs: Any
) -> dict[str, Any] | None:
    """Where the KV of a prompt is. None if the engine has failed: the prompt is computed by the one
    that samples, which also refuses a request that is wrong."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        max_tokens=1,
        temperature=0.0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={"kv_transfer_params": {"do_remote_decode": True}},
    )
    tokens = {key: prompt[key] for key in ("prompt_token_ids", "cache_salt") if key in prompt}
    engine = state.prefill[number]
    where: dict[str, Any] | None = None
    # Not the client's: vLLM sends it between the engines within messages that have a form.
    request_id = uuid.uuid4().hex
    try:
        async for output in engine.generate(tokens, params, request_id, **kwargs):
            where = output.kv_transfer_params
    except (VLLMClientError, ValueError, TypeError):
        return None
    except Exception as error:
        # The server ends now, and the other engine with it: a request that it got at this moment
        # would have no answer.
        if engine.errored:
            raise
        state.prefill_failures += 1
        log.warning(
            "prefill engine %d failed, so the engine that samples computes the prompt: %s: %s",
            number,
            type(error).__name__,
            error,
        )
        return None

    return where


def _with_transfer(sampling_params: Any, where: Mapping[str, Any] | None) -> Any:
    """Parameters with our ``kv_transfer_params``, or without any: a client's could name a host."""
    extra = dict(sampling_params.extra_args or {})
    extra.pop("kv_transfer_params", None)
    if where is not None:
        extra["kv_transfer_params"] = dict(where)
    sampling_params = sampling_params.clone()
    sampling_params.extra_args = extra or None
    return sampling_params


async def hold_prefill(state: State, engine: Any) -> None:
    """Have a prefill engine begin no step, until it is resumed.

    vLLM calls a pause complete when no KV waits to be taken over, but the engine that samples may
    be paused too, or have no place yet. So this waits until the scheduler is paused. A step that
    runs then ends before its workers load weights.
    """
    pausing = asyncio.create_task(engine.pause_generation(mode="keep", clear_cache=False))
    state.pending.add(pausing)
    pausing.add_done_callback(state.pending.discard)
    while not await engine.is_paused():
        await asyncio.sleep(HOLD_SECONDS)
