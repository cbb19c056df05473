"""HTTP of one engine: what it says of itself, and its admin routes. ``pool.py`` and ``fleet.py``
decide which engine is asked when."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from itertools import cycle
from typing import Any
from urllib.request import getproxies

import httpx
import msgspec

from prime_rl.errors import EngineError, EngineGone
from prime_rl.inference import timing
from prime_rl.inference.timing import RetryPolicy
from prime_rl.plugins.weight_transports import Receives
from prime_rl.proxies import is_loopback
from prime_rl.weights.versions import Weights

log = logging.getLogger(__name__)

_PROBES = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 8}
KEEPALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in _PROBES.items()
        if hasattr(socket, name)
    ),
]
"""A request without a time limit ends when the network has dropped its connection without a word,
as NAT does with an idle one: after a minute the system asks the other end, for two minutes."""


class NoAnswer(EngineGone):
    """It takes no connection, or drops it."""


class NotListening(NoAnswer):
    """Nothing listens at its address: its process has ended."""


class EngineSilent(EngineGone):
    """It takes connections and has not answered in time."""


class Refusal(EngineError):
    """It answered, but not as asked. ``status``: the answer's, if that is the reason."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


class EngineFailed(Refusal):
    """429, 5xx, or it lists no model yet: a later attempt may succeed."""


class EngineRefused(Refusal):
    """Another attempt gets the same answer."""

    @property
    def locked(self) -> bool:
        """It refused the key."""
        return self.status in (401, 403)

    @property
    def fix(self) -> str:
        """The way out for a frozen model."""
        if self.locked:
            return "Give its key by api_key_var."
        return "Check that it is an engine that scores prompts (docs/engines.md)."


class OtherModel(EngineRefused):
    """It serves other models than the expected one."""

    fix = "Fix the name or the base_url."


class Health(msgspec.Struct):
    """What an engine says of itself."""

    version: int | None = None
    """The policy version that it samples from; None: it does not say, or has none."""
    receives: Receives | None = None
    max_model_len: int | None = None
    pauses_itself: bool = False
    """Sampling goes on while ``/update_weights`` reads and checks files."""
    capacity: int | None = None
    """Requests that it can run at once; None: it does not say."""


class _Updated(msgspec.Struct):
    """The answer of ``/update_weights``."""

    paused_seconds: float | None = None
    """For which nothing was sampled. None: the engine does not say."""


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Card]


