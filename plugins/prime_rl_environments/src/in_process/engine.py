# mypy: allow-subclassing-any, allow-untyped-decorators
"""HTTP to the engine, without the openai SDK.

``renderers.client.generate`` uses three attributes of an ``AsyncOpenAI``: ``base_url``, ``get`` and
``post``. The SDK spends some 3 ms CPU per request (building, retrying, decoding), aiohttp a tenth.
The connection also reads the policy version of each token from the raw reply; renderers drops it.
``client`` is verifiers' client over this connection.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from in_process.batch import BatchConnection
from in_process.seam import ProviderError

Span = tuple[int, int, int]
"""``(policy version, start, end)``: the completion's tokens ``[start, end)`` were sampled by
that version."""

THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
"""Not asked through the environment's proxies; other hosts are."""
IDLE_SECONDS = 2.0
"""Close idle connections before the engine does (uvicorn: after 5 s), because a POST on a closing
connection fails."""


@dataclass(frozen=True)
class GenerateCall:
    """The current generate call."""

    seed_offset: int
    """Added to the rollout's seed, so that every turn of every run of every agent has its own."""
    spans: list[Span]
    """Collects the policy versions of the tokens."""


_call: ContextVar[GenerateCall | None] = ContextVar("call", default=None)


@contextmanager
def recorded_versions(agent: str, number: int, run: int = 0) -> Iterator[list[Span]]:
    """Collect the spans of the model call made in this context: call ``number`` of an agent's
    ``run`` in its episode. Empty if the engine does not report versions."""
    call = GenerateCall(seed_offset(agent, number, run), [])
    token = _call.set(call)
    try:
        yield call.spans
    finally:
        _call.reset(token)


def seed_offset(agent: str, number: int, run: int = 0) -> int:
    """0 for the first call of a single-agent env, which uses the rollout's seed as it is."""
    if (agent, number, run) == ("agent", 0, 0):
        return 0
    return zlib.crc32(f"{agent}/{number}/{run}".encode() if run else f"{agent}/{number}".encode())


def with_offset(body: Mapping[str, Any], offset: int) -> Mapping[str, Any]:
    """The request with ``offset`` added to its seed, if it has one."""
    parameters = body.get("sampling_params", {})
    if not offset or parameters.get("seed") is None:
        return body
    seed = (parameters["seed"] + offset) % 2**31
    return {**body, "sampling_params": {**parameters, "seed": seed}}


def current_call() -> GenerateCall | None:
    """The call that ``recorded_versions`` surrounds. None: there is none."""
    return _call.get()


class _Span(msgspec.Struct):
    version: str | int
    start: int
    end: int


class _Choice(msgspec.Struct):
    weight_versions: list[_Span] | None = None


class _Versions(msgspec.Struct):
    """The part of a reply that is decoded; msgspec skips the rest without creating objects."""

    choices: list[_Choice]


_decoder = msgspec.json.Decoder(_Versions)


def version_spans(reply: bytes) -> list[Span]:
    """The policy versions of the first choice. Empty if there are none, or no integers."""
    try:
        spans = _decoder.decode(reply).choices[0].weight_versions or []
        return [(int(span.version), span.start, span.end) for span in spans]
    except (msgspec.DecodeError, IndexError, ValueError):
        return []  # renderers refuses malformed replies


def with_token_names(reply: bytes) -> bytes:
    """Add the ``token: "token_id:5"`` that renderers 0.1.12 reads where vLLM 0.32 writes
    ``token_id: 5``."""
    if b'"token"' in reply or b'"token_id"' not in reply:
        return reply
    decoded = json.loads(reply)
    for choice in decoded.get("choices") or []:
        for entry in (choice.get("logprobs") or {}).get("content") or []:
            entry.setdefault("token", f"token_id:{entry.get('token_id')}")
    return json.dumps(decoded).encode()


@dataclass(frozen=True)
class HttpReply:
    """The part of an ``httpx.Response`` that ``generate`` reads."""

    content: bytes


class EngineConnection:
    """The three attributes of ``AsyncOpenAI`` that ``renderers.client.generate`` uses, over
    aiohttp."""

    def __init__(
        self, base_url: str, headers: Mapping[str, str], timeout: aiohttp.ClientTimeout
    ) -> None:
        self.base_url = base_url
        self.session = aiohttp.ClientSession(
            headers=headers,
            timeout=timeout,
            trust_env=urlsplit(base_url).hostname not in THIS_MACHINE,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS),
        )
        root = base_url.rstrip("/").removesuffix("/v1")
        self.batches = BatchConnection(self.session, root, timeout)
        """For engines whose model card has ``generate_batch``."""
        self._cards: dict[str, asyncio.Task[dict[str, Any]]] = {}

    async def card(self, model: str) -> dict[str, Any]:
        """The engine's model card, asked for once. Empty if it has none, or cannot be asked now."""
        task = self._cards.get(model)
        if task is None:
            task = self._cards[model] = asyncio.create_task(self._read_card(model))
        try:
            return await asyncio.shield(task)
        except (aiohttp.ClientError, TimeoutError, ValueError):
            self._cards.pop(model, None)
            return {}

    async def _read_card(self, model: str) -> dict[str, Any]:
        reply = await self.get("/models", cast_to=dict)
        cards = (card for card in reply.get("data") or () if isinstance(card, dict))
        return next((card for card in cards if card.get("id") == model), {})

    async def get(self, path: str, *, cast_to: Any) -> Any:
        """GET ``{base_url}{path}`` as JSON."""
        async with self.session.get(self.base_url.rstrip("/") + path) as response:
            response.raise_for_status()
            return await response.json()

    async def post(
        self, url: str, *, cast_to: Any, body: Any, options: Mapping[str, Any] | None = None
    ) -> HttpReply:
        """POST JSON. Raises ``ProviderError`` with the engine's status and reason, 503 if it cannot
        be reached, 504 on a timeout."""
        headers = (options or {}).get("headers")
        call = _call.get()
        if call is not None:
            body = with_offset(body, call.seed_offset)
        try:
            async with self.session.post(
                url,
                data=msgspec.json.encode(body),
                headers={"Content-Type": "application/json", **(headers or {})},
            ) as response:
                content = await response.read()
        except TimeoutError as error:
            raise ProviderError(f"{url}: timed out", status_code=504) from error
        except aiohttp.ClientError as error:
            raise ProviderError(
                f"{url}: {type(error).__name__}: {error}", status_code=503
            ) from error

        if response.status >= 300:
            reason = content.decode(errors="replace")[:2000]
            raise ProviderError(
                f"{url}: HTTP {response.status}: {reason}", status_code=response.status
            )

        if call is not None:
            call.spans.extend(version_spans(content))
        return HttpReply(with_token_names(content))

    async def close(self) -> None:
        await self.batches.close()
        await self.session.close()
