# mypy: allow-subclassing-any, allow-untyped-decorators
"""verifiers' ``TrainClient``, for rollouts of the same process.

    turn -> prompt (rendered once per group) -> engine (one request per tick) -> Response

Text prompts only: verifiers' own client takes the others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from math import isfinite
from typing import Any
from uuid import uuid4

import aiohttp
import msgspec
from renderers import OverlongPromptError
from renderers.base import ToolCallParseStatus, is_multimodal
from renderers.client import MalformedGenerateResponseError, generate

from in_process.engine import EngineConnection, current_call, with_offset
from in_process.seam import (
    SESSION_ID_HEADER,
    ElasticRendererPool,
    PendingTurn,
    ProviderError,
    TrainClient,
    is_incremental,
    message_to_wire,
    resolve_api_key,
    resolve_headers,
    response_from_generate,
    serialize_completion,
    tool_to_wire,
)
from in_process.tool_calls import MALFORMED, fault_of, keep_what_was_written
from prime_rl_engine_kit.batch import (
    Answer,
    BatchRequest,
    bytes_to_ids,
    bytes_to_logprobs,
    ids_to_bytes,
)
from prime_rl_engine_kit.routes import packed_entry

Wire = dict[str, Any]

SHORT = 4096
"""Characters that are rendered in the event loop; longer prompts are in a thread."""
KEPT_TOKENS = 1_000_000
"""Tokens of first prompts to keep: siblings start at about the same time."""


class Prompts:
    """The first prompts of rollouts, each rendered once."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, Any] = OrderedDict()
        self._tokens = 0

    async def render(self, slot: Any, messages: Sequence[Any], tools: Any) -> Any:
        """The renderer's ``RenderedTokens``, shared: do not change it."""
        key = msgspec.msgpack.encode((id(slot), messages, tools))
        if key in self._known:
            return self._known[key]
        rendered = await render(slot, messages, tools)
        if key not in self._known:
            self._known[key] = rendered
            self._tokens += len(rendered.token_ids)
            while self._tokens > KEPT_TOKENS and len(self._known) > 1:
                self._tokens -= len(self._known.popitem(last=False)[1].token_ids)

        return rendered


async def render(slot: Any, messages: Sequence[Wire], tools: Any) -> Any:
    """The renderer's ``RenderedTokens`` of a whole conversation."""
    return await encode(
        slot,
        len(str(messages)) + len(str(tools)),
        lambda: slot.renderer.render(messages, tools=tools, add_generation_prompt=True),
    )


async def encode(slot: Any, size: int, work: Callable[[], Any]) -> Any:
    """Run ``work`` on the slot's tokenizer: here if it is short and free, else in a thread."""
    if size <= SHORT and slot.lock.acquire(blocking=False):
        try:
            return work()
        finally:
            slot.lock.release()
    return await slot.run(work)


