"""The source of one env's rollouts: episodes sampled from the policy or a frozen model, or groups
of an installed source.

Liveness is a property of the model that samples, not of any role. Live: the prefix cache is salted
by version, the rollout ages. Frozen: a stable cache, no aging.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from prime_rl.config.contract import FrozenModel, SamplingConfig
from prime_rl.env.environment import Environment, ExampleFailed, SamplingSettings
from prime_rl.env.episode import RolloutResult
from prime_rl.env.traces import BAD_RESULT, build_rollout, failed
from prime_rl.errors import ConfigError
from prime_rl.inference.pool import FrozenPool
from prime_rl.orchestrator.past import PastPolicies
from prime_rl.orchestrator.router import EngineRouter
from prime_rl.plugins.sampler import RolloutPlan, Source, SourceRequest
from prime_rl.rollout import Group, Rollout


class RolloutFailed(Exception):
    """A rollout failed; ``result`` has the reason."""

    def __init__(self, result: RolloutResult) -> None:
        super().__init__(result.error)
        self.result = result


@dataclass(frozen=True)
class RolloutRequest(SourceRequest):
    """One member of one group."""

    member: int
    seed: int
    prepare: Callable[[RolloutPlan], Awaitable[None]] | None = None
    """Calls the env's ``prepare_rollout``."""


def train_sampling(sampling: SamplingConfig) -> SamplingSettings:
    """The whole distribution at one temperature: what the trainer can reproduce."""
    # A plan has further fields, which are no settings of sampling.
    checked = SamplingConfig(**sampling.model_dump(include={*SamplingConfig.model_fields}))
    return SamplingSettings(**dict(checked), top_p=1.0, top_k=-1, min_p=0.0)


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

    async def produce(self, request: RolloutRequest) -> Sequence[Rollout]:
        """The rollouts of one request, without credit; none from a source that has run out, and of
        a member that ``prepare_rollout`` left out. Raises ``RolloutFailed``."""
        raise NotImplementedError

    def observe(self, group: Group) -> None:
        """A group of any env came back."""

    def settled(self, rollouts: Sequence[Rollout], reason: str | None) -> None:
        """Its own rollouts are in the buffer, or do not train for this reason."""


class Sampled(RolloutSource):
    """Runs episodes of an environment against the live policy."""

    is_live = True
    label = "policy"

    def __init__(
        self,
        env: str,
        environment: Environment,
        router: EngineRouter,
        sampling: SamplingConfig,
        past: PastPolicies | None = None,
    ) -> None:
        """``past``: the versions that play some of the env's agents."""
        self._past = past
        self._env = env
        self._environment = environment
        self._router = router
        self._sampling = sampling

    async def produce(self, request: RolloutRequest) -> Sequence[Rollout]:
        try:
            example = self._environment.examples[request.example_id]
        except ExampleFailed as error:
            raise RolloutFailed(failed("ExampleFailed", str(error))) from error

        prompt = example.fields.get("prompt")
        place = {"env": self._env, "group_id": request.group_id, "example_id": request.example_id}
        plan = RolloutPlan(**place, member=request.member, prompt=prompt, **dict(self._sampling))
        if request.prepare is not None:
            await request.prepare(plan)

        # `prepare_rollout` may have lowered the group size, so that this member is left out.
        if request.member >= (plan.group_size or request.member + 1):
            return []

        if self._past is None:
            results = await self._episode(request, plan)
        else:
            # The draw depends on the group's version, so all members meet the same opponent.
            if plan.past is None:
                plan.past = self._past.draw(request.policy_version)
            async with self._past.at(plan.past):
                results = await self._episode(request, plan)

        failure = next((result for result in results if not result.ok), None)
        if failure:
            raise RolloutFailed(failure)

        trainable = [result for result in results if result.trainable]
        if any(result.has_images for result in trainable):
            reason = "a message has an image, and there is no training on images; expected text"
            raise RolloutFailed(failed(BAD_RESULT, reason))

        built = [self._rollout(request, plan, result) for result in trainable]
        rollouts = [rollout for rollout in built if rollout.samples]
        if not rollouts:
            raise RolloutFailed(failed("NoTokens", "no agent left tokens to train"))

        return rollouts

    async def _episode(self, request: RolloutRequest, plan: RolloutPlan) -> list[RolloutResult]:
        example = self._environment.examples[request.example_id].with_prompt(plan.prompt)
        sampling = train_sampling(plan)
        return await self._router.run(
            request.group_id,
            lambda endpoint: self._environment.run(
                example,
                model=endpoint,
                sampling=sampling,
                group_id=request.group_id,
                # The cached keys and values of a prefix are of the weights that computed them.
                cache_salt=self._cache_salt(request, plan),
                seed=request.seed,
            ),
        )

    def _cache_salt(self, request: RolloutRequest, plan: RolloutPlan) -> str | None:
        """An agent of an earlier version sends it too, to an engine whose weights change."""
        if not self.is_live:
            return None
        past = "" if self._past is None else f" past {plan.past}"
        return f"{request.policy_version}{past}"

    def _rollout(
        self, request: RolloutRequest, plan: RolloutPlan, result: RolloutResult
    ) -> Rollout:
        rollout = build_rollout(
            result,
            env=self._env,
            example_id=request.example_id,
            group_id=request.group_id,
            policy_version=request.policy_version,
            temperature=plan.temperature,
        )

        rollout.episode_id = request.member
        rollout.source = self.label

        if self._past is not None:
            rollout.info["past_version"] = plan.past
        # An agent may have a task of its own.
        rollout.task = result.task_fields or dict(self.task(request.example_id))
        return rollout


