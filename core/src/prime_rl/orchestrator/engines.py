"""Where an episode's model calls go: to one endpoint, or to whichever replica serves the policy."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any, Protocol

from prime_rl.env.episode import ModelEndpoint, RolloutResult
from prime_rl.inference.fleet import Fleet, Unanswered
from prime_rl.inference.replica import Replica
from prime_rl.rundir.status import HUNG, STARTING, Status

PROVIDER_ERROR = "ProviderError"
"""verifiers' class for a model call that failed."""

Episode = Callable[[ModelEndpoint], Awaitable[list[RolloutResult]]]


class EngineRouter(Protocol):
    """Chooses the endpoint of each episode."""

    async def run(self, key: Hashable, episode: Episode) -> list[RolloutResult]:
        """Play one episode; those of one key share an endpoint, and its prefix cache."""
        ...


class OneEndpoint:
    """Always the same endpoint; what fails there has failed."""

    def __init__(self, endpoint: ModelEndpoint) -> None:
        self._endpoint = endpoint

    async def run(self, key: Hashable, episode: Episode) -> list[RolloutResult]:
        return await episode(self._endpoint)


class PolicyEngines:
    """The replicas of the live policy: an episode whose replica goes away is played anew at
    another; one that fails again and again where the replica is there has failed."""

    def __init__(self, fleet: Fleet, model: str, api_key_var: str) -> None:
        self._fleet = fleet
        self._endpoints = {
            replica.number: ModelEndpoint(model, f"{replica.url}/v1", api_key_var)
            for replica in fleet.replicas
        }

    async def run(self, key: Hashable, episode: Episode) -> list[RolloutResult]:
        last: list[RolloutResult] = []

        async def at(replica: Replica) -> list[RolloutResult]:
            nonlocal last
            last = await episode(self._endpoints[replica.number])
            if any(map(is_outage, last)):
                raise Unanswered
            return last

        try:
            return await self._fleet.ask(key, at)
        except Unanswered as error:
            lost = RolloutResult(ok=False, error_type=PROVIDER_ERROR, error=str(error))
            return last or [lost]


class EnginesStatus:
    """Says in a status file of each engine how it is: for the live view, and for the supervisor,
    which starts engines again that have served and then die or hang."""

    def __init__(self, fleet: Fleet, status: Status, names: Sequence[str]) -> None:
        self._fleet, self._status, self._names = fleet, status, names

    def report(self) -> None:
        """Write it."""
        fleet = self._fleet
        state = f"{len(fleet.serving)} of {len(fleet.replicas)} serve"
        away = [f"{name}{_why(r)}" for name, r in self._named if not r.serving]
        details: dict[str, Any] = {name: _how_it_is(replica) for name, replica in self._named}
        self._status.report(
            "asleep" if fleet.asleep else state,
            waiting_for=", ".join(away) or ("trainer" if fleet.asleep else None),
            **details,
        )

    @property
    def _named(self) -> list[tuple[str, Replica]]:
        return list(zip(self._names, self._fleet.replicas, strict=True))


def _how_it_is(replica: Replica) -> str:
    if replica.hung:
        return f"{HUNG} ({replica.hangs})"
    if replica.serving:
        return f"version {replica.version}"
    return "away" if replica.known else STARTING


def _why(replica: Replica) -> str:
    """What it answers instead of serving; of one that does not answer nothing needs saying."""
    return f": {replica.reason}" if replica.reason and replica.listening else ""


def is_outage(result: RolloutResult) -> bool:
    """Whether a model call failed in a way that may pass: no answer, too many requests, 5xx."""
    status = result.status_code
    return result.error_type == PROVIDER_ERROR and (
        status is None or status in (408, 429) or status >= 500
    )
