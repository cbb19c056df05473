"""HTTP of one engine: what it says of itself, and its admin routes. ``pool.py`` and ``fleet.py``
decide which engine is asked when."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import httpx
import msgspec

from prime_rl.errors import EngineError, EngineGone
from prime_rl.inference import timing
from prime_rl.inference.timing import RetryPolicy
from prime_rl.plugins.weight_transports import Receives
from prime_rl.weights.versions import Weights

log = logging.getLogger(__name__)


class EngineSilent(EngineGone):
    """It takes connections and has not answered in time."""


class EngineLocked(EngineError):
    """It refuses the key. Another attempt is no use."""


class EngineFailed(EngineError):
    """It answered 5xx."""


class NotReady(Exception):
    """A look at an engine failed; the text says why."""


class NotListening(NotReady):
    """It takes no connection: its process has ended, or starts."""


class Silent(NotReady):
    """It takes connections and did not answer in time."""


class Refused(NotReady):
    """It answers, and another look will not change the answer. ``fix``: what the user can do."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(reason)
        self.fix = fix


class OtherModel(Refused):
    """It serves other models than the expected one."""


class Health(msgspec.Struct):
    """What an engine says of itself."""

    version: int | None = None
    """The policy version that it samples from; None: it does not say, or has none."""
    receives: Receives | None = None
    max_model_len: int | None = None


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Card]


