"""sampler -> rollout -> algorithm: keeps groups in flight, and puts scored ones into the buffer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import chain
from statistics import fmean
from typing import Any

from prime_rl.env.episode import RolloutResult
from prime_rl.errors import PluginError
from prime_rl.orchestrator.agents import action_loss_of, parts_of
from prime_rl.orchestrator.batch_size import BatchSize
from prime_rl.orchestrator.buffer import Buffer
from prime_rl.orchestrator.context import Engines, RunContext, TrainEnv
from prime_rl.orchestrator.curriculum import Curriculum
from prime_rl.orchestrator.dispatcher import Dispatcher, OpenGroup
from prime_rl.orchestrator.scoring import (
    open_for_credit,
    score_batch,
    score_envs,
    score_group,
    score_rollout,
    sharing,
    stamp,
)
from prime_rl.orchestrator.sources import ExternalSource, RolloutFailed, RolloutRequest
from prime_rl.plugins.observer import Observer
from prime_rl.plugins.sampler import GroupProgress, RolloutPlan, Sampler
from prime_rl.registry.calls import checked_metrics, raise_late
from prime_rl.registry.guards import members
from prime_rl.registry.shared_state import SharedState
from prime_rl.rollout import Batch, Group, Rollout

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
        alone: Collection[str] = (),
        size: BatchSize | None = None,
    ) -> None:
        """``installed``: observers that plugins brought. ``alone``: the envs in which nothing
        compares siblings. ``size``: the size of a batch; None: ``batch_size`` rollouts."""
        self.context = run
        self.engines = engines
        self.envs = envs
        self.sampler = sampler
        self.buffer = buffer
        self._installed = installed
        self._num_cut = 0
        """Samples that were longer than ``seq_len`` since the last metrics."""

        algorithms = {env.name: env.algorithm for env in envs}
        self._shared_state = SharedState(
            {env.name: [part.algorithm for part in parts_of(env.algorithm)] for env in envs}
        )
        by_name = {env.name: env for env in envs}
        self._sharing = [[by_name[name] for name in names] for names in sharing(algorithms)]
        """The envs that share an algorithm and its settings, together."""
        self.is_scoring = False
        """An algorithm is scoring a group or a batch: it may wait for a teacher."""
        self.curriculum: Curriculum | None = None
        """Weights and gates of the envs, for the status."""

        self.size = size or BatchSize(run.config.orchestrator.batch_size)
        self.dispatcher = Dispatcher(
            run.config,
            engines,
            buffer=buffer,
            envs=envs,
            next_group=self._next_group,
            run_rollout=self._run_rollout,
            alone=alone,
            size=self.size,
            wanted=self._wanted_members,
        )

    # -- sampler -> rollout -> algorithm ----------------------------------------------------------

    async def run(self) -> None:
        """Sample until cancelled. Raises the error of a plugin; a failure of an environment is
        data."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.dispatcher.run())
                while True:
                    # A full buffer takes no further group: `score_batch` relies on that pause.
                    await self.buffer.wait_for_room()
                    if self.dispatcher.arrivals.empty():
                        self.report()

                    # The cause is read before the wait: its seconds count under this name.
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
        raise_late()

        rollouts = members(group.survivors)
        if group.num_failed:
            self.buffer.note_failed(group.num_failed, env.name)

        if group.num_cut_off:
            # A group is cut short by its algorithm, which has seen enough, or by `partial_groups`.
            outcome = "stopped" if env.limits else "cancelled"
            for observer in self._installed:
                observer.rollouts_lost(env.name, outcome, group.num_cut_off)

        if rollouts:
            self.is_scoring = True
            with open_for_credit(rollouts):
                await score_group(env.hooks, rollouts)
            # State on an algorithm's class would leak into the credit of other envs.
            self._shared_state.check(env.name, "score_group", {"group": rollouts})
            self.is_scoring = False

            for observer in self._installed:
                observer.group_scored(rollouts, self.engines.policy.version)
            self.sampler.observe(rollouts)

            # Stamping freezes the streams, and `score_batch` may still write them.
            if not env.hooks.scores_batches:
                for rollout in rollouts:
                    stamp(rollout, action_loss_of(env.algorithm, rollout), self.context.losses)
                check_places(env, rollouts)

            rejected = self.sampler.reject(rollouts)
            if rejected is None:
                for other in self.envs:
                    other.source.observe(rollouts)

            self.buffer.add(rollouts, rejected=rejected)
            env.source.settled(rollouts, rejected)

        # `taken` may open groups, so the buffer must count this one before.
        self.dispatcher.taken(group)

    async def score_batch(self) -> None:
        """Score the full batch, env by env, then over the envs that share an algorithm. Meanwhile
        no group is scored: the buffer is full."""
        self.is_scoring = True
        waiting: dict[str, list[Rollout]] = {}

        for env in self.envs:
            rollouts = [rollout for rollout in self.buffer.batch.kept if rollout.env == env.name]
            with open_for_credit(rollouts):
                waiting[env.name] = await score_batch(env.hooks, rollouts)
            if waiting[env.name]:
                self._shared_state.check(env.name, "score_batch", {"groups": waiting[env.name]})

        # Stamping comes last, because `score_envs` may still write the streams.
        for envs in self._sharing:
            first = envs[0]
            scored = {env.name: waiting[env.name] for env in envs}
            if first.hooks.scores_envs:
                with open_for_credit(chain(*scored.values())):
                    await score_envs(first.hooks, scored)
                self._shared_state.check(first.name, "score_envs", {"batches": scored})

            for env in envs:
                for rollout in scored[env.name]:
                    stamp(rollout, action_loss_of(env.algorithm, rollout), self.context.losses)

        self.is_scoring = False

    def _next_group(self) -> tuple[TrainEnv, int]:
        env_index, example_id = self.sampler.next_example()
        return self.envs[env_index], example_id

    async def _run_rollout(self, group: OpenGroup, index: int) -> Sequence[Rollout] | None:
        """Produce one member of a group, and score what needs no siblings. None: it failed."""
        # The same in every run of one seed, and distinct for the members of 2**19 groups in a row.
        # A group has fewer than 4096 members, so neighboring groups never share a seed.
        seed = (self.context.config.seed * 1_000_003 + group.group_id) * 4096 % 2**31 + index

        # A member that joins an open group is sampled from newer weights, and ages with the group.
        version = self.engines.policy.version if group.env.limits else group.policy_version
        request = RolloutRequest(
            group.group_id,
            group.example_id,
            policy_version=version,
            member=index,
            seed=seed,
            prepare=partial(prepare, group.env),
        )

        try:
            # Rollouts are cut before scoring: an algorithm may put its credit on the last token.
            rollouts = self._cut(group.env, await group.env.source.produce(request))
            if group.env.limits:
                for rollout in rollouts:
                    rollout.policy_version = group.policy_version
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
        with open_for_credit(rollouts):
            # One rollout per trainable agent of the episode.
            await asyncio.gather(*(score_rollout(hooks, rollout) for rollout in rollouts))
        return rollouts

    def _wanted_members(self, group: OpenGroup) -> int:
        """How many members an open group shall have, by those that it has judged so far."""
        env = group.env
        assert env.limits is not None
        # The plugin sees the first members by number: how long a reply takes must not matter.
        first = range(group.num_judged)
        progress = GroupProgress(
            env=env.name,
            group_id=group.group_id,
            example_id=group.example_id,
            rollouts=[rollout for number in first for rollout in group.members[number] or ()],
            ended=group.num_judged,
            size=len(group.requested),
            group_size=env.group_size,
            max_group_size=env.limits.size,
        )
        return env.hooks.wanted_members(progress)

    def _cut(self, env: TrainEnv, rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
        """The rollouts, cut to ``seq_len``. Raises ``RolloutFailed`` if none has a token to
        train."""
        limit = self.context.config.seq_len
        self._num_cut += sum(rollout.cut(limit) for rollout in rollouts)
        left = [rollout for rollout in rollouts if rollout.samples]
        reason = f"no sampled token is among the first {limit} (seq_len)"

        if len(left) < len(rollouts):
            env.source.settled([each for each in rollouts if not each.samples], reason)
        if rollouts and not left:
            raise RolloutFailed(RolloutResult(ok=False, error_type="NoTokens", error=reason))

        return left

    # -- observer ---------------------------------------------------------------------------------

    async def batch_taken(self, batch: Batch) -> None:
        raise_late()
        self.dispatcher.wake()

    async def after_training(self) -> None:
        raise_late()

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
        """What the next batch waits for: ``models``, ``trainer``, ``inference``, ``rate`` or
        ``eval``."""
        if self.engines.outages.waiting_for:
            return "models"
        if self.engines.fleet.asleep:
            return "trainer"
        if self.dispatcher.num_inflight:
            return "inference"
        if self.dispatcher.rate_limited is not None:
            return "rate"
        if self.dispatcher.room() > 0:
            return "inference"

        return "trainer" if self.engines.policy.evaluated is None else "eval"

    def report(self) -> None:
        """Write the status: which batch is being sampled, and what it waits for."""
        version = self.engines.policy.version
        share = self.engines.policy.evaluated
        texts = {
            "models": self.engines.outages.waiting_for,
            "trainer": f"trainer (weights of step {version + 1})",
            "rate": f"tasks_per_minute of env {self.dispatcher.rate_limited!r}",
            "eval": f"evaluation of version {version}",
        }
        detail: dict[str, Any] = {} if share is None else {"evaluated": f"{share:.0%}"}

        paused = [engine.client.last_paused for engine in self.engines.fleet.serving]
        pauses = [seconds for seconds in paused if seconds is not None]
        if pauses:
            detail["last_pause"] = f"{fmean(pauses):.3f} s"

        if self.curriculum is not None and self.curriculum.is_configured:
            detail["envs"] = self.curriculum.summary

        size = self.size.places
        unit = " tokens" if self.size.by_tokens else ""
        limit = self.dispatcher.limit
        self.context.status.report(
            f"sampling batch {self.buffer.batch.step}",
            waiting_for=texts.get(self.waits_for),
            inflight=self.dispatcher.num_inflight,
            inflight_limit=f"{limit.number} ({limit.reason})",
            buffered=f"{min(self.buffer.num_buffered, size)}/{size}{unit}",
            **detail,
        )

    def take_metrics(self) -> Mapping[str, float]:
        """Counts of rollouts, how far they are off policy, and the sampler's and sources' own."""
        measured = {f"dispatcher/{name}": float(n) for name, n in self.dispatcher.counts.items()}
        measured["batch/truncated_samples"] = float(self._num_cut)
        self._num_cut = 0

        measured["dispatcher/inflight/train"] = float(self.dispatcher.num_inflight)
        measured["dispatcher/max_inflight"] = float(self.dispatcher.max_inflight)
        measured |= self.dispatcher.admission.leads.take_metrics()

        for env in self.envs:
            measured[f"dispatcher/cancelled/{env.name}"] = float(
                self.dispatcher.cancelled[env.name]
            )
            if isinstance(env.source, ExternalSource):
                source = env.source.source
                for name, value in checked_metrics(source.metrics(), source, "metrics").items():
                    measured[f"source/{env.name}/{name}"] = value

        behind = self.dispatcher.versions_behind
        if behind:
            measured["dispatcher/off_policy/mean"] = fmean(behind)
            measured["dispatcher/off_policy/max"] = float(max(behind))

        return {**measured, **checked_metrics(self.sampler.metrics(), self.sampler, "metrics")}


def check_places(env: TrainEnv, group: Group) -> None:
    """Raises ``PluginError`` if more members of a stamped group train than places were kept."""
    if env.limits is None:
        return

    training = {rollout.episode_id for rollout in group if rollout.has_members}
    if len(training) > env.limits.trained:
        raise PluginError(
            f"env {env.name!r}, group {group[0].group_id}: {len(training)} members train, and "
            f"algorithm {env.algorithm.name!r} declares trains_at_most = {env.limits.trained}. "
            "Assign the weight 0 to the others, or declare a larger number."
        )


async def prepare(env: TrainEnv, plan: RolloutPlan) -> None:
    """Call ``prepare_rollout``. Raises ``PluginError`` for a wrong temperature or group size."""
    largest = env.limits.size if env.limits else env.group_size
    plan.group_size = largest
    await env.hooks.prepare_rollout(plan)

    if (plan.group_size or 1) > largest:
        key = "max_group_size" if env.limits else "group_size"
        raise PluginError(
            f"prepare_rollout set group_size = {plan.group_size}, expected at most the {largest} "
            f"of env {env.name!r}; raise {key} in the config."
        )

    needed = env.algorithm.needs_temperature
    if needed is not None and plan.temperature != needed:
        raise PluginError(
            f"prepare_rollout set temperature = {plan.temperature}, and {env.algorithm.name!r} "
            f"learns at {needed} only."
        )
