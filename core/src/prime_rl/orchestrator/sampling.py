"""sampler -> rollout -> algorithm: keeps groups in flight, and puts scored ones into the buffer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from prime_rl.env.episode import RolloutResult
from prime_rl.errors import PluginError
from prime_rl.orchestrator.buffer import Buffer
from prime_rl.orchestrator.context import Engines, RunContext, TrainEnv
from prime_rl.orchestrator.dispatcher import Dispatcher, OpenGroup
from prime_rl.orchestrator.scoring import score_batch, score_group, score_rollout, stamp
from prime_rl.orchestrator.sources import ExternalSource, RolloutFailed, RolloutRequest
from prime_rl.plugins.observer import Observer
from prime_rl.plugins.sampler import RolloutPlan, Sampler
from prime_rl.rollout import Batch, Rollout

log = logging.getLogger(__name__)


class Sampling(Observer):
    """Requests groups from the sampler, has each env's algorithm score them, fills the buffer.

    While the buffer is full, no further group is scored: what a checkpoint saves then does not
    change. With ``max_off_policy_steps = 0`` groups are scored in the order they were opened in.
    """

    def __init__(
        self,
        run: RunContext,
        engines: Engines,
        envs: Sequence[TrainEnv],
        sampler: Sampler,
        buffer: Buffer,
        installed: Sequence[Observer] = (),
    ) -> None:
        """``installed``: observers that plugins brought."""
        self.context = run
        self.engines = engines
        self.envs = envs
        self.sampler = sampler
        self.buffer = buffer
        self._installed = installed
        self._num_cut = 0
        """Samples that were longer than ``seq_len`` since the last metrics."""
        self.is_scoring = False
        """An algorithm is scoring a group or a batch: it may wait for a teacher."""
        self.dispatcher = Dispatcher(
            run.config, engines, buffer, envs, self._next_group, self._run_rollout
        )

    # -- sampler -> rollout -> algorithm ----------------------------------------------------------

    async def run(self) -> None:
        """Sample until cancelled. Raises the error of a plugin; a failure of an environment is
        data."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.dispatcher.run())
                while True:
                    await self.buffer.wait_for_room()
                    if self.dispatcher.arrivals.empty():
                        self.report()
                    awaited = self.waits_for
                    started = time.perf_counter()
                    group = await self.dispatcher.arrivals.get()
                    self.context.waited.add(f"wait/orchestrator/{awaited}", started)
                    await self._credit(group)
                    await asyncio.sleep(0)  # groups opened by this one start before the next
        finally:
            await self.dispatcher.close()

    async def _credit(self, group: OpenGroup) -> None:
        """Score a complete group's survivors, and let them compete for a place in the batch."""
        env = group.env
        rollouts = group.survivors
        if group.num_failed:
            self.buffer.note_failed(group.num_failed, env.name)
        if rollouts:
            self.is_scoring = True
            await score_group(env.hooks, rollouts)
            self.is_scoring = False
            for observer in self._installed:
                observer.group_scored(rollouts, self.engines.policy.version)
            self.sampler.observe(rollouts)
            for rollout in () if env.hooks.scores_batches else rollouts:
                stamp(rollout, env.algorithm.action_loss, self.context.losses)
            rejected = self.sampler.reject(rollouts)
            if rejected is None:
                for other in self.envs:
                    other.source.observe(rollouts)

            self.buffer.add(rollouts, rejected=rejected)

        self.dispatcher.taken(group)

    async def score_batch(self) -> None:
        """Score the full batch, env by env. Meanwhile no group is scored: the buffer is full."""
        self.is_scoring = True
        for env in self.envs:
            own = [rollout for rollout in self.buffer.batch.kept if rollout.env == env.name]
            for rollout in await score_batch(env.hooks, own):
                stamp(rollout, env.algorithm.action_loss, self.context.losses)
        self.is_scoring = False

    def _next_group(self) -> tuple[TrainEnv, int]:
        env_index, example_id = self.sampler.next_example()
        return self.envs[env_index], example_id

    async def _run_rollout(self, group: OpenGroup, index: int) -> Sequence[Rollout] | None:
        """Produce one member of a group, and score what needs no siblings. None: it failed."""
        # Distinct for every member of every group, and the same in every run of one seed.
        seed = (self.context.config.seed * 1_000_003 + group.group_id) * 4096 % 2**31 + index
        own = group.policy_version, index, seed, partial(prepare, group.env)
        request = RolloutRequest(group.group_id, group.example_id, *own)
        try:
            rollouts = self._cut(await group.env.source.produce(request))
        except RolloutFailed as failure:
            env = group.env.name
            result = failure.result
            kind = result.error_type or "unknown"
            log.warning(
                "env %r, example %d, group %d: rollout failed and will not train: %s: %s",
                env,
                group.example_id,
                group.group_id,
                kind,
                result.error,
            )
            self.buffer.note_failure(f"{kind}: {result.error}")
            for observer in self._installed:
                observer.rollouts_lost(env, f"error/{kind}", 1)
                observer.rollout_failed(env, kind, result.num_sampled, result.num_turns)
            return None

        hooks = group.env.hooks
        await asyncio.gather(*(score_rollout(hooks, rollout) for rollout in rollouts))
        return rollouts

    def _cut(self, rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
        """The rollouts, cut to ``seq_len``. Raises ``RolloutFailed`` if none has a token to
        train."""
        limit = self.context.config.seq_len
        self._num_cut += sum(rollout.cut(limit) for rollout in rollouts)
        left = [rollout for rollout in rollouts if rollout.samples]
        if rollouts and not left:
            reason = f"no sampled token is among the first {limit} (seq_len)"
            raise RolloutFailed(RolloutResult(ok=False, error_type="NoTokens", error=reason))
        return left

    # -- observer ---------------------------------------------------------------------------------

    async def batch_taken(self, batch: Batch) -> None:
        self.dispatcher.wake()

    async def version_pending(self, version: int) -> None:
        """Cancel groups that would be too old for any later batch."""
        for env, number in (await self.dispatcher.drop_stale(version)).items():
            for observer in self._installed:
                observer.rollouts_lost(env, "cancelled", number)

    def batch_sent(self, batch: Batch, frames: Sequence[bytes]) -> None:
        self.dispatcher.batch_sent(batch.step)

    def version_served(self, version: int) -> None:
        self.dispatcher.version_served(version)

    # -- reports ----------------------------------------------------------------------------------

    @property
    def waits_for(self) -> str:
        """What the next batch waits for: ``models``, ``trainer``, ``inference`` or ``eval``."""
        if self.engines.outages.waiting_for:
            return "models"
        if self.engines.fleet.asleep:
            return "trainer"
        if self.dispatcher.num_inflight or self.dispatcher.room() > 0:
            return "inference"
        return "trainer" if self.engines.policy.evaluated is None else "eval"

    def report(self) -> None:
        """Write the status: which batch is being sampled, and what it waits for."""
        version = self.engines.policy.version
        share = self.engines.policy.evaluated
        texts = {
            "models": self.engines.outages.waiting_for,
            "trainer": f"trainer (weights of step {version + 1})",
            "eval": f"evaluation of version {version}",
        }
        detail: dict[str, Any] = {} if share is None else {"evaluated": f"{share:.0%}"}
        size = self.context.config.orchestrator.batch_size
        limit = self.dispatcher.limit
        self.context.status.report(
            f"sampling batch {self.buffer.batch.step}",
            waiting_for=texts.get(self.waits_for),
            inflight=self.dispatcher.num_inflight,
            inflight_limit=f"{limit.number} ({limit.reason})",
            buffered=f"{min(self.buffer.num_buffered, size)}/{size}",
            **detail,
        )

    def take_metrics(self) -> Mapping[str, float]:
        """Counts of rollouts, how far they are off policy, and the sampler's and sources' own."""
        found = {f"dispatcher/{name}": float(n) for name, n in self.dispatcher.counts.items()}
        found["batch/truncated_samples"] = float(self._num_cut)
        self._num_cut = 0
        found["dispatcher/inflight/train"] = float(self.dispatcher.num_inflight)
        found["dispatcher/max_inflight"] = float(self.dispatcher.max_inflight)
        found |= self.dispatcher.admission.take_metrics()
        for env in self.envs:
            found[f"dispatcher/cancelled/{env.name}"] = float(self.dispatcher.cancelled[env.name])
            if isinstance(env.source, ExternalSource):
                own = env.source.source.metrics()
                found |= {f"source/{env.name}/{name}": value for name, value in own.items()}

        behind = self.dispatcher.versions_behind
        if behind:
            found["dispatcher/off_policy/mean"] = fmean(behind)
            found["dispatcher/off_policy/max"] = float(max(behind))

        return {**found, **self.sampler.metrics()}


async def prepare(env: TrainEnv, plan: RolloutPlan) -> None:
    """Call ``prepare_rollout``. Raises ``PluginError`` for a wrong temperature or group size."""
    plan.group_size = env.group_size
    await env.hooks.prepare_rollout(plan)
    if (plan.group_size or 1) > env.group_size:
        most = f"at most the {env.group_size} of env {env.name!r}; raise group_size in the config"
        raise PluginError(f"prepare_rollout set group_size = {plan.group_size}, expected {most}.")

    wanted = env.algorithm.needs_temperature
    if wanted not in (None, plan.temperature):
        needs = f"{env.algorithm.name!r} learns at {wanted} only"
        raise PluginError(f"prepare_rollout set temperature = {plan.temperature}, and {needs}.")
