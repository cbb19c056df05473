"""The orchestrator's side of one engine's admin routes: health, pause, new weights, resume, sleep.

Who is asked when, over several engines, is decided in ``fleet.py``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from prime_rl.errors import EngineError, EngineGone
from prime_rl.plugins.weight_transports import Receives
from prime_rl.weights.versions import Weights

log = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
READ_SECONDS = 300.0
"""For an engine to answer ``/pause`` and ``/resume``: it may finish a long step first."""
CLEAN_UP_SECONDS = 30.0
"""How long a failed update goes on trying to resume the engine before its failure is reported."""
ONCE_SECONDS = 1.0
"""The same where the engine does not answer: one attempt, in case it has been paused."""
HEALTH_SECONDS = 10.0
"""How long an engine may take to say that it is there."""
METRICS_SECONDS = 2.0
"""How long an engine may take to tell of itself."""


@dataclass(frozen=True)
class RetryPolicy:
    """When an engine that answers 5xx, or not at all, is asked again (semantics 2.11)."""

    attempts: int = 10
    first_wait: float = 1.0
    """Seconds before the second attempt; doubled each time."""
    longest_wait: float = 10.0

    def wait_after(self, attempt: int) -> float | None:
        """Seconds until the next attempt; None if there is none. The first attempt is 1."""
        if attempt >= self.attempts:
            return None
        return min(self.first_wait * 2.0 ** (attempt - 1), self.longest_wait)


class EngineSilent(EngineGone):
    """It takes connections, and has let all the time go by that an answer may take."""


class EngineLocked(EngineError):
    """It does not take the run's key; asking again is no use."""


class NotReady(Exception):
    """The engine does not serve; the text says why. ``listening``: something answered, or took
    the connection and says nothing; ``silent``: the latter."""

    def __init__(self, reason: str, listening: bool, silent: bool = False) -> None:
        super().__init__(reason)
        self.listening, self.silent = listening, silent


class OtherModel(NotReady):
    """It serves, but not the model that it was asked for."""


class _Failed(Exception):
    """One attempt came to nothing; ``passing``: the next one may fare better."""

    def __init__(self, reason: str, passing: bool, kind: type[EngineError] = EngineError) -> None:
        super().__init__(reason)
        self.passing, self.kind = passing, kind


class _Health(msgspec.Struct):
    version: int | None = None
    receives: Receives | None = None


class _Card(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Card]


