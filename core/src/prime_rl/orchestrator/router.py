"""Which engine of the policy plays which episode."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable
from functools import cache

from prime_rl.env.episode import ModelEndpoint, RolloutResult
from prime_rl.inference.client import EngineFailed
from prime_rl.inference.engine import Engine
from prime_rl.inference.pool import EnginePool, GivenUp

PROVIDER_ERROR = "ProviderError"
"""verifiers' class for a model call that failed."""
Episode = Callable[[ModelEndpoint], Awaitable[list[RolloutResult]]]


class EngineRouter:
    """Runs each episode at an engine of a pool. An episode whose engine goes away runs again at
    another engine; an episode that fails again and again has failed."""

    def __init__(
        self,
        pool: EnginePool,
        model: str,
        api_key_var: str,
        client: str = "tokens",
        timeout: float | None = None,
    ) -> None:
        self.pool = pool
        self._endpoint = cache(
            lambda url: ModelEndpoint(model, f"{url}/v1", api_key_var, client, timeout)
        )

    async def run(self, key: Hashable, episode: Episode) -> list[RolloutResult]:
        """Play one episode; those of one key share an engine, and its prefix cache."""
        last: list[RolloutResult] = []

        async def work(engine: Engine) -> list[RolloutResult]:
            nonlocal last
            last = await episode(self._endpoint(engine.url))
            for failed in (each for each in last if each.error_type == PROVIDER_ERROR):
                status = failed.status_code  # no answer, too many requests, 5xx: it may pass
                if status is None or status in (408, 429) or status >= 500:
                    raise EngineFailed(f"{engine.client.label}: {failed.error}", 500)
            return last

        try:
            return await self.pool.ask(key, work)
        except GivenUp as error:
            lost = RolloutResult(ok=False, error_type=PROVIDER_ERROR, error=str(error))
            return last or [lost]
