"""Score tokens under the live policy: at whichever replica serves, the group's own if it does."""

from __future__ import annotations

from collections.abc import Callable

from prime_rl.errors import EngineError
from prime_rl.inference.fleet import Fleet, Unanswered
from prime_rl.inference.replica import Replica
from prime_rl.inference.scorer import Scorer, Unavailable
from prime_rl.rollout import FloatColumn


class PolicyScores(Scorer):
    """A ``ReferenceModel`` over the fleet, which knows who is there, and has every group stay where
    it was sampled."""

    def __init__(
        self, fleet: Fleet, model: str, *, api_key: str | None, version: Callable[[], int]
    ) -> None:
        super().__init__(
            fleet.urls,
            model,
            where="the policy",
            api_key=api_key,
            cache_salt=lambda: str(version()),
        )
        self._fleet = fleet

    async def _until_answered(self, ids: list[int], group_id: int) -> FloatColumn:
        refusals: list[str] = []

        async def at(replica: Replica) -> FloatColumn:
            endpoint = self._endpoints[replica.number]
            try:
                return await self._score(endpoint, ids)
            except Unavailable as error:
                endpoint.card = None  # it may come back as another model
                refusals.append(f"{self._at(endpoint)}: {error}")
                raise Unanswered(str(error)) from error

        try:
            return await self._fleet.ask(group_id, at)
        except Unanswered as error:
            last = refusals[-1] if refusals else f"{self.where}: {error}"
            raise EngineError(
                f"one request of {len(ids)} tokens fails again and again: {last}. See the log of "
                "the engine."
            ) from error
