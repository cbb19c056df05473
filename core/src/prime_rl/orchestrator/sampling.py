"""sampler -> rollout -> algorithm: keeps groups in flight, and puts scored ones into the buffer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from prime_rl.monitor.metrics import mean_and_max
from prime_rl.orchestrator.buffer import Batch, Buffer
from prime_rl.orchestrator.context import Engines, RunContext, TrainEnv
from prime_rl.orchestrator.dispatcher import Dispatcher, Member, OpenGroup, Pace
from prime_rl.orchestrator.evaluator import free_slots
from prime_rl.orchestrator.observers import Observer
from prime_rl.orchestrator.reporter import Reporter
from prime_rl.orchestrator.scoring import score_group, score_rollout, stamp
from prime_rl.orchestrator.sources import ExternalSource, RolloutFailed, RolloutRequest
from prime_rl.plugins.sampler import Sampler


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
        reporter: Reporter,
    ) -> None:
        self.context, self.engines, self.envs = run, engines, envs
        self.sampler, self.buffer, self.reporter = sampler, buffer, reporter
        self.is_scoring = False
        """An algorithm is scoring a group: it may wait for a teacher."""
        self.dispatcher = Dispatcher(self, run.config.orchestrator)

    # -- sampler -> rollout -> algorithm ----------------------------------------------------------

    async def run(self) -> None:
        """Sample until cancelled. Raises what a plugin raised; a failure of an environment is
        data."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.dispatcher.run())
                while True:
                    await self.buffer.wait_for_room()
                    self.report()
                    whom, started = self.waits_for, time.perf_counter()
                    group = await self.dispatcher.arrivals.get()
                    self.context.waited.add(f"wait/orchestrator/{whom}", started)
                    await self._credit(group)
                    await asyncio.sleep(0)  # groups opened by this one start before the next
        finally:
            await self.dispatcher.close()

    async def _credit(self, group: OpenGroup) -> None:
        """Score a complete group's survivors, and let them compete for a place in the batch."""
        env, rollouts = self.envs[group.env_index], group.survivors
        failed = group.size - sum(member.ok for member in group.members.values())
        if failed:
            self.buffer.note_failed(failed, env.name)
        if rollouts:
            self.is_scoring = True
            await score_group(env.hooks, rollouts)
            self.is_scoring = False
            self.reporter.group_scored(rollouts, self.engines.policy.version)
            self.sampler.observe(rollouts)
            for rollout in rollouts:
                stamp(rollout, env.algorithm.action_loss)
            rejected = self.sampler.reject(rollouts)
            if rejected is None:
                for other in self.envs:
                    other.source.observe(rollouts)
            self.buffer.add(rollouts, rejected=rejected)
        self.dispatcher.taken(group)

    # -- what the dispatcher asks -----------------------------------------------------------------

    def next_group(self) -> tuple[int, int, int]:
        """Env index, example index and group size of the next group."""
        env_index, example_index = self.sampler.next_example()
        return env_index, example_index, self.envs[env_index].group_size

    async def run_rollout(self, group: OpenGroup, index: int) -> Member:
        """Produce one member of a group, and score what needs no siblings."""
        env = self.envs[group.env_index]
        ask = RolloutRequest(
            group_id=group.group_id,
            example_id=group.example_index,
            member=index,
            policy_version=group.policy_version,
            seed=self._sampling_seed(group, index),
        )
        try:
            rollouts = await env.source.produce(ask)
        except RolloutFailed as unusable:
            result = unusable.result
            self.reporter.rollout_failed(env.name, group, result)
            return Member((), result.error_type or "unknown", result.error)
        await asyncio.gather(*(score_rollout(env.hooks, rollout) for rollout in rollouts))
        return Member(tuple(rollouts))

    def _sampling_seed(self, group: OpenGroup, index: int) -> int:
        """Distinct for every member of every group, the same in every run of one seed."""
        return (self.context.config.seed * 1_000_003 + group.group_id) * 4096 % 2**31 + index

    def pace(self) -> Pace:
        """What the loop needs next."""
        config = self.context.config
        return Pace(
            version=self.engines.policy.version,
            step=self.buffer.batch.step,
            max_steps=config.max_steps,
            batch_size=config.orchestrator.batch_size,
            buffered=self.buffer.num_buffered,
            is_closed=self.engines.fleet.asleep,
        )

    def ages(self, env_index: int) -> bool:
        """Whether the env's rollouts grow stale: those of a frozen model never do."""
        return self.envs[env_index].source.is_live

    def expected_yield(self, env_index: int) -> float:
        """Rollouts that one member of the env is expected to bring: one per seat."""
        return len(self.envs[env_index].host.agents)

    def free_slots(self) -> int:
        """Rollouts that an evaluation may have in flight now."""
        return free_slots(self.context.config.orchestrator.max_inflight, self.num_inflight)

    @property
    def num_inflight(self) -> int:
        """Rollouts being sampled now."""
        return self.dispatcher.num_inflight

    # -- observer ---------------------------------------------------------------------------------

    async def batch_taken(self, batch: Batch) -> None:
        """A batch that leaves makes room for more groups."""
        self.dispatcher.wake()

    async def version_pending(self, version: int) -> None:
        """Cancel what would be too old for any later batch: nothing needs to wait for it."""
        dropped = await self.dispatcher.drop_stale(version)
        for env_index, number in dropped.items():
            self.reporter.recent.cancelled[self.envs[env_index].name] += number

    def version_served(self, version: int) -> None:
        """A new version lets more groups open."""
        self.dispatcher.wake()

    # -- reports ----------------------------------------------------------------------------------

    @property
    def waits_for(self) -> str:
        """What the next batch waits for: ``models``, ``trainer``, ``inference`` or ``eval``."""
        if self.engines.outages.waiting_for:
            return "models"
        if self.engines.fleet.asleep:
            return "trainer"
        if self.num_inflight or self.dispatcher.room() > 0:
            return "inference"
        return "trainer" if self.engines.policy.evaluated is None else "eval"

    def report(self) -> None:
        """Write the status: which batch is sampled, and what it waits for."""
        version, share = self.engines.policy.version, self.engines.policy.evaluated
        texts = {
            "models": self.engines.outages.waiting_for,
            "trainer": f"trainer (weights of step {version + 1})",
            "eval": f"evaluation of version {version}",
        }
        detail: dict[str, Any] = {} if share is None else {"evaluated": f"{share:.0%}"}
        size = self.context.config.orchestrator.batch_size
        self.context.status.report(
            f"sampling batch {self.buffer.batch.step}",
            waiting_for=texts.get(self.waits_for),
            inflight=self.num_inflight,
            buffered=f"{min(self.buffer.num_buffered, size)}/{size}",
            **detail,
        )

    def take_metrics(self) -> Mapping[str, float]:
        """Counts of rollouts, how far they are off policy, and the sampler's and sources' own."""
        counts = {f"dispatcher/{name}": float(n) for name, n in self.dispatcher.counts.items()}
        for index, env in enumerate(self.envs):
            counts[f"dispatcher/cancelled/{env.name}"] = float(self.dispatcher.cancelled[index])
        sources = {
            f"source/{env.name}/{name}": value
            for env in self.envs
            if isinstance(env.source, ExternalSource)
            for name, value in env.source.source.metrics().items()
        }
        return {
            **counts,
            **mean_and_max(self.dispatcher.versions_behind, "dispatcher/off_policy"),
            **self.sampler.metrics(),
            **sources,
            "dispatcher/inflight/train": float(self.num_inflight),
        }