class EngineClient:
    """The connection to one engine. The admin routes raise ``EngineError`` with the engine and its
    answer, after at most ``retry.attempts`` attempts within twice the time that one answer may
    take; ``EngineGone`` if no answer came, ``EngineSilent`` if none of the attempts had any."""

    def __init__(
        self,
        url: str,
        key: str | None,
        update_timeout: float = timing.UPDATE_SECONDS,
        retry: RetryPolicy | None = None,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.health = Health()
        """As of the last good look."""
        self.asleep = False
        """It was put to sleep, and not woken since."""
        self._timeout, self._retry = update_timeout, retry or RetryPolicy()
        self.http = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(30.0, connect=timing.CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None),
            # An SSL context costs 70 ms, and plain HTTP needs none.
            verify=url.startswith("https://"),
        )

    async def look(self, model: str | None = None) -> Health:
        """Raises ``NotReady`` if it is not healthy, lists no model, or lists others than
        ``model``."""
        health, models = await self._get("/health"), await self._get("/v1/models")
        try:
            cards = msgspec.json.decode(models.content, type=_Models).data
        except msgspec.DecodeError as error:
            raise Refused(f"/v1/models: {error}", "Is it an engine?") from error
        card = next((card for card in cards if model in (None, card.id)), None)
        if card is None:
            found = ", ".join(repr(card.id) for card in cards) or "no model"
            reason = f"it serves {found}, expected {model!r}"
            raise OtherModel(reason, "Fix the name or the base_url.")
        self.health = Health()
        with suppress(msgspec.DecodeError):  # vLLM's own answer is empty
            self.health = msgspec.json.decode(health.content, type=Health)
        self.health.max_model_len = card.max_model_len
        return self.health

    async def update(self, weights: Weights, meeting: Mapping[str, Any] | None = None) -> None:
        """Load published weights while requests wait. ``meeting``: what a weight transport tells
        the engine. Whatever happens, the engine is resumed if it can be reached."""
        body: dict[str, Any] = {"version": weights.version, "weight_dir": str(weights.directory)}
        if meeting is not None:
            body["meeting"] = dict(meeting)
        once = meeting is not None  # a meeting takes place once
        try:
            if self.asleep:
                await self._post("/wake_up")
                self.asleep = False
            else:
                await self._pause()
            await self._post("/update_weights", timeout=self._timeout, once=once, json=body)
        except BaseException as error:
            gone = isinstance(error, EngineGone)
            within = timing.GONE_CLEAN_UP_SECONDS if gone else timing.CLEAN_UP_SECONDS
            with suppress(EngineError):  # the first failure is the one to report
                await self._post("/resume", within=within)
            raise
        await self._post("/resume")

    async def sleep(self) -> None:
        """Pause, and give the accelerator's memory back. Requests in flight survive; the next
        update wakes it."""
        await self._pause()
        await self._post("/sleep", params={"level": "1"})
        self.asleep = True

    async def metrics(self) -> str | None:
        """Its Prometheus page; None if it does not answer at once."""
        try:
            answer = await self.http.get("/metrics", timeout=timing.METRICS_SECONDS)
        except httpx.TransportError:
            return None
        return answer.text if answer.is_success else None

    async def close(self) -> None:
        """Close the connections."""
        await self.http.aclose()

    async def _pause(self) -> None:
        """No token is sampled after this; requests in flight keep their place."""
        await self._post("/pause", params={"mode": "keep", "clear_cache": "false"})

    async def _get(self, route: str) -> httpx.Response:
        try:
            answer = await self.http.get(route, timeout=timing.HEALTH_SECONDS)
        except httpx.TransportError as error:
            kind: type[NotReady] = Silent if isinstance(error, httpx.TimeoutException) else NotReady
            if isinstance(error, httpx.ConnectError | httpx.RemoteProtocolError):
                kind = NotListening
            raise kind(explain(error)) from error
        status = answer.status_code
        if answer.is_success or (status == 404 and route == "/health"):  # not every server has it
            return answer
        if status == 429 or answer.is_server_error:
            raise NotReady(f"{route} answers {status} {one_line(answer)}".rstrip())
        raise Refused(f"it refuses {route}: {status} {one_line(answer)}".rstrip(), fix_of(status))

    async def _post(
        self,
        route: str,
        *,
        timeout: float = timing.READ_SECONDS,
        within: float | None = None,
        once: bool = False,
        **body: Any,
    ) -> None:
        """Post until it is answered, refused for good, or there is no time left.

        ``timeout``: seconds for one answer. ``within``: seconds for all attempts, twice that by
        default. ``once``: one attempt.
        """
        deadline = time.monotonic() + (2 * timeout if within is None else within)
        silent = True
        for attempt in itertools.count(1):
            try:
                return await self._try(route, min(timeout, deadline - time.monotonic()), body)
            except (EngineGone, EngineFailed) as error:
                silent &= isinstance(error, EngineSilent)
                wait, last = self._retry.wait_after(attempt), attempt >= self._retry.attempts
                if once or last or time.monotonic() + wait >= deadline:
                    kind = type(error)
                    if isinstance(error, EngineSilent) and not silent:
                        kind = EngineGone
                    tries = f" ({attempt} attempts)" if attempt > 1 else ""
                    raise kind(f"{error}{tries}") from error.__cause__
                following = f"attempt {attempt + 1} of {self._retry.attempts} in {wait:.1f} s"
                log.warning("%s; %s", error, following)
            await asyncio.sleep(wait)

    async def _try(self, route: str, timeout: float, body: dict[str, Any]) -> None:
        limits = httpx.Timeout(timeout, connect=min(timing.CONNECT_SECONDS, timeout))
        try:
            answer = await self.http.post(route, timeout=limits, **body)
        except httpx.TransportError as error:
            kind = EngineSilent if isinstance(error, httpx.TimeoutException) else EngineGone
            raise kind(f"engine {self.url} did not answer {route}: {explain(error)}") from error
        if answer.is_success:
            return
        refusal = f"engine {self.url} refused {route}: {answer.status_code} {one_line(answer)}"
        if answer.is_server_error:
            raise EngineFailed(refusal)
        raise (EngineLocked if answer.status_code in (401, 403) else EngineError)(refusal)


def explain(error: httpx.TransportError) -> str:
    """Why no answer came."""
    if isinstance(error, httpx.TimeoutException):
        limits = error.request.extensions["timeout"]
        if isinstance(error, httpx.ConnectTimeout):
            return f"no connection within {limits['connect']:.3g} s"
        return f"no answer within {limits['read']:.3g} s"
    cause: BaseException | None = error
    while cause is not None:  # httpx says "all connection attempts failed"; the system knows why
        if isinstance(cause, OSError) and cause.errno:
            return os.strerror(cause.errno) if cause.errno > 0 else str(cause.strerror)
        cause = cause.__cause__ or cause.__context__
    return f"{type(error).__name__} {error}".rstrip()


def fix_of(status: int) -> str:
    """What to do about a refusal of a frozen model."""
    if status in (401, 403):
        return "Give its key by api_key_var."
    return "Check that it is an engine that scores prompts (docs/engines.md)."


def one_line(answer: httpx.Response) -> str:
    """What the answer says."""
    return " ".join(answer.text.split())[:500].rstrip(".")
