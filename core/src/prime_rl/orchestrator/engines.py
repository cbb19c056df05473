"""Where an episode's model calls go: to one endpoint, or to a replica that serves the policy."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, Protocol

from prime_rl.env.episode import ModelEndpoint, RolloutResult
from prime_rl.inference.fleet import Fleet, Unanswered
from prime_rl.inference.replica import Replica
from prime_rl.run.restarts import ENGINES, HUNG, STARTING, engine_names
from prime_rl.rundir.status import Status

PROVIDER_ERROR = "ProviderError"
"""verifiers' class for a model call that failed."""

Episode = Callable[[ModelEndpoint], Awaitable[list[RolloutResult]]]


class EngineRouter(Protocol):
    """Chooses the endpoint of each episode."""

    async def run(self, key: Hashable, episode: Episode) -> list[RolloutResult]:
        """Run one episode; those of one key share an endpoint, and its prefix cache."""
        ...


class OneEndpoint:
    """Always the same endpoint, without a retry."""

    def __init__(self, endpoint: ModelEndpoint) -> None:
        self._endpoint = endpoint

    async def run(self, key: Hashable, episode: Episode) -> list[RolloutResult]:
        return await episode(self._endpoint)


class PolicyEngines:
    """The replicas of the live policy. An episode whose replica goes away is run again at another;
    it fails if it keeps failing while its replica answers."""

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
    """Reports each engine in ``status/engines.json``: for the live view, and for the supervisor,
    which restarts engines that have served and then die or hang."""

    def __init__(self, fleet: Fleet, run_dir: Path, names: Sequence[str] | None) -> None:
        """``names``: None, if the engines are processes of this run."""
        names = names or engine_names(len(fleet.replicas))
        self._fleet, self._named = fleet, list(zip(names, fleet.replicas, strict=True))
        self._status = Status(run_dir / "status" / f"{ENGINES}.json")
        fleet.on_change = self._report
        self._report()

    def _report(self) -> None:
        fleet = self._fleet
        state = f"{len(fleet.serving)} of {len(fleet.replicas)} serve"
        away = [
            f"{name}: {r.reason}" if r.reason and r.listening else name
            for name, r in self._named
            if not r.serving
        ]
        details: dict[str, Any] = {name: _describe(replica) for name, replica in self._named}
        self._status.report(
            "asleep" if fleet.asleep else state,
            waiting_for=", ".join(away) or ("trainer" if fleet.asleep else None),
            **details,
        )


def _describe(replica: Replica) -> str:
    if replica.hung:
        return f"{HUNG} ({replica.hangs})"
    if replica.serving:
        return f"version {replica.version}"
    return "away" if replica.known else STARTING


def is_outage(result: RolloutResult) -> bool:
    """Whether a model call failed in a way that may pass: no answer, too many requests, 5xx."""
    status = result.status_code
    return result.error_type == PROVIDER_ERROR and (
        status is None or status in (408, 429) or status >= 500
    )
