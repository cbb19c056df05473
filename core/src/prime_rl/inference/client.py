"""The orchestrator's side of the engines' admin routes: health, pause, new weights, resume."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from prime_rl.plugins.errors import EngineError

log = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
READ_SECONDS = 300.0
"""For an engine to answer ``/pause`` and ``/resume``: it may finish a long step first."""
CLEAN_UP_SECONDS = 30.0
"""How long a failed update goes on trying to resume the engines before its failure is reported."""

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


class _Failed(Exception):
    """One attempt came to nothing; ``passing``: the next one may fare better."""

    def __init__(self, reason: str, passing: bool) -> None:
        super().__init__(reason)
        self.passing = passing


class EngineAdmin:
    """Steers every engine that serves the live policy.

    Raises ``EngineError`` naming the engine and what it answered, once retries are used up: at most
    ``retry.attempts`` of them, within twice the time that one answer may take.
    """

    def __init__(
        self,
        urls: Sequence[str],
        admin_key: str,
        update_timeout: float = 720.0,
        retry: RetryPolicy | None = None,
    ) -> None:
        self.urls = list(urls)
        self._timeout = update_timeout
        self._retry = retry or RetryPolicy()
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {admin_key}"},
            timeout=httpx.Timeout(30.0, connect=CONNECT_SECONDS),
            verify=False,  # plain HTTP; building an SSL context costs 70 ms
        )

    async def wait_ready(self, timeout: float) -> None:
        """Until every engine is healthy and lists its model."""
        deadline = time.monotonic() + timeout
        for url in self.urls:
            while not await self._healthy(url):
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"engine {url} is not healthy after {timeout:.0f} s "
                        "(inference.ready_timeout). "
                        "Its log is logs/latest/inference.log of the run directory."
                    )
                await asyncio.sleep(0.1)

    async def update_weights(self, weight_dir: Path, version: int) -> float:
        """Load published weights into every engine while their requests wait. Returns the seconds
        it took. However it ends, every engine that can be reached is resumed."""
        start = time.perf_counter()
        try:
            await self._everywhere("/pause", params={"mode": "keep", "clear_cache": "false"})
            await self._everywhere(
                "/update_weights",
                timeout=self._timeout,
                json={"weight_dir": str(weight_dir), "version": version},
            )
        except BaseException:
            with suppress(EngineError):  # the first failure is the one to report
                await self._everywhere("/resume", within=CLEAN_UP_SECONDS)
            raise
        await self._everywhere("/resume")
        return time.perf_counter() - start

    async def metrics(self) -> list[str]:
        """The Prometheus page of every engine that answers at once."""
        looks = (self._http.get(f"{url}/metrics", timeout=METRICS_SECONDS) for url in self.urls)
        answers = await asyncio.gather(*looks, return_exceptions=True)
        return [
            each.text for each in answers if isinstance(each, httpx.Response) and each.is_success
        ]

    async def close(self) -> None:
        """Drop the connections."""
        await self._http.aclose()

    async def _healthy(self, url: str) -> bool:
        try:
            health = await self._http.get(f"{url}/health")
            models = await self._http.get(f"{url}/v1/models")
        except httpx.TransportError:
            return False
        return health.is_success and models.is_success and bool(models.json()["data"])

    async def _everywhere(
        self, route: str, *, timeout: float = READ_SECONDS, within: float | None = None, **body: Any
    ) -> None:
        """Every engine has answered when this returns or raises: nothing overtakes a late pause.

        Timeout: seconds for one answer. Within: seconds for all attempts, twice that by default.
        """
        total = 2 * timeout if within is None else within
        posts = (self._persist(url, route, timeout, total, body) for url in self.urls)
        for outcome in await asyncio.gather(*posts, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    async def _persist(
        self, url: str, route: str, timeout: float, total: float, body: dict[str, Any]
    ) -> None:
        """Post until it is answered, refused for good, or there is no time left."""
        deadline = time.monotonic() + total
        attempt = 1
        while True:
            left = deadline - time.monotonic()
            try:
                return await self._post(url, route, min(timeout, left), body)
            except _Failed as failure:
                wait = self._retry.wait_after(attempt) if failure.passing else None
                if wait is None or time.monotonic() + wait >= deadline:
                    tries = f" ({attempt} attempts)" if attempt > 1 else ""
                    raise EngineError(f"engine {url} {failure}{tries}") from failure.__cause__
                log.warning(
                    "engine %s %s; attempt %d of %d in %.1f s",
                    *(url, failure, attempt + 1, self._retry.attempts, wait),
                )
            await asyncio.sleep(wait)
            attempt += 1

    async def _post(self, url: str, route: str, timeout: float, body: dict[str, Any]) -> None:
        """Once. Raises ``_Failed``."""
        limits = httpx.Timeout(timeout, connect=min(CONNECT_SECONDS, timeout))
        try:
            answer = await self._http.post(f"{url}{route}", timeout=limits, **body)
        except httpx.TransportError as error:
            reason = f"did not answer {route}: {type(error).__name__} {error}".rstrip()
            raise _Failed(reason, passing=True) from error
        if not answer.is_success:
            reason = f"refused {route}: {answer.status_code} {answer.text[:500]}"
            raise _Failed(reason, passing=answer.is_server_error)