class SampledFrozen(Sampled):
    """Runs episodes against a frozen model. ``client = "chat"``: the replies come as text, and are
    tokenized as the policy would have written them."""

    is_live = False
    label = "frozen"

    def __init__(
        self,
        env: str,
        environment: Environment,
        model: FrozenModel,
        client: str,
        sampling: SamplingConfig,
        rendering: Callable[[], Any],
        on_waiting: Callable[[str | None], None],
    ) -> None:
        where = f"env {env!r}: algo.sampling.source"
        self.pool = FrozenPool.of(model, where=where, on_waiting=on_waiting)
        router = EngineRouter(
            self.pool,
            model.name,
            api_key_var=model.key_vars or "",
            client=client,
            timeout=model.timeout,
            headers=model.headers,
            headers_from_env=model.headers_from_env,
        )
        super().__init__(env, environment, router=router, sampling=sampling)

        self._slots = asyncio.Semaphore(model.max_concurrency)
        self._rendering = rendering
        self._chat = client == "chat"

    async def _episode(self, request: RolloutRequest, plan: RolloutPlan) -> list[RolloutResult]:
        async with self._slots:
            return await super()._episode(request, plan)

    def _rollout(
        self, request: RolloutRequest, plan: RolloutPlan, result: RolloutResult
    ) -> Rollout:
        if not self._chat:
            return super()._rollout(request, plan, result)

        if result.had_tools:
            raise ConfigError(
                f"env {self._env!r}: algo.sampling.client = 'chat' tokenizes the messages only. "
                "This env also tells the model of tools, which would be missing. Use client = "
                "'tokens' with a model of the policy's tokenizer."
            )

        # The branches are left out, because the samples come from the messages.
        rollout = super()._rollout(request, plan, replace(result, branches=[]))
        rendering = self._rendering()
        try:
            samples = rendering.supervised_samples(result.wire_messages)
        except Exception as error:  # the model's text decides: a thought where none may be
            reason = f"the conversation cannot be tokenized: {type(error).__name__}: {error}"
            raise RolloutFailed(failed(BAD_RESULT, reason)) from error

        if result.is_truncated:  # the reply was cut off: its end is the renderer's, not the model's
            last = samples[-1]
            last.loss_mask[np.flatnonzero(last.loss_mask)[-1:]] = False

        for sample in samples:
            sample.temperature = plan.temperature
        rollout.samples = samples
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
        fields = self.source.task(index)
        return super().task(index) if fields is None else fields

    def observe(self, group: Group) -> None:
        self.source.observe(group)

    def settled(self, rollouts: Sequence[Rollout], reason: str | None) -> None:
        self.source.settled(rollouts, reason)

    async def produce(self, request: RolloutRequest) -> Sequence[Rollout]:
        return await self.source.group(request)
