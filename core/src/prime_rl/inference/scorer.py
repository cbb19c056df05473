"""One request for the log-probabilities of a sequence, to one endpoint.

    POST /inference/v1/generate {prompt_logprobs: 0}

Who is asked, and what comes of an outage, is decided by who inherits: ``reference.py`` for frozen
models, ``policy_scores.py`` for the live one.

Shapes: T = tokens of one sequence.
"""

from __future__ import annotations

import asyncio
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx
import msgspec
import numpy as np

from prime_rl.errors import ConfigError, EngineError, OverlongError
from prime_rl.rollout import FloatColumn

IMPOSSIBLE = -9999.0
"""What engines write for a log-probability of minus infinity: JSON has none."""

CONNECT_SECONDS = 10.0

SCORING = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
"""One token has to be sampled, and is thrown away. 0: of the prompt's own tokens only."""


class _Entry(msgspec.Struct):
    logprob: float | None = None


class _Scores(msgspec.Struct):
    """The part of the reply that is read: None for the first token, then entries by token id."""

    prompt_logprobs: list[dict[str, _Entry] | None] | None = None


class Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[Card]


class Unavailable(Exception):
    """No answer now; there may be one later. ``failed``: the server met the request and failed."""

    def __init__(self, reason: str, failed: bool = False) -> None:
        super().__init__(reason)
        self.failed = failed


@dataclass(eq=False)
class Endpoint:
    """Where the model is asked."""

    root: str
    card: Card | None = None
    """What it says of the model; None before it was asked."""


