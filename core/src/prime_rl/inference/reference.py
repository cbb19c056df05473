"""Score tokens under a model behind HTTP: the live policy's engines, or the replicas of a frozen
one.

    logprobs(tokens) -> [slot] -> [replica] -> POST /inference/v1/generate {prompt_logprobs: 0}
                          ^           |
                          +-- wait ---+   no answer, 429 or 5xx: another replica, else try again

An outage pauses who asks and names the endpoint; a refusal ends the run with its reason.

Shapes: T = tokens of one sequence.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx
import msgspec
import numpy as np

from prime_rl.config.models import FrozenModel
from prime_rl.plugins.errors import ConfigError, EngineError, OverlongError
from prime_rl.rollout import FloatColumn

log = logging.getLogger(__name__)

IMPOSSIBLE = -9999.0
"""What engines write for a log-probability of minus infinity: JSON has none."""

CONNECT_SECONDS = 10.0

FAILED_TRIES = 10
"""Times one request may meet an internal error (500) of a server that answers other requests."""

SCORING = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
"""One token has to be sampled, and is thrown away. 0: of the prompt's own tokens only."""


class _Entry(msgspec.Struct):
    logprob: float | None = None


class _Scores(msgspec.Struct):
    """The part of the reply that is read: None for the first token, then entries by token id."""

    prompt_logprobs: list[dict[str, _Entry] | None] | None = None


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Card]


class _Unavailable(Exception):
    """No answer now; there may be one later. ``failed``: the server met the request and failed."""

    def __init__(self, reason: str, failed: bool = False) -> None:
        super().__init__(reason)
        self.failed = failed


@dataclass(eq=False)
class _Replica:
    """One endpoint, and its outage if it has one."""

    root: str
    card: _Card | None = None
    failures: int = 0
    """Tries in a row that got no answer."""
    answered: int = 0
    """Requests it has answered so far."""
    retry_at: float = 0.0
    """Not to be asked before this (``time.monotonic``)."""
    down_since: float = 0.0
    reason: str = ""