class _Keys(httpx.Auth):
    """Bearer keys in turn. A request that has a key of its own keeps it."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = cycle(keys)

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        if "Authorization" not in request.headers:
            request.headers["Authorization"] = f"Bearer {next(self._keys)}"
        yield request


class EngineClient:
    """The connection to one engine. Errors begin with ``label``.

    The admin routes raise after at most ``retry.attempts`` attempts within twice the time that one
    answer may take: ``NoAnswer``; ``EngineSilent`` if all attempts met silence; ``EngineFailed``;
    ``EngineRefused``.
    """

    def __init__(
        self,
        url: str,
        key: str | Sequence[str] | None,
        retry: RetryPolicy | None = None,
        label: str = "engine",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """``key``: the bearer key, or several that take turns, request by request."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self.label = f"{label} {self.url}"
        self.health = Health()
        """As of the last good look."""
        self.asleep = False
        """It was put to sleep, and not woken since."""
        self.last_paused: float | None = None
        """Seconds for which the last update kept it from sampling. None: there was none."""

        self._paused = 0.0
        self._retry = retry or RetryPolicy()

        limits = httpx.Limits(max_connections=None)
        # An SSL context costs 70 ms, and plain HTTP needs none.
        verify = not url.lower().startswith("http://")
        here = is_loopback(url)
        transport = None
        if not here and not getproxies():  # httpx asks no proxy through a transport of ours
            transport = httpx.AsyncHTTPTransport(
                verify=verify, limits=limits, socket_options=KEEPALIVE
            )
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={**(headers or {})},
            auth=_Keys([key] if isinstance(key, str) else key) if key else None,
            limits=limits,
            verify=verify,
            trust_env=not here,  # a proxy cannot reach this loopback
            transport=transport,
        )

    async def request(
        self, method: str, route: str, timeout: float | None, **body: Any
    ) -> httpx.Response:
        """One attempt. ``timeout``: seconds for the answer; None: no limit. Raises the errors
        above."""
        connect = timing.CONNECT_SECONDS
        if timeout is not None:
            connect = min(connect, timeout)
        limits = httpx.Timeout(timeout, connect=connect)
        try:
            answer = await self._http.request(method, route, timeout=limits, **body)
        except httpx.TransportError as error:
            text = f"{self.label} did not answer {route}"
            if not isinstance(error, httpx.TimeoutException):
                causes = _system_errors(error)
                # A name may have several addresses, of which IPv6 may be out of reach.
                refused = any(isinstance(each, ConnectionRefusedError) for each in causes)
                kind = NotListening if refused else NoAnswer
                raise kind(f"{text}: {_cause(error, causes)}") from error
            connecting = isinstance(error, httpx.ConnectTimeout)
            seconds = limits.connect if connecting else limits.read
            raise EngineSilent(f"{text} within {seconds:.3g} s") from error

        if answer.is_success:
            return answer

        status = answer.status_code
        excerpt = " ".join(answer.text.split())[:500].rstrip(".")
        passes = status == 429 or answer.is_server_error
        refusal = EngineFailed if passes else EngineRefused
        raise refusal(f"{self.label} refused {route}: {status} {excerpt}".rstrip(), status)

    async def look(self, model: str | None = None) -> Health:
        """Raises ``EngineError`` if it is not healthy, lists no model, or lists others than
        ``model``."""
        health = Health()
        try:
            answer = await self.request("GET", "/health", timing.HEALTH_SECONDS)
            with suppress(msgspec.DecodeError):  # vLLM's own answer is empty
                health = msgspec.json.decode(answer.content, type=Health)
        except EngineRefused as refusal:
            if refusal.status != 404:  # not every server has it
                raise

        answer = await self.request("GET", "/v1/models", timing.HEALTH_SECONDS)
        try:
            cards = msgspec.json.decode(answer.content, type=_Models).data
        except msgspec.DecodeError as error:
            raise EngineRefused(f"{self.label}: /v1/models: {error}. Is it an engine?") from error

        card = next((card for card in cards if model in (None, card.id)), None)
        if card is None:
            names = ", ".join(repr(card.id) for card in cards) or "no model"
            kind = OtherModel if cards else EngineFailed
            wanted = "one" if model is None else repr(model)
            raise kind(f"{self.label} serves {names}, expected {wanted}")

        health.max_model_len = card.max_model_len
        self.health = health
        return health

    async def update(self, weights: Weights, meeting: Mapping[str, Any] | None = None) -> None:
        """Load published weights. Requests wait, those of an engine that pauses itself only while
        the weights change. ``meeting``: what a weight transport tells
        the engine. Whatever happens, the engine is resumed if it can be reached."""
        body: dict[str, Any] = {"version": weights.version, "weight_dir": str(weights.directory)}
        if meeting is not None:
            body["meeting"] = dict(meeting)
        once = meeting is not None  # a meeting takes place once
        reported_pause: float | None = None
        paused_at = None
        started = time.perf_counter()

        try:
            if self.asleep:
                paused_at = started  # before, it slept for the trainer
                await self._post("/wake_up")
                self.asleep = False
            elif not self.health.pauses_itself:
                # An engine that pauses itself samples on until it has read and checked the files.
                await self._pause()
                paused_at = time.perf_counter()

            answer = await self._post(
                "/update_weights", timing.UPDATE_SECONDS, once=once, json=body
            )
            with suppress(msgspec.DecodeError):  # other servers answer with anything
                updated = msgspec.json.decode(answer.content, type=_Updated)
                reported_pause = updated.paused_seconds
        except BaseException as error:
            # Also when cancelled: an engine that stays paused would answer nothing any more.
            gone = isinstance(error, EngineGone)
            within = timing.GONE_CLEAN_UP_SECONDS if gone else timing.CLEAN_UP_SECONDS
            with suppress(EngineError):  # the first failure is the one to report
                await self._post("/resume", within=within)
            raise

        await self._post("/resume")

        if paused_at is None and reported_pause is not None:
            self.last_paused = reported_pause
        else:  # one that pauses itself and does not say for how long: at most this
            since = started if paused_at is None else paused_at
            self.last_paused = time.perf_counter() - since
        self._paused += self.last_paused

    def take_paused(self) -> float:
        """Seconds for which updates kept the engine from sampling, since the last call."""
        paused = self._paused
        self._paused = 0.0
        return paused

    async def sleep(self) -> None:
        """Pause, and give the accelerator's memory back. Requests in flight survive; the next
        update wakes it."""
        await self._pause()
        await self._post("/sleep", params={"level": "1"})
        self.asleep = True

    async def close(self) -> None:
        await self._http.aclose()

    async def _pause(self) -> None:
        """No token is sampled after this; requests in flight keep their place."""
        await self._post("/pause", params={"mode": "keep", "clear_cache": "false"})

    async def _post(
        self,
        route: str,
        timeout: float = timing.READ_SECONDS,
        *,
        within: float | None = None,
        once: bool = False,
        **body: Any,
    ) -> httpx.Response:
        """Post until it is answered, refused for good, or there is no time left.

        ``timeout``: seconds for one answer. ``within``: seconds for all attempts, twice that by
        default, and longer if the engine answers ``/health``. ``once``: one attempt.
        """
        start = time.monotonic()
        deadline = start + (2 * timeout if within is None else within)
        all_silent = True
        attempt = 0
        while True:
            attempt += 1
            try:
                left = min(timeout, deadline - time.monotonic())
                return await self.request("POST", route, left, **body)
            except (EngineGone, EngineFailed) as error:
                may_wait = within is None and route in ("/pause", "/resume")
                if may_wait and isinstance(error, EngineSilent) and await self._is_alive():
                    # It takes a long step: what is hung does not answer at all.
                    extended = min(deadline + timeout, start + timing.UPDATE_SECONDS)
                    deadline = max(deadline, extended)

                all_silent = all_silent and isinstance(error, EngineSilent)
                wait = self._retry.wait_after(attempt)
                last = attempt >= self._retry.attempts
                if once or last or time.monotonic() + wait >= deadline:
                    kind = type(error)
                    if kind is EngineSilent and not all_silent:
                        kind = NoAnswer
                    tries = f" ({attempt} attempts)" if attempt > 1 else ""
                    raise kind(f"{error}{tries}") from error.__cause__

                following = f"attempt {attempt + 1} of {self._retry.attempts} in {wait:.1f} s"
                log.warning("%s; %s", error, following)

            await asyncio.sleep(wait)

    async def _is_alive(self) -> bool:
        try:
            await self.request("GET", "/health", timing.HEALTH_SECONDS)
        except EngineError:
            return False
        return True


def _cause(error: httpx.TransportError, causes: Sequence[OSError]) -> str:
    """httpx says "all connection attempts failed"; the system knows why."""
    for cause in causes:
        assert cause.errno is not None
        return os.strerror(cause.errno) if cause.errno > 0 else str(cause.strerror)
    return f"{type(error).__name__} {error}".rstrip()


def _system_errors(error: BaseException | None) -> list[OSError]:
    """The errors of the system that led to this one."""
    if error is None:
        return []
    if isinstance(error, OSError) and error.errno:
        return [error]
    if isinstance(error, BaseExceptionGroup):
        return [cause for each in error.exceptions for cause in _system_errors(each)]
    return _system_errors(error.__cause__ or error.__context__)