class FastTrainClient(TrainClient):
    """One per engine."""

    def __init__(self, config: Any) -> None:
        self.config = config
        timeout = config.timeout
        self.client = EngineConnection(
            config.base_url,
            {**resolve_headers(config), "Authorization": f"Bearer {resolve_api_key(config)}"},
            aiohttp.ClientTimeout(total=None, connect=timeout.connect, sock_read=timeout.read),
        )
        self._slots: dict[str, Any] = {}
        self._prompts = Prompts()

    @classmethod
    def of(cls, client: TrainClient, stack: AsyncExitStack) -> FastTrainClient:
        """The fast client that replaces ``client``, created once. ``stack`` closes it with the
        server."""
        if isinstance(client, cls):
            return client
        fast: FastTrainClient | None = getattr(client, "_in_process", None)
        if fast is None:
            fast = client._in_process = cls(client.config)
            stack.push_async_callback(fast.close)
        return fast

    async def get_response(
        self,
        dialect: Any,
        body: Wire,
        sampling: Any,
        session_id: str | None = None,
        turn: PendingTurn | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """The model's reply to one turn. Raises ``ProviderError``."""
        parameters = sampling.model_dump(exclude_none=True)
        if (
            turn is None
            or "chat_template_kwargs" in parameters
            or any(isinstance(message.content, list) for message in turn.prompt)
        ):
            return await super().get_response(dialect, body, sampling, session_id, turn, headers)

        request = {
            "model": body["model"],
            "cache_salt": parameters.pop("cache_salt", None),
            "sampling_params": parameters,
        }
        slot = await self._slot(body["model"])
        tools = [tool_to_wire(tool) for tool in turn.tools] or None
        rendered, bridged = await self._render(slot, turn, tools)
        if bridged is not None:
            parameters["routed_experts_prompt_start"] = max(turn.path_len - 1, 0)
        card = await self.client.card(body["model"])
        limit = card.get("max_model_len")
        if isinstance(limit, int) and 0 < limit < len(rendered.token_ids):
            error = OverlongPromptError(prompt_len=len(rendered.token_ids), max_prompt_len=limit)
            raise ProviderError(str(error), status_code=400)

        sample = self._generate_in_batch if card.get("generate_batch") else self._generate
        result = await sample(slot.renderer, rendered, tools, request, session_id)
        kinds = slot.renderer.mm_token_type_id_map if is_multimodal(slot.renderer) else None
        response = response_from_generate(result, body["model"], bridged, kinds)
        response.raw = serialize_completion(response, body["model"])
        malformed = [call for call in result["tool_calls"] or () if not call.name]
        if malformed and tools and result["finish_reason"] != "length":  # or a limit cut it off
            message = response.raw["choices"][0]["message"]
            message[MALFORMED] = [fault_of(call) for call in malformed]

        return response

    async def _slot(self, model: str) -> Any:
        """The one renderer: every rollout of the process renders on one thread at a time."""
        name = self.config.renderer_model_name or model
        if name not in self._slots:
            pool = ElasticRendererPool(name, self.config.renderer, multiplex=self.config.multiplex)
            slot = pool.renderers[0] if pool.renderers else await pool.grow()
            keep_what_was_written(slot.renderer)
            self._slots[name] = slot
        return self._slots[name]

    async def _render(
        self, slot: Any, turn: PendingTurn, tools: Any
    ) -> tuple[Any, PendingTurn | None]:
        """The turn's prompt, and the turn if its tokens extend those of the previous one."""
        if not turn.prefix_node_ids:
            messages = [message_to_wire(message) for message in turn.prompt]
            return await self._prompts.render(slot, messages, tools), None

        tail = [message_to_wire(message) for message in turn.tail]
        previous = turn.previous_renderer_token_ids() if is_incremental(tail) else None
        if previous is not None:
            bridged = await encode(
                slot,
                len(str(tail)),
                lambda: slot.renderer.bridge_to_next_turn(*previous, tail, tools=tools),
            )
            if bridged is not None:
                return bridged, turn

        return await render(
            slot, [message_to_wire(message) for message in turn.prompt], tools
        ), None

    async def _generate(
        self, renderer: Any, rendered: Any, tools: Any, request: Wire, session_id: str | None
    ) -> Wire:
        """One HTTP request, by renderers."""
        result: Wire = await generate(
            client=self.client,
            renderer=renderer,
            messages=[],
            prompt_ids=rendered.token_ids,
            prompt_attribution=rendered,
            tools=tools,
            extra_headers={SESSION_ID_HEADER: session_id} if session_id else None,
            **request,
        )
        return result

    async def _generate_in_batch(
        self, renderer: Any, rendered: Any, tools: Any, request: Wire, session_id: str | None
    ) -> Wire:
        """The same result, by a request that shares its HTTP request with others."""
        if tools and not getattr(renderer, "supports_tools", True):
            raise ValueError(
                f"{type(renderer).__name__} does not support tools, which this task has. Set "
                "[orchestrator.renderer] name to the renderer of the model's family."
            )
        ours = {"stop_token_ids": renderer.get_stop_token_ids(), "logprobs": 1}
        call = current_call()
        wanted = {**request, "sampling_params": {**request["sampling_params"], **ours}}
        if call is not None:
            wanted = dict(with_offset(wanted, call.seed_offset))
        prompt = rendered.token_ids
        ask = BatchRequest(request_id=uuid4().hex, token_ids=ids_to_bytes(prompt), **wanted)
        answer = await self.client.batches.send(ask)
        tokens, logprobs = read_columns(answer)
        if call is not None:
            call.spans.extend(answer.versions)
        parsed = renderer.parse_response(tokens, prompt_ids=prompt, tools=tools)
        called = any(each.status == ToolCallParseStatus.OK for each in parsed.tool_calls)
        return {
            "request_id": ask.request_id,
            "prompt_ids": prompt,
            "completion_ids": tokens,
            "completion_logprobs": logprobs,
            "content": parsed.content,
            "reasoning_content": parsed.reasoning_content,
            "tool_calls": parsed.tool_calls,
            "finish_reason": "tool_calls"
            if called and answer.finish_reason == "stop"
            else answer.finish_reason,
            "prompt_attribution": rendered,
            "routed_experts": routes_of(answer),
        }


def routes_of(answer: Answer) -> Wire | None:
    """``routed_experts`` as verifiers reads them. None: the engine does not record them."""
    if not answer.routes:
        return None
    return packed_entry(
        answer.routes, answer.routes_shape, answer.routes_dtype, answer.routes_start
    )


def read_columns(answer: Answer) -> tuple[list[int], list[float]]:
    """Tokens and log-probabilities. Raises ``MalformedGenerateResponseError`` unless each token
    has a finite one."""
    tokens = bytes_to_ids(answer.token_ids)
    logprobs = bytes_to_logprobs(answer.logprobs)
    if len(tokens) != len(logprobs) or not isfinite(sum(logprobs)):
        raise MalformedGenerateResponseError(
            f"the engine answered {len(tokens)} tokens and {len(logprobs)} logprobs; expected a "
            "finite logprob for each token"
        )
    return tokens, logprobs
