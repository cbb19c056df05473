"""The loop. Read this first: eight words go by, each a module of this package or the process it
names.

    sampler -> rollout -> algorithm -> filters -> packer -> wire -> trainer -> weights
       ^                                                                         |
       +-------------------------------------------------------------------------+

    sampler    ``sampler.next_example``: which example; ``dispatcher`` opens a group for it
    rollout    ``env`` plays the episodes against an engine; ``trajectory`` cuts them into samples
    algorithm  ``scoring``: score_rollout as one arrives, score_group when its siblings are there
    filters    ``batch``: pre- and post-batch slots, staleness, back-fill
    packer     ``packer``: samples laid end to end in rows, ``balance``: shared out to the ranks
    wire       ``prime_rl.wire``: binary columns to the trainer
    trainer    other processes; algorithm-blind
    weights    ``policy``: the watcher swaps each new version in while rollouts go on

While step n trains, batch n + 1 is sampled. Nothing here asks which algorithm it holds.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prime_rl.config.run import RunConfig
from prime_rl.inference.fleet import Fleet
from prime_rl.monitor.engines import EngineWatch
from prime_rl.monitor.metrics import mean_and_max
from prime_rl.orchestrator.batch import Batch, BatchAssembler
from prime_rl.orchestrator.build import TrainEnv
from prime_rl.orchestrator.dispatcher import Dispatcher, Member, OpenGroup, Pace
from prime_rl.orchestrator.engines import Place
from prime_rl.orchestrator.env import RolloutResult
from prime_rl.orchestrator.evals import EvalEnv, EvalResult
from prime_rl.orchestrator.evaluator import Evaluator, free_slots
from prime_rl.orchestrator.host import Outages
from prime_rl.orchestrator.measured import AFTER, BEFORE, DURING, note, noted
from prime_rl.orchestrator.packer import batch_frames, cut_samples
from prime_rl.orchestrator.policy import Policy, TrainerStep, WeightWatcher
from prime_rl.orchestrator.producers import Ask, Supplied, Unusable
from prime_rl.orchestrator.progress import State
from prime_rl.orchestrator.reporter import Reporter
from prime_rl.orchestrator.scoring import score_group, score_rollout, stamp
from prime_rl.orchestrator.versions import write_versions
from prime_rl.plugins.base import Sampler
from prime_rl.plugins.errors import RunError
from prime_rl.plugins.manager import Hooks
from prime_rl.run.checkpoints import Checkpoint, unfinished
from prime_rl.run.drift import installed_versions
from prime_rl.run.launch import Launch
from prime_rl.run.status import Status
from prime_rl.wire.transport import Sender

log = logging.getLogger(__name__)

DISK_WAITS = (1.0, 5.0)
"""Seconds between attempts at a checkpoint, while the batch waits."""


class Orchestrator:
    """Holds what the loop needs and runs it."""

    def __init__(
        self,
        *,
        config: RunConfig,
        launch: Launch,
        run_dir: Path,
        hooks: Hooks,
        envs: Sequence[TrainEnv],
        eval_envs: Sequence[EvalEnv],
        sampler: Sampler,
        assembler: BatchAssembler,
        reporter: Reporter,
        sender: Sender,
        fleet: Fleet,
        place: Place,
        status: Status,
        policy: Policy,
        outages: Outages,
    ) -> None:
        self.config, self.launch, self.run_dir = config, launch, run_dir
        self.hooks, self.envs = hooks, envs
        self.sampler, self.assembler = sampler, assembler
        self.sender, self.fleet, self.status = sender, fleet, status
        self.policy, self.outages = policy, outages
        self.outages.changed = self._report_sampling
        self.reporter = reporter
        self.engine_watch = EngineWatch(fleet.pages)
        self.evaluated = noted(run_dir)
        """Before, while and after training went on; by attempts before this one, too."""
        self._began_with = launch.began_with(run_dir)
        self._phase = ""
        self.evals = Evaluator(
            eval_envs,
            place,
            version=policy.version,
            last_version=config.max_steps,
            seed=config.seed,
            slots=lambda: free_slots(self._max_inflight(), self.dispatcher.num_inflight),
            on_result=self._on_eval,
            on_progress=self._report_evaluating,
            max_hold_seconds=config.orchestrator.eval.max_hold_seconds,
        )
        self.watcher = WeightWatcher(
            run_dir,
            self.policy,
            fleet,
            on_pending=self._on_version_pending,
            on_version=self._on_version,
            on_step=self._on_trainer_step,
        )
        self.dispatcher = Dispatcher(
            next_group=self._next_group,
            run_rollout=self._run_rollout,
            pace=self._pace,
            version=lambda: self.policy.version,
            max_off_policy_steps=config.orchestrator.max_off_policy_steps,
            oversampling_factor=config.orchestrator.oversampling_factor,
            max_inflight=self._max_inflight(),
            ages=lambda env_index: self.envs[env_index].producer.is_live,
            yields=lambda env_index: len(self.envs[env_index].host.agents),
            is_closed=lambda: self.fleet.asleep,
        )

        self.state = State(sampler, envs, self.dispatcher, assembler)

    def _max_inflight(self) -> int:
        settings = self.config.orchestrator
        oversampled = int(settings.batch_size * settings.oversampling_factor)
        return settings.max_inflight_rollouts or oversampled

    # -- the loop ---------------------------------------------------------------------------

    async def run(self) -> dict[str, list[EvalResult]]:
        """Every step of the run, between an evaluation before and one after."""
        write_versions(self.run_dir, self.hooks, self.config.plugins.disabled)
        watches = (self.reporter.lag.run(), self.engine_watch.run(), self.fleet.run())
        running = (self.watcher.run(), self.evals.run(), *watches)
        background = [asyncio.create_task(each) for each in running]
        try:
            if unmeasured := self._unmeasured():
                await self._evaluate(BEFORE, background, unmeasured)
            self.evals.make_up(self._last_measured())
            background.append(asyncio.create_task(self.dispatcher.run()))
            for _ in range(self.launch.first_step, self.config.max_steps + 1):
                await self._step(background)
            await self._finish(background)
            await self._evaluate(AFTER, background)
        finally:
            for task in background:  # first: the dispatcher must open no more groups
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            await self.dispatcher.close()
        return self.evaluated

    async def _step(self, background: Sequence[asyncio.Task[None]]) -> None:
        """One batch: assembled, packed, shipped."""
        while not self.assembler.is_full:
            self._report_sampling()
            whom, started = self._waits_for, time.perf_counter()
            group = await self._next_arrival(background)
            self.reporter.waited.add(f"wait/orchestrator/{whom}", started)
            await self._take_in(group, background)
        batch = self.assembler.take()
        started = time.perf_counter()
        await self._checkpoint(batch.step)
        self.reporter.waited.add("time/save_ckpt", started)
        self.dispatcher.wake()
        started = time.perf_counter()
        frames = self._pack(batch)
        self.reporter.waited.add("time/pack", started)
        if self.config.deployment.colocated:
            await self._leave_the_gpu(batch.step, background)
        shipping = asyncio.create_task(self.sender.send(batch.step, frames))
        self.status.report("shipping", waiting_for=f"trainer (room for batch {batch.step})")
        started = time.perf_counter()
        await self._or_crash(shipping, background)
        self.reporter.waited.add("wait/orchestrator/trainer_room", started)
        self.reporter.step(batch, self._metrics(frames), frames)

    async def _leave_the_gpu(self, step: int, background: Sequence[asyncio.Task[None]]) -> None:
        """Colocated, before batch ``step`` goes out: the engines sleep until version ``step`` wakes
        them. What they have in flight stays there; an evaluation is let finish."""
        started, awaited = time.perf_counter(), f"trainer (weights of step {step - 1})"
        self.status.report(f"batch {step} is ready", waiting_for=awaited)
        await self._or_crash(asyncio.create_task(self.policy.wait_for(step - 1)), background)
        await self._or_crash(asyncio.create_task(self.evals.hold()), background)
        await self.fleet.sleep()
        self.reporter.waited.add("time/sleep_engines", started)

    async def _take_in(self, group: OpenGroup, background: Sequence[asyncio.Task[None]]) -> None:
        """A complete group: its survivors are credited, stamped and compete for a place in the
        batch."""
        env, rollouts = self.envs[group.env_index], group.survivors
        failed = group.size - sum(member.ok for member in group.members.values())
        if failed:
            self.assembler.note_failed(failed, env.name)
        if rollouts:
            scoring = asyncio.create_task(score_group(env.hooks, rollouts))
            await self._or_crash(scoring, background, or_stuck=False)  # a teacher may be waited for
            self.reporter.note_place(rollouts)
            self.sampler.observe(rollouts)
            if all(rollout.is_live for rollout in rollouts):
                self.reporter.group_scored(rollouts, self.policy.version)
            for rollout in rollouts:
                stamp(rollout, env.algorithm.action_loss)
            rejected = self.sampler.reject(rollouts)
            if rejected is None:
                for other in self.envs:
                    other.producer.observe(rollouts)
            self.assembler.add(rollouts, rejected=rejected)
        self.dispatcher.taken(group)
        await asyncio.sleep(0)  # what that has opened begins before the next group is taken in

    def _pack(self, batch: Batch) -> list[bytes]:
        """The batch as one frame a trainer rank."""
        limit = self.config.seq_len
        lengths = (len(sample) for rollout in batch.kept for sample in rollout.samples)
        self.reporter.recent.truncated += sum(length > limit for length in lengths)
        samples, envs = cut_samples(batch.kept, limit)
        self.hooks.batch_packed(batch.step, samples)
        return batch_frames(
            batch.step,
            samples,
            envs,
            self.config.row_tokens,
            self.launch.num_ranks,
            self.config.trainer.attention_flops,
        )

    async def _finish(self, background: Sequence[asyncio.Task[None]]) -> None:
        """Wait until the engines have the last weights."""
        last = self.config.max_steps
        self.status.report("finishing", waiting_for=f"trainer (weights of step {last})")
        await self._or_crash(asyncio.create_task(self.policy.wait_for(last)), background)

    # -- what the dispatcher asks for ---------------------------------------------------------

    def _next_group(self) -> tuple[int, int, int]:
        env_index, example_index = self.sampler.next_example()
        return env_index, example_index, self.envs[env_index].group_size

    def _pace(self) -> Pace:
        return Pace(
            step=self.assembler.batch.step,
            max_steps=self.config.max_steps,
            batch_size=self.config.orchestrator.batch_size,
            buffered=self.assembler.num_buffered,
        )

    async def _run_rollout(self, group: OpenGroup, index: int) -> Member:
        """Have one member produced, and score what needs no siblings."""
        env = self.envs[group.env_index]
        ask = Ask(
            group_id=group.group_id,
            example_id=group.example_index,
            member=index,
            policy_version=group.policy_version,
            seed=self._sampling_seed(group, index),
        )
        try:
            rollouts = await env.producer.produce(ask)
        except Unusable as unusable:
            return self._failed(env, group, unusable.result)
        await asyncio.gather(*(score_rollout(env.hooks, rollout) for rollout in rollouts))
        return Member(tuple(rollouts))

    def _failed(self, env: TrainEnv, group: OpenGroup, result: RolloutResult) -> Member:
        self.reporter.rollout_failed(env.name, group, result)
        return Member((), result.error_type or "unknown", result.error)

    def _sampling_seed(self, group: OpenGroup, index: int) -> int:
        """Distinct for every member of every group, the same in every run of one seed."""
        return (self.config.seed * 1_000_003 + group.group_id) * 4096 % 2**31 + index

    # -- weights --------------------------------------------------------------------------------

    async def _on_version_pending(self, version: int) -> None:
        """Before the engines pause: an evaluation of the present version is let finish, and what
        would be too old anyway is cancelled, so that nobody waits for it."""
        await self.evals.hold()
        dropped = await self.dispatcher.drop_stale(version)
        for env_index, number in dropped.items():
            self.reporter.recent.cancelled[self.envs[env_index].name] += number

    def _on_version(self, version: int) -> None:
        self.hooks.weights_published(version)
        self.evals.on_version(version)
        self.dispatcher.wake()

    def _on_trainer_step(self, step: TrainerStep) -> None:
        if step.step < self.launch.first_step:  # of the attempt before
            return
        metrics = {name: float("nan") if v is None else v for name, v in step.metrics.items()}
        self.reporter.trained(step.step, metrics)
        self.hooks.step_finished(step.step, metrics)

    # -- evaluation -----------------------------------------------------------------------------

    def _unmeasured(self) -> list[EvalEnv]:
        """What is evaluated before training. A run that goes on from a checkpoint of its own has
        measured its first model; one that began with another run's checkpoint measures that."""
        version = self.launch.first_step - 1
        if self.config.orchestrator.eval.skip_first_step or version != self._began_with:
            return []
        measured = {result.env for result in self.evaluated[BEFORE]}
        return [env for env in self.evals.envs if env.name not in measured]

    def _last_measured(self) -> dict[str, int]:
        """The version that each env was last evaluated at; else the one that the run began with."""
        last = {env.name: self._began_with for env in self.evals.envs}
        for result in (*self.evaluated[BEFORE], *self.evaluated[DURING]):
            last[result.env] = max(result.policy_version, last.get(result.env, 0))
        return last

    async def _evaluate(
        self,
        when: str,
        background: Sequence[asyncio.Task[None]],
        envs: Sequence[EvalEnv] | None = None,
    ) -> None:
        """Some envs, or every one, while nothing else goes on."""
        self._phase = when
        evaluating = self.evals.evaluate(envs or self.evals.envs, self.policy.version)
        try:
            await self._or_crash(asyncio.create_task(evaluating), background)
        finally:
            self._phase = ""

    def _on_eval(self, result: EvalResult) -> None:
        said = f"{self._phase} training" if self._phase else f"at version {result.policy_version}"
        log.info("eval %s %s: reward %.4f", result.env, said, result.reward)
        self.reporter.log(result.policy_version, result.as_metrics())
        when = self._phase or DURING
        self.evaluated[when].append(result)
        note(self.run_dir, when, result)

    def _report_evaluating(self) -> None:
        if self._phase:
            self.status.report(f"evaluating {self._phase} training", progress=self.evals.share)

    # -- waiting, and not waiting for the dead ---------------------------------------------------

    async def _next_arrival(self, background: Sequence[asyncio.Task[None]]) -> OpenGroup:
        arrivals = self.dispatcher.arrivals
        if not arrivals.empty():
            return arrivals.get_nowait()
        arrival = asyncio.create_task(arrivals.get())
        await self._or_crash(arrival, background)
        return arrival.result()

    async def _or_crash(
        self,
        task: asyncio.Task[Any],
        background: Sequence[asyncio.Task[None]],
        or_stuck: bool = True,
    ) -> None:
        """Until ``task`` is done.

        If a background task dies first, raise what it died of; if nothing is sampled and no weights
        come for ``weights_timeout`` seconds, the run is stuck, unless ``or_stuck`` says otherwise.
        """
        idle_since = time.monotonic()
        try:
            while not task.done():
                await asyncio.wait(
                    [task, *background], timeout=1.0, return_when=asyncio.FIRST_COMPLETED
                )
                for other in background:
                    if other.done():
                        other.result()
                inflight = self.dispatcher.num_inflight or self.evals.inflight
                if not or_stuck or (inflight and not self.fleet.asleep):
                    idle_since = time.monotonic()
                elif time.monotonic() - idle_since > self.config.orchestrator.weights_timeout:
                    raise self._stuck()
            await task
        finally:
            task.cancel()

    def _stuck(self) -> RunError:
        last = self.status.last
        return RunError(
            f"nothing has moved for {self.config.orchestrator.weights_timeout:.0f} s "
            f"(orchestrator.weights_timeout): {last.state}, waiting for {last.waiting_for}. "
            f"The engines have version {self.policy.version}. See logs/latest/trainer.log."
        )

    # -- reporting --------------------------------------------------------------------------------

    @property
    def _waits_for(self) -> str:
        """Whom batch assembly waits for: ``inference``, ``trainer``, ``models``, ``eval``."""
        if self.outages.waiting_for:
            return "models"
        if self.fleet.asleep:
            return "trainer"
        if self.dispatcher.num_inflight or self.dispatcher.room() > 0:
            return "inference"
        return "eval" if self.evals.is_running else "trainer"

    def _report_sampling(self) -> None:
        have, size = self.assembler.num_buffered, self.config.orchestrator.batch_size
        texts = {
            "models": self.outages.waiting_for,
            "trainer": f"trainer (weights of step {self.policy.version + 1})",
            "eval": f"evaluation of version {self.policy.version}",
        }
        detail: dict[str, Any] = {}
        if self.evals.is_running:
            detail["evaluated"] = f"{self.evals.share:.0%}"
        self.status.report(
            f"sampling batch {self.assembler.batch.step}",
            waiting_for=texts.get(self._waits_for),
            inflight=self.dispatcher.num_inflight,
            buffered=f"{min(have, size)}/{size}",
            **detail,
        )

    def _metrics(self, frames: Sequence[bytes]) -> dict[str, float]:
        counts = {f"dispatcher/{name}": float(n) for name, n in self.dispatcher.counts.items()}
        for index, env in enumerate(self.envs):
            counts[f"dispatcher/cancelled/{env.name}"] = float(self.dispatcher.cancelled[index])
        return {
            **self.assembler.take_metrics(),
            **counts,
            **mean_and_max(self.dispatcher.versions_behind, "dispatcher/off_policy"),
            **self.sampler.metrics(),
            **self._source_metrics(),
            **self.evals.take_metrics(),
            **self.engine_watch.take(),
            **self.fleet.take_metrics(),
            "dispatcher/inflight/train": float(self.dispatcher.num_inflight),
            "watcher/policy_version": float(self.policy.version),
            "watcher/update_count": float(self.watcher.update_count),
            "watcher/last_update_weights_time": self.watcher.update_seconds,
            "wire/bytes": float(sum(map(len, frames))),
        }

    def _source_metrics(self) -> dict[str, float]:
        return {
            f"source/{env.name}/{name}": value
            for env in self.envs
            if isinstance(env.producer, Supplied)
            for name, value in env.producer.source.metrics().items()
        }

    async def _checkpoint(self, step: int) -> None:
        """Our part of the checkpoint of ``step``, if one is due: before its batch leaves, so that
        the trainer, which completes the checkpoint, finds it."""
        config = self.config.ckpt
        if config is None or not config.is_due(step, self.config.max_steps):
            return
        part = unfinished(self.run_dir, step).orchestrator
        facts = installed_versions(), self.config.model_dump(mode="json")
        for wait in (*DISK_WAITS, None):
            try:
                return self.state.save(part, step, *facts)
            except OSError as error:
                shutil.rmtree(part, ignore_errors=True)
                log.error("cannot write the checkpoint of step %d to %s: %s", step, part, error)
                if wait is not None:
                    self.status.report("waiting", waiting_for=f"disk ({error})")
                    await asyncio.sleep(wait)
        log.error("step %d: no checkpoint; the run goes on", step)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint; before ``run``. Raises ``ConfigError`` if it does not fit."""
        self.state.restore(checkpoint.orchestrator)
