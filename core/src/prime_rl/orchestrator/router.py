"""Which engine of the policy plays which episode."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from functools import cache
from itertools import cycle

from prime_rl.env.episode import ModelEndpoint, RolloutResult
from prime_rl.inference.client import EngineFailed
from prime_rl.inference.engine import Replica
from prime_rl.inference.pool import EnginePool, GivenUp

PROVIDER_ERROR = "ProviderError"
"""verifiers' class for a model call that failed."""
OVERLOADED = (429, 503)
"""Status codes of an engine that has no room or no time: its pool asks again until it has."""
Episode = Callable[[ModelEndpoint], Awaitable[list[RolloutResult]]]


class EngineRouter:
    """Runs each episode at an engine of a pool. An episode whose engine goes away runs again at
    another engine; an episode that fails again and again has failed."""

    def __init__(
        self,
        pool: EnginePool,
        model: str,
        api_key_var: str | Sequence[str],
        client: str = "tokens",
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
        headers_from_env: Mapping[str, str] | None = None,
    ) -> None:
        """``api_key_var``: the variable with the key, or several, which take turns by episode."""
        self.pool = pool
        self._key_vars = cycle([api_key_var] if isinstance(api_key_var, str) else api_key_var)
        self._endpoint = cache(
            lambda url, key_var: ModelEndpoint(
                model,
                f"{url}/v1",
                api_key_var=key_var,
                client=client,
                timeout=timeout,
                headers=tuple((headers or {}).items()),
                headers_from_env=tuple((headers_from_env or {}).items()),
            )
        )

    async def run(self, key: Hashable, episode: Episode) -> list[RolloutResult]:
        """Play one episode; those of one key share an engine, and its prefix cache."""
        last: list[RolloutResult] = []

        async def work(engine: Replica) -> list[RolloutResult]:
            nonlocal last
            last = await episode(self._endpoint(engine.url, next(self._key_vars)))
            for failed in (each for each in last if each.error_type == PROVIDER_ERROR):
                status = failed.status_code  # no answer, no time, 5xx: it may pass
                if status in OVERLOADED:
                    raise EngineFailed(f"{engine.client.label}: {failed.error}", status)
                if status is None or status == 408 or status >= 500:
                    raise EngineFailed(f"{engine.client.label}: {failed.error}", 500)

            return last

        try:
            return await self.pool.ask(key, work)
        except GivenUp as error:
            lost = RolloutResult(ok=False, error_type=PROVIDER_ERROR, error=str(error))
            # The last episode's own error is more exact than the pool's.
            return last or [lost]