class Scorer(ABC):
    """A ``ReferenceModel`` over one or more endpoints of one model.

    ``where`` says whose it is in messages: ``env 'a': teacher``. ``cache_salt`` is asked at each
    request (live policy: its version; frozen: None).
    """

    def __init__(
        self,
        urls: Sequence[str],
        model: str,
        *,
        where: str,
        api_key: str | None = None,
        max_concurrency: int = 32,
        timeout: float = 600.0,
        cache_salt: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.model, self.where = model, where
        self._endpoints = [Endpoint(url.rstrip("/").removesuffix("/v1")) for url in urls]
        self._slots = asyncio.Semaphore(max_concurrency)
        self._timeout, self._cache_salt = timeout, cache_salt
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(timeout, connect=min(CONNECT_SECONDS, timeout)),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=max_concurrency),
            # An SSL context costs 70 ms, and plain HTTP needs none.
            verify=any(url.startswith("https://") for url in urls),
        )

    async def logprobs(
        self, token_ids: Sequence[int] | np.ndarray, *, group_id: int = 0
    ) -> FloatColumn:
        """The log-probability of each token given those before it, at temperature 1: [T]; 0.0 for
        the first.

        Waits while nobody answers. Raises ``EngineError`` if one refuses.
        """
        ids = [int(token) for token in token_ids]
        if len(ids) < 2:  # nothing comes before the first
            return np.zeros(len(ids), np.float32)
        async with self._slots:
            return await self._until_answered(ids, group_id)

    async def close(self) -> None:
        """Drop the connections."""
        await self._http.aclose()

    @abstractmethod
    async def _until_answered(self, ids: list[int], group_id: int) -> FloatColumn:
        """The scores of one sequence, from any endpoint."""

    # -- one try --------------------------------------------------------------------------------

    async def _score(self, endpoint: Endpoint, ids: list[int]) -> FloatColumn:
        """One try. Raises ``Unavailable``, or ``EngineError`` for what a further try cannot
        mend."""
        card = endpoint.card or await self._learn(endpoint, EngineError)
        if card.max_model_len is not None and len(ids) > card.max_model_len:
            raise OverlongError(
                f"{self._at(endpoint)} takes {card.max_model_len} tokens (its max_model_len), and "
                f"this sequence has {len(ids)}. Serve it with more, or lower seq_len or "
                "max_completion_tokens."
            )
        body = {"model": self.model, "token_ids": ids, "sampling_params": SCORING}
        if (salt := self._cache_salt()) is not None:
            body["cache_salt"] = salt
        route = "/inference/v1/generate"
        answer = await self._request("POST", endpoint, route, content=msgspec.json.encode(body))
        if not answer.is_success:
            raise EngineError(await self._refusal(endpoint, route, answer, len(ids)))
        try:
            scores = msgspec.json.decode(answer.content, type=_Scores)
            return read_scores(scores.prompt_logprobs, ids)
        except (msgspec.DecodeError, ValueError) as error:
            raise EngineError(f"{self._at(endpoint)}: {route}: {error}") from error

    async def _request(
        self, method: str, endpoint: Endpoint, route: str, **request: object
    ) -> httpx.Response:
        """An answer, good or a refusal. Raises ``Unavailable``."""
        try:
            answer = await self._http.request(method, endpoint.root + route, **request)  # type: ignore[arg-type]
        except httpx.TransportError as error:
            raise Unavailable(self._explain(error)) from error
        if answer.status_code == 429 or answer.status_code >= 500:
            reason = f"{route} answers {answer.status_code} {_text(answer)}"
            raise Unavailable(reason, failed=answer.status_code == 500)
        return answer

    async def _learn(self, endpoint: Endpoint, kind: type[ConfigError | EngineError]) -> Card:
        """The model's card there. Raises ``kind`` if the endpoint does not serve it."""
        answer = await self._request("GET", endpoint, "/v1/models")
        if not answer.is_success:
            raise kind(await self._refusal(endpoint, "/v1/models", answer))
        try:
            cards = msgspec.json.decode(answer.content, type=_Models).data
        except msgspec.DecodeError as error:
            raise kind(f"{self._at(endpoint)}: /v1/models: {error}. Is it an engine?") from error
        endpoint.card = next((card for card in cards if card.id == self.model), None)
        if endpoint.card is None:
            names = ", ".join(repr(card.id) for card in cards) or "nothing"
            raise kind(f"{self._at(endpoint)} serves {names}. Mend the name or the base_url.")
        return endpoint.card

    # -- messages ---------------------------------------------------------------------------------

    def _at(self, endpoint: Endpoint) -> str:
        return f"{self.where} {self.model!r} at {endpoint.root}"

    def _explain(self, error: httpx.TransportError) -> str:
        if isinstance(error, httpx.ConnectTimeout):
            return f"no connection within {min(CONNECT_SECONDS, self._timeout):.0f} s"
        if isinstance(error, httpx.TimeoutException):
            return f"no answer within {self._timeout:g} s"
        cause: BaseException | None = error
        while (
            cause is not None
        ):  # httpx says "all connection attempts failed"; the system knows why
            if isinstance(cause, OSError) and cause.errno:
                return os.strerror(cause.errno) if cause.errno > 0 else str(cause.strerror)
            cause = cause.__cause__ or cause.__context__
        return f"{type(error).__name__} {error}".rstrip()

    async def _refusal(
        self, endpoint: Endpoint, route: str, answer: httpx.Response, length: int | None = None
    ) -> str:
        """Where, what was answered, what to do about it."""
        status = answer.status_code
        found = f"{self._at(endpoint)} refuses {route}: {status} {_text(answer)}"
        if status in (401, 403):
            return f"{found}. Give its key by api_key_var."
        if status == 404 and route != "/v1/models":
            await self._learn(endpoint, EngineError)  # raises if it serves another model by now
            return (
                f"{found}. It serves the model but not this route: a reference must give "
                "prompt_logprobs (prime-rl serve, vLLM with --enable-scale-out)."
            )
        if length is not None and endpoint.card and endpoint.card.max_model_len == length:
            return f"{found}. Serve it with a max_model_len of {length + 1}: one token is sampled."
        return f"{found}. Check that it is an engine that scores prompts (docs/engines.md)."


def read_scores(entries: list[dict[str, _Entry] | None] | None, ids: list[int]) -> FloatColumn:
    """The log-probabilities [T] of a reply. Raises ``ValueError`` naming the first position that
    has none."""
    if entries is None:
        raise ValueError("no prompt_logprobs in the answer; a reference must give them")
    if len(entries) != len(ids):
        raise ValueError(f"got {len(entries)} prompt_logprobs, expected {len(ids)}")
    column = np.zeros(len(ids), np.float32)
    for position, (token, entry) in enumerate(zip(ids[1:], entries[1:], strict=True), start=1):
        found = (entry or {}).get(str(token))
        logprob = None if found is None else found.logprob
        if logprob is None or not math.isfinite(logprob):
            raise ValueError(f"position {position} of {len(ids)}: no logprob of token {token}")
        if logprob <= IMPOSSIBLE:
            raise ValueError(
                f"position {position} of {len(ids)}: token {token} is impossible to this model "
                f"(logprob {logprob:g}): no finite signal leads towards it. Use a reference whose "
                "vocabulary is the policy's"
            )
        column[position] = logprob
    return column


def _text(answer: httpx.Response) -> str:
    """What the answer says, on one line."""
    return " ".join(answer.text.split())[:500].rstrip(".")