class EngineAdmin:
    """Steers one engine.

    Raises ``EngineError`` naming the engine and what it answered, once retries are used up: at most
    ``retry.attempts`` of them, within twice the time that one answer may take. ``EngineGone`` if it
    did not answer at all.
    """

    def __init__(
        self,
        url: str,
        admin_key: str,
        update_timeout: float = 720.0,
        retry: RetryPolicy | None = None,
    ) -> None:
        self.url = url
        self.receives: Receives | None = None
        """As of the last look."""
        self._timeout = update_timeout
        self._retry = retry or RetryPolicy()
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {admin_key}"},
            timeout=httpx.Timeout(30.0, connect=CONNECT_SECONDS),
            # An SSL context costs 70 ms, and plain HTTP needs none.
            verify=url.startswith("https://"),
        )

    async def look(self, model: str | None = None) -> int | None:
        """The version it samples from; None if it does not tell. Raises ``NotReady`` if it is not
        healthy, lists no model, or lists others than ``model``."""
        try:
            health = await self._http.get(f"{self.url}/health", timeout=HEALTH_SECONDS)
            models = await self._http.get(f"{self.url}/v1/models", timeout=HEALTH_SECONDS)
        except httpx.TransportError as error:
            refused = isinstance(error, httpx.ConnectError | httpx.RemoteProtocolError)
            text = f"{type(error).__name__} {error}".strip()
            raise NotReady(text, not refused, isinstance(error, httpx.TimeoutException)) from error
        for route, answer in (("/health", health), ("/v1/models", models)):
            if not answer.is_success:
                text = f"{route} answers {answer.status_code} {_text(answer)}".rstrip()
                raise NotReady(text, listening=True)
        _check_models(models, model)
        told = _told(health)
        self.receives = told.receives
        return told.version

    async def update(
        self, weights: Weights, *, asleep: bool = False, meeting: Mapping[str, Any] | None = None
    ) -> None:
        """Load published weights while requests wait; from sleep, it is woken instead of paused.
        ``meeting``: what a weight transport tells the engine that receives.
        However it ends, the engine is resumed if it can be reached."""
        try:
            await (self.wake() if asleep else self.pause())
            body: dict[str, Any] = {
                "version": weights.version,
                "weight_dir": str(weights.directory),
            }
            if meeting is not None:
                body["meeting"] = dict(meeting)
            once = meeting is not None  # it takes place once
            await self._persist("/update_weights", timeout=self._timeout, once=once, json=body)
        except BaseException as error:
            within = ONCE_SECONDS if isinstance(error, EngineGone) else CLEAN_UP_SECONDS
            with suppress(EngineError):  # the first failure is the one to report
                await self._persist("/resume", within=within)
            raise
        await self._persist("/resume")

    async def pause(self) -> None:
        """No token is sampled after this; requests in flight keep their place."""
        await self._persist("/pause", params={"mode": "keep", "clear_cache": "false"})

    async def sleep(self) -> None:
        """Pause, and give the accelerator's memory back. Requests in flight survive."""
        await self.pause()
        await self._persist("/sleep", params={"level": "1"})

    async def wake(self) -> None:
        """Take the memory again. Nothing is sampled before the engine is resumed."""
        await self._persist("/wake_up")

    async def metrics(self) -> str | None:
        """Its Prometheus page; None if it does not answer at once."""
        try:
            answer = await self._http.get(f"{self.url}/metrics", timeout=METRICS_SECONDS)
        except httpx.TransportError:
            return None
        return answer.text if answer.is_success else None

    async def close(self) -> None:
        """Drop the connections."""
        await self._http.aclose()

    async def _persist(
        self,
        route: str,
        *,
        timeout: float = READ_SECONDS,
        within: float | None = None,
        once: bool = False,
        **body: Any,
    ) -> None:
        """Post until it is answered, refused for good, or there is no time left.

        Timeout: seconds for one answer. Within: seconds for all attempts, twice that by default.
        Once: there is no second one.
        """
        deadline = time.monotonic() + (2 * timeout if within is None else within)
        attempt, always_silent = 1, True
        while True:
            left = deadline - time.monotonic()
            try:
                return await self._post(route, min(timeout, left), body)
            except _Failed as failure:
                wait = self._retry.wait_after(attempt) if failure.passing and not once else None
                always_silent &= failure.kind is EngineSilent
                if wait is None or time.monotonic() + wait >= deadline:
                    tries = f" ({attempt} attempts)" if attempt > 1 else ""
                    text = f"engine {self.url} {failure}{tries}"
                    silent = failure.kind is EngineSilent
                    kind = EngineGone if silent and not always_silent else failure.kind
                    raise kind(text) from failure.__cause__
                log.warning(
                    "engine %s %s; attempt %d of %d in %.1f s",
                    *(self.url, failure, attempt + 1, self._retry.attempts, wait),
                )
            await asyncio.sleep(wait)
            attempt += 1

    async def _post(self, route: str, timeout: float, body: dict[str, Any]) -> None:
        """Once. Raises ``_Failed``."""
        limits = httpx.Timeout(timeout, connect=min(CONNECT_SECONDS, timeout))
        try:
            answer = await self._http.post(f"{self.url}{route}", timeout=limits, **body)
        except httpx.TransportError as error:
            reason = f"did not answer {route}: {type(error).__name__} {error}".rstrip()
            silent = isinstance(error, httpx.TimeoutException)
            kind = EngineSilent if silent else EngineGone
            raise _Failed(reason, passing=True, kind=kind) from error
        if not answer.is_success:
            reason = f"refused {route}: {answer.status_code} {answer.text[:500]}"
            locked = answer.status_code in (401, 403)
            passing = answer.is_server_error
            raise _Failed(reason, passing, EngineLocked if locked else EngineError)


def _check_models(models: httpx.Response, model: str | None) -> None:
    try:
        names = [card.id for card in msgspec.json.decode(models.content, type=_Models).data]
    except msgspec.DecodeError as error:
        raise NotReady(f"/v1/models: {error}. Is it an engine?", listening=True) from error
    if not names:
        raise NotReady("it lists no model", listening=True)
    if model is not None and model not in names:
        found = ", ".join(map(repr, names))
        raise OtherModel(f"it serves {found}, expected {model!r}", listening=True)


def _told(health: httpx.Response) -> _Health:
    with suppress(msgspec.DecodeError):  # vLLM's own answer is empty
        return msgspec.json.decode(health.content, type=_Health)
    return _Health()


def _text(answer: httpx.Response) -> str:
    """What the answer says, on one line."""
    return " ".join(answer.text.split())[:200]