class ScoringPool:
    """A ``ReferenceModel`` over one or more replicas of one model.

    ``where`` says whose it is in messages: ``env 'a': teacher``. ``cache_salt`` is asked at each
    request (live policy: its version; frozen: None). ``on_waiting`` is told whom requests wait for
    when no replica answers, and None when nobody waits any more. ``backoff``: seconds before the
    second try, doubling up to the other bound.
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
        on_waiting: Callable[[str | None], None] = lambda text: None,
        backoff: tuple[float, float] = (1.0, 10.0),
    ) -> None:
        self.model, self.where = model, where
        self._replicas = [_Replica(url.rstrip("/").removesuffix("/v1")) for url in urls]
        self._slots = asyncio.Semaphore(max_concurrency)
        self._timeout, self._backoff = timeout, backoff
        self._cache_salt, self._on_waiting = cache_salt, on_waiting
        self._stranded = 0
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(timeout, connect=min(CONNECT_SECONDS, timeout)),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=max_concurrency),
            # An SSL context costs 70 ms, and plain HTTP needs none.
            verify=any(url.startswith("https://") for url in urls),
        )

    @classmethod
    def frozen(
        cls, model: FrozenModel, *, where: str, on_waiting: Callable[[str | None], None]
    ) -> ScoringPool:
        """A pool for a table of the TOML. Raises ``ConfigError`` if its key is not in the
        environment."""
        key = None if model.api_key_var is None else os.environ.get(model.api_key_var)
        if model.api_key_var is not None and not key:
            raise ConfigError(
                f"{where} {model.name!r}: api_key_var = {model.api_key_var!r}, and the environment "
                "has no such variable, or an empty one. Export it, or leave api_key_var out if the "
                "endpoint needs no key."
            )
        return cls(
            model.base_url,
            model.name,
            where=where,
            api_key=key,
            max_concurrency=model.max_concurrency,
            timeout=model.timeout,
            on_waiting=on_waiting,
        )

    # -- what algorithms call ---------------------------------------------------------------------

    async def logprobs(
        self, token_ids: Sequence[int] | np.ndarray, *, group_id: int = 0
    ) -> FloatColumn:
        """The log-probability of each token given those before it, at temperature 1: [T]; 0.0 for
        the first.

        Waits while no replica answers. Raises ``EngineError`` if one refuses.
        """
        ids = [int(token) for token in token_ids]
        if len(ids) < 2:  # nothing comes before the first
            return np.zeros(len(ids), np.float32)
        async with self._slots:
            return await self._until_answered(ids, group_id)

    async def wait_ready(self, timeout: float) -> None:
        """Until every replica is healthy and lists the model.

        Raises ``EngineError`` after ``timeout`` seconds, ``ConfigError`` if one serves other
        models or wants a key.
        """
        deadline = time.monotonic() + timeout
        try:
            for replica in self._replicas:
                await self._wait_for(replica, deadline, timeout)
        finally:
            self._on_waiting(None)

    @property
    def max_model_len(self) -> int | None:
        """Tokens every replica takes, once ``wait_ready`` is over; None: nobody says."""
        known = [r.card.max_model_len for r in self._replicas if r.card and r.card.max_model_len]
        return min(known, default=None)

    async def close(self) -> None:
        """Drop the connections."""
        await self._http.aclose()

    # -- one request, until it is answered --------------------------------------------------------

    async def _until_answered(self, ids: list[int], group_id: int) -> FloatColumn:
        stranded, tries = False, 0
        answered = sum(replica.answered for replica in self._replicas)
        try:
            while True:
                replica = self._choose(group_id)
                if replica is None:
                    self._stranded += not stranded
                    stranded = True
                    self._on_waiting(self._outage())
                    await self._sleep()
                    continue
                try:
                    column = await self._score(replica, ids)
                except _Unavailable as error:
                    tries += error.failed
                    others = sum(each.answered for each in self._replicas) - answered
                    if tries >= FAILED_TRIES and others:
                        raise EngineError(
                            f"{self._at(replica)} failed on one request of {len(ids)} tokens "
                            f"{tries} times and answered others meanwhile: {error}. See its log."
                        ) from error
                    self._note_down(replica, str(error))
                else:
                    self._note_up(replica)
                    replica.answered += 1
                    return column
        finally:
            self._stranded -= stranded
            if stranded and not self._stranded:
                self._on_waiting(None)

    def _choose(self, group_id: int) -> _Replica | None:
        """The group's own replica, or the next one that is not resting after a failure."""
        now, number = time.monotonic(), len(self._replicas)
        for offset in range(number):
            replica = self._replicas[(group_id + offset) % number]
            if replica.retry_at <= now:
                return replica
        return None

    async def _sleep(self) -> None:
        wake = min(replica.retry_at for replica in self._replicas)
        await asyncio.sleep(max(0.0, wake - time.monotonic()))

    async def _score(self, replica: _Replica, ids: list[int]) -> FloatColumn:
        """One try. Raises ``_Unavailable``, or ``EngineError`` for what a further try cannot
        mend."""
        card = replica.card or await self._learn(replica, EngineError)
        if card.max_model_len is not None and len(ids) > card.max_model_len:
            raise OverlongError(
                f"{self._at(replica)} takes {card.max_model_len} tokens (its max_model_len), and "
                f"this sequence has {len(ids)}. Serve it with more, or lower seq_len or "
                "max_completion_tokens."
            )
        body = {"model": self.model, "token_ids": ids, "sampling_params": SCORING}
        if (salt := self._cache_salt()) is not None:
            body["cache_salt"] = salt
        route = "/inference/v1/generate"
        answer = await self._request("POST", replica, route, content=msgspec.json.encode(body))
        if not answer.is_success:
            raise EngineError(await self._refusal(replica, route, answer, len(ids)))
        try:
            scores = msgspec.json.decode(answer.content, type=_Scores)
            return read_scores(scores.prompt_logprobs, ids)
        except (msgspec.DecodeError, ValueError) as error:
            raise EngineError(f"{self._at(replica)}: {route}: {error}") from error

    async def _request(
        self, method: str, replica: _Replica, route: str, **request: object
    ) -> httpx.Response:
        """An answer, good or a refusal. Raises ``_Unavailable``."""
        try:
            answer = await self._http.request(method, replica.root + route, **request)  # type: ignore[arg-type]
        except httpx.TransportError as error:
            raise _Unavailable(self._explain(error)) from error
        if answer.status_code == 429 or answer.status_code >= 500:
            reason = f"{route} answers {answer.status_code} {_text(answer)}"
            raise _Unavailable(reason, failed=answer.status_code == 500)
        return answer

    async def _learn(self, replica: _Replica, kind: type[ConfigError | EngineError]) -> _Card:
        """The model's card there. Raises ``kind`` if the endpoint does not serve it."""
        answer = await self._request("GET", replica, "/v1/models")
        if not answer.is_success:
            raise kind(await self._refusal(replica, "/v1/models", answer))
        try:
            cards = msgspec.json.decode(answer.content, type=_Models).data
        except msgspec.DecodeError as error:
            raise kind(f"{self._at(replica)}: /v1/models: {error}. Is it an engine?") from error
        replica.card = next((card for card in cards if card.id == self.model), None)
        if replica.card is None:
            names = ", ".join(repr(card.id) for card in cards) or "nothing"
            raise kind(f"{self._at(replica)} serves {names}. Mend the name or the base_url.")
        return replica.card

    # -- outages ----------------------------------------------------------------------------------

    def _note_down(self, replica: _Replica, reason: str) -> None:
        """Let it rest, longer each time. Requests that fail together count as one try."""
        now = time.monotonic()
        if not replica.failures:
            replica.down_since = now
            replica.card = None  # it may come back as another model
            log.warning("%s is away: %s; trying on", self._at(replica), reason)
        if replica.retry_at <= now:
            first, longest = self._backoff
            replica.retry_at = now + min(longest, first * 2**replica.failures)
            replica.failures = min(replica.failures + 1, 32)
        replica.reason = reason

    def _note_up(self, replica: _Replica) -> None:
        if replica.failures:
            away = time.monotonic() - replica.down_since
            log.warning("%s answers again after %.1f s", self._at(replica), away)
        replica.failures, replica.retry_at = 0, 0.0

    async def _wait_for(self, replica: _Replica, deadline: float, timeout: float) -> None:
        while True:
            try:
                health = await self._request("GET", replica, "/health")
                if not health.is_success and health.status_code != 404:  # not every server has it
                    raise ConfigError(await self._refusal(replica, "/health", health))
                await self._learn(replica, ConfigError)
            except _Unavailable as error:
                self._note_down(replica, str(error))
            else:
                return self._note_up(replica)
            self._on_waiting(self._outage(replica))
            left = deadline - time.monotonic()
            if left <= 0:
                raise EngineError(
                    f"{self._at(replica)} is not ready after {timeout:g} s: {replica.reason}. "
                    "Start it, or mend the base_url."
                )
            await asyncio.sleep(min(left, max(0.0, replica.retry_at - time.monotonic())))

    def _outage(self, *replicas: _Replica) -> str:
        """Whom the requests wait for, and why."""
        away = [f"{each.root} ({each.reason})" for each in replicas or self._replicas]
        return f"{self.where} {self.model!r} at {', '.join(away)}"

    # -- messages ---------------------------------------------------------------------------------

    def _at(self, replica: _Replica) -> str:
        return f"{self.where} {self.model!r} at {replica.root}"

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
        self, replica: _Replica, route: str, answer: httpx.Response, length: int | None = None
    ) -> str:
        """Where, what was answered, what to do about it."""
        status = answer.status_code
        found = f"{self._at(replica)} refuses {route}: {status} {_text(answer)}"
        if status in (401, 403):
            return f"{found}. Give its key by api_key_var."
        if status == 404 and route != "/v1/models":
            await self._learn(replica, EngineError)  # raises if it serves another model by now
            return (
                f"{found}. It serves the model but not this route: a reference must give "
                "prompt_logprobs (prime-rl serve, vLLM with --enable-scale-out)."
            )
        if length is not None and replica.card and replica.card.max_model_len == length:
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
