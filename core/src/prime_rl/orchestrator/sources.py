"""The source of one env's rollouts: episodes sampled from the policy or a frozen model, or groups
of an installed source.

Liveness is a property of the model that samples, not of any role. Live: the prefix cache is salted
by version, the rollout ages. Frozen: a stable cache, no aging.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx
import numpy as np

from prime_rl.config.models import FrozenModel
from prime_rl.env.environment import (
    Environment,
    ModelEndpoint,
    RolloutResult,
    SamplingSettings,
)
from prime_rl.env.rendering import Rendering
from prime_rl.env.trajectory import build_rollout
from prime_rl.errors import ConfigError
from prime_rl.inference.reference import ScoringPool
from prime_rl.orchestrator.engines import EngineRouter, OneEndpoint, is_outage
from prime_rl.plugins.sampler import Source, SourceRequest
from prime_rl.rollout import Group, Rollout

log = logging.getLogger(__name__)

PROBE_SECONDS = 5.0
"""How long an endpoint may take to say that it is there."""

FAILED_TRIES = 4
"""Times an episode is tried again at an endpoint that is there and fails: over some 15 seconds."""


class RolloutFailed(Exception):
    """A rollout failed; ``result`` has the reason."""

    def __init__(self, result: RolloutResult) -> None:
        super().__init__(result.error)
        self.result = result


@dataclass(frozen=True)
class RolloutRequest:
    """One member of one group."""

    group_id: int
    example_id: int
    member: int
    policy_version: int
    seed: int


class RolloutSource:
    """Gives one env's rollouts."""

    is_live = False
    """Its rollouts age with every version."""
    whole_group = False
    """One request brings a whole group."""
    _environment: Environment

    @property
    def num_examples(self) -> int | None:
        """None: examples without end."""
        return self._environment.num_examples

    def is_ready(self) -> bool:
        """Whether it has something to give."""
        return True

    def task(self, index: int) -> Mapping[str, Any]:
        """The fields of one example."""
        return self._environment.examples[index].fields

    async def produce(self, ask: RolloutRequest) -> Sequence[Rollout]:
        """The rollouts of one request, without credit; none from a source that has run out. Raises
        ``RolloutFailed``."""
        raise NotImplementedError

    def observe(self, group: Group) -> None:
        """A group of any env came back."""


class Sampled(RolloutSource):
    """Runs episodes of an environment against the live policy."""

    is_live = True
    label = "policy"

    def __init__(
        self,
        env: str,
        environment: Environment,
        router: EngineRouter,
        sampling: SamplingSettings,
    ) -> None:
        self._env = env
        self._environment = environment
        self._router = router
        self._sampling = sampling
        self._temperature = 1.0 if sampling.temperature is None else sampling.temperature

    async def produce(self, ask: RolloutRequest) -> Sequence[Rollout]:
        results = await self._episode(ask)
        if failure := next((result for result in results if not result.ok), None):
            raise RolloutFailed(failure)
        found = [self._rollout(ask, result) for result in results if result.trainable]
        rollouts = [rollout for rollout in found if rollout.samples]
        if not rollouts:
            reason = "no agent left tokens to train"
            raise RolloutFailed(RolloutResult(ok=False, error_type="NoTokens", error=reason))
        return rollouts

    async def _episode(self, ask: RolloutRequest) -> list[RolloutResult]:
        salt = str(ask.policy_version)
        return await self._router.run(
            ask.group_id, lambda endpoint: self._run(ask, endpoint, cache_salt=salt)
        )

    async def _run(
        self, ask: RolloutRequest, endpoint: ModelEndpoint, cache_salt: str | None
    ) -> list[RolloutResult]:
        return await self._environment.run(
            self._environment.examples[ask.example_id],
            model=endpoint,
            sampling=self._sampling,
            group_id=ask.group_id,
            cache_salt=cache_salt,
            seed=ask.seed,
        )

    def _rollout(self, ask: RolloutRequest, result: RolloutResult) -> Rollout:
        rollout = build_rollout(
            result,
            env=self._env,
            example_id=ask.example_id,
            group_id=ask.group_id,
            policy_version=ask.policy_version,
            temperature=self._temperature,
        )
        rollout.episode_id = ask.member
        rollout.source = self.label
        rollout.task = result.task_fields or dict(self.task(ask.example_id))
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
            ModelEndpoint(model.name, url, model.api_key_var or "", client, model.timeout)
            for url in model.base_url
        ]
        where = f"env {env!r}: algo.sampling.source"
        self._pool = ScoringPool.frozen(model, where=where, on_waiting=on_waiting)
        self._slots = asyncio.Semaphore(model.max_concurrency)
        super().__init__(env, environment, OneEndpoint(endpoints[0]), sampling)
        self._endpoints = endpoints
        self._rendering = rendering
        self._on_waiting = on_waiting
        self._chat = client == "chat"

    async def wait_ready(self, timeout: float) -> None:
        """Until every replica answers and lists the model."""
        await self._pool.wait_ready(timeout)

    async def close(self) -> None:
        await self._pool.close()

    async def _episode(self, ask: RolloutRequest) -> list[RolloutResult]:
        async with self._slots:
            return await self._until_answered(ask)

    async def _until_answered(self, ask: RolloutRequest) -> list[RolloutResult]:
        """Tries replica after replica, the group's own first; waits while none is there. One that
        is there and keeps failing on this episode makes it a failure like any other."""
        for attempt in itertools.count():
            for turn in range(len(self._endpoints)):
                endpoint = self._endpoints[(ask.group_id + turn) % len(self._endpoints)]
                results = await self._run(ask, endpoint, cache_salt=None)
                if not any(map(is_outage, results)):
                    return results
            if not any([await answers(endpoint) for endpoint in self._endpoints]):
                await self._wait_for_any()
            elif attempt >= FAILED_TRIES:
                return results
            else:
                await asyncio.sleep(min(10.0, 2.0**attempt))
        raise AssertionError("unreachable")

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

    def _rollout(self, ask: RolloutRequest, result: RolloutResult) -> Rollout:
        if not self._chat:
            return super()._rollout(ask, result)
        if result.had_tools:
            raise ConfigError(
                f"env {self._env!r}: algo.sampling.client = 'chat' tokenizes what was said, and "
                "this env also tells the model of tools, which would be missing. Use client = "
                "'tokens' with a model of the policy's tokenizer."
            )
        rollout = super()._rollout(ask, replace(result, branches=[]))
        sample = self._rendering.supervised_sample(result.wire_messages)
        if result.is_truncated:  # the reply was cut off: its end is the renderer's, not the model's
            sample.loss_mask[np.flatnonzero(sample.loss_mask)[-1:]] = False
        sample.temperature = self._temperature
        rollout.samples = [sample]
        rollout.has_logprobs = False
        return rollout


class ExternalSource(RolloutSource):
    """Gives the groups of an installed source."""

    whole_group = True

    def __init__(self, env: str, environment: Environment, source: Source) -> None:
        self._env = env
        self._environment = environment
        self.source = source

    @property
    def num_examples(self) -> int | None:
        return self.source.num_examples

    def is_ready(self) -> bool:
        return self.source.is_ready

    def task(self, index: int) -> Mapping[str, Any]:
        own = self.source.task(index)
        return super().task(index) if own is None else own

    def observe(self, group: Group) -> None:
        self.source.observe(group)

    async def produce(self, ask: RolloutRequest) -> Sequence[Rollout]:
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
