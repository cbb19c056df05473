"""The orchestrator's side of the engines' admin routes: health, pause, new weights, resume."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from prime_rl.plugins.errors import EngineError


class EngineAdmin:
    """Steers every engine that serves the live policy.

    Raises ``EngineError`` naming the engine and what it answered.
    """

    def __init__(self, urls: Sequence[str], admin_key: str, update_timeout: float = 720.0) -> None:
        self.urls = list(urls)
        self._timeout = update_timeout
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {admin_key}"},
            timeout=httpx.Timeout(30.0, connect=10.0),
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
        it took."""
        start = time.perf_counter()
        try:
            await self._everywhere("/pause", params={"mode": "keep", "clear_cache": "false"})
            await self._everywhere(
                "/update_weights",
                json={"weight_dir": str(weight_dir), "version": version},
                timeout=self._timeout,
            )
        except BaseException:
            with suppress(EngineError):  # the first failure is the one to report
                await self._everywhere("/resume")
            raise
        await self._everywhere("/resume")
        return time.perf_counter() - start

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

    async def _everywhere(self, route: str, **request: Any) -> None:
        """Every engine has answered when this returns or raises: nothing overtakes a late pause."""
        posts = (self._post(url, route, **request) for url in self.urls)
        for outcome in await asyncio.gather(*posts, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    async def _post(self, url: str, route: str, **request: Any) -> None:
        try:
            answer = await self._http.post(f"{url}{route}", **request)
        except httpx.TransportError as error:
            raise EngineError(
                f"engine {url} did not answer {route}: {type(error).__name__} {error}"
            ) from error
        if not answer.is_success:
            raise EngineError(
                f"engine {url} refused {route}: {answer.status_code} {answer.text[:500]}"
            )
