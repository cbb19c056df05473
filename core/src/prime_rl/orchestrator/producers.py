"""Where one env's rollouts come from: sampled from the policy or a frozen model, or supplied by a
source.

Liveness is a property of the model that samples, not of any role. Live: the prefix cache is salted
by version, the rollout ages. Frozen: a stable cache, no ageing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import httpx

from prime_rl.config.models import FrozenModel
from prime_rl.orchestrator.env import (
    Environment,
    ModelEndpoint,
    RolloutResult,
    SamplingSettings,
)
from prime_rl.orchestrator.rendering import Rendering
from prime_rl.orchestrator.trajectory import build_rollout
from prime_rl.plugins.base import Source, SourceRequest
from prime_rl.rollout import Group, Rollout

log = logging.getLogger(__name__)

PROBE_SECONDS = 5.0
"""How long an endpoint may take to say that it is there."""

PROVIDER_ERROR = "ProviderError"
"""verifiers' class for a model call that failed."""


class Unusable(Exception):
    """A rollout came to nothing; ``result`` says how."""

    def __init__(self, result: RolloutResult) -> None:
        super().__init__(result.error)
        self.result = result


@dataclass(frozen=True)
class Ask:
    """One member of one group, as the dispatcher asks for it."""

    group_id: int
    example_id: int
    member: int
    policy_version: int
    seed: int


class Producer(Protocol):
    """Gives one env's rollouts."""

    is_live: bool
    """Its rollouts age with every version."""
    whole_group: bool
    """One ask brings a whole group."""

    @property
    def num_examples(self) -> int | None: ...

    @property
    def is_ready(self) -> bool: ...

    def task(self, index: int) -> Mapping[str, Any]:
        """The fields of one example."""
        ...

    async def produce(self, ask: Ask) -> Sequence[Rollout]:
        """The rollouts of one ask, without credit; none where a source has run out. Raises
        ``Unusable``."""
        ...

    def observe(self, group: Group) -> None:
        """A group of any env came back."""
        ...


class Sampled:
    """Runs episodes of an environment against the live policy."""

    is_live = True
    whole_group = False
    label = "policy"

    def __init__(
        self,
        env: str,
        environment: Environment,
        endpoint: ModelEndpoint,
        sampling: SamplingSettings,
    ) -> None:
        self._env = env
        self._environment = environment
        self._endpoint = endpoint
        self._sampling = sampling

    @property
    def num_examples(self) -> int | None:
        return self._environment.num_examples

    @property
    def is_ready(self) -> bool:
        return True

    def task(self, index: int) -> Mapping[str, Any]:
        return self._environment.examples[index].fields

    def observe(self, group: Group) -> None:
        """It learns nothing."""

    async def produce(self, ask: Ask) -> Sequence[Rollout]:
        results = await self._episode(ask)
        if failure := next((result for result in results if not result.ok), None):
            raise Unusable(failure)
        found = [self._rollout(ask, result) for result in results if result.trainable]
        rollouts = [rollout for rollout in found if rollout.samples]
        if not rollouts:
            reason = "no agent left tokens to train"
            raise Unusable(RolloutResult(ok=False, error_type="NoTokens", error=reason))
        return rollouts

    async def _episode(self, ask: Ask) -> list[RolloutResult]:
        return await self._run(ask, self._endpoint, cache_salt=str(ask.policy_version))

    async def _run(
        self, ask: Ask, endpoint: ModelEndpoint, cache_salt: str | None
    ) -> list[RolloutResult]:
        return await self._environment.run(
            self._environment.examples[ask.example_id],
            model=endpoint,
            sampling=self._sampling,
            group_id=ask.group_id,
            cache_salt=cache_salt,
            seed=ask.seed,
        )

    def _rollout(self, ask: Ask, result: RolloutResult) -> Rollout:
        rollout = build_rollout(
            result,
            env=self._env,
            example_id=ask.example_id,
            group_id=ask.group_id,
            policy_version=ask.policy_version,
            temperature=1.0 if self._sampling.temperature is None else self._sampling.temperature,
        )
        rollout.episode_id = ask.member
        rollout.source = self.label
        rollout.task = dict(self.task(ask.example_id))
        return rollout


class SampledFrozen(Sampled):
    """Runs episodes against a frozen model, at one of its replicas.

    While no replica answers it waits, and the run says for whom. ``client = "chat"``: the replies
    come as text, and are tokenized as the policy would have written them.
    """

    is_live = False
    label = "frozen"

    def __init__(
        self,
        env: str,
        environment: Environment,
        model: FrozenModel,
        client: str,
        sampling: SamplingSettings,
        rendering: Rendering,
        on_waiting: Callable[[str | None], None],
    ) -> None:
        endpoints = [
            ModelEndpoint(model.name, url, model.api_key_var or "", client)
            for url in model.base_url
        ]
        super().__init__(env, environment, endpoints[0], sampling)
        self._endpoints = endpoints
        self._rendering = rendering
        self._on_waiting = on_waiting
        self._chat = client == "chat"

    async def _episode(self, ask: Ask) -> list[RolloutResult]:
        """Tries replica after replica, the group's own first; waits while none is there."""
        while True:
            for turn in range(len(self._endpoints)):
                endpoint = self._endpoints[(ask.group_id + turn) % len(self._endpoints)]
                results = await self._run(ask, endpoint, cache_salt=None)
                if not any(r.error_type == PROVIDER_ERROR for r in results):
                    return results
                if await answers(endpoint):
                    return results  # it is there, and refuses: a failure like any other
            await self._wait_for_any()

    async def _wait_for_any(self) -> None:
        names = ", ".join(endpoint.base_url for endpoint in self._endpoints)
        text = f"the model that env {self._env!r} samples from ({names} does not answer)"
        log.warning("waiting for %s", text)
        self._on_waiting(text)
        try:
            delay = 1.0
            while not any([await answers(endpoint) for endpoint in self._endpoints]):
                await asyncio.sleep(delay)
                delay = min(10.0, delay * 2)
        finally:
            self._on_waiting(None)
        log.info("%s answers again", names)

    def _rollout(self, ask: Ask, result: RolloutResult) -> Rollout:
        if not self._chat:
            return super()._rollout(ask, result)
        rollout = super()._rollout(ask, replace(result, branches=[]))
        rollout.samples = [self._rendering.supervised_sample(result.wire_messages)]
        rollout.has_logprobs = False
        return rollout


class Supplied:
    """Hands out what a source has."""

    is_live = False
    whole_group = True

    def __init__(self, env: str, environment: Environment, source: Source) -> None:
        self._env = env
        self._environment = environment
        self.source = source

    @property
    def num_examples(self) -> int | None:
        return self.source.num_examples

    @property
    def is_ready(self) -> bool:
        return self.source.is_ready

    def task(self, index: int) -> Mapping[str, Any]:
        own = self.source.task(index)
        return self._environment.examples[index].fields if own is None else own

    def observe(self, group: Group) -> None:
        self.source.observe(group)

    async def produce(self, ask: Ask) -> Sequence[Rollout]:
        request = SourceRequest(ask.group_id, ask.example_id, ask.policy_version)
        return await self.source.group(request)


async def answers(endpoint: ModelEndpoint) -> bool:
    """Whether an endpoint is there at all: any answer but a server's failure will do."""
    try:
        async with httpx.AsyncClient(timeout=PROBE_SECONDS, verify=False) as client:
            reply = await client.get(f"{endpoint.base_url}/models")
    except httpx.TransportError:
        return False
    return reply.status_code < 500
