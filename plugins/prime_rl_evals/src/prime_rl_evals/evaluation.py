"""Evaluations as an observer of the loop: before training, at intervals, after training.

An engine swaps weights under every request it holds, so what is sampled across a swap belongs to no
version. The next version therefore waits while an evaluation is running (``version_pending``). The
alternatives lose more: samples of mixed versions measure nothing, sampling again what a swap has
hit may never end, and pausing the run idles the trainer.

Training loses little. Its rollouts keep every slot they may have: an evaluation takes what they
leave, and a quarter more. Batches are still sampled and trained as far ahead of the version as
ever. An evaluation that holds a new version back for ``max_hold_seconds`` is cut short: its
unfinished rollouts are cancelled, left out of the means, and counted (``eval/ENV/cancelled``).

With ``max_hold_seconds = 0`` an evaluation delays no version. Its rollouts go on under the next
weights, as those of training do. What is due meanwhile follows at the version that is served then.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass, fields
from math import ceil
from pathlib import Path
from typing import TypedDict

from prime_rl import Observer, ObserverHost, PluginConfig
from prime_rl.env.environment import ExampleFailed
from prime_rl.env.episode import RolloutResult
from prime_rl.env.traces import failed
from prime_rl.errors import RunError
from prime_rl.rundir.rows import read_rows, read_table
from prime_rl_evals.best import BestCheckpoint, EarlyStop, check
from prime_rl_evals.eval_rollouts import save_rollouts
from prime_rl_evals.figures import (
    EvalEnv,
    EvalResult,
    Finished,
    Job,
    jobs_of,
    of_the_policy,
    summarize,
)

log = logging.getLogger(__name__)

BEFORE = "before"
DURING = "during"
AFTER = "after"

SHARE = 0.25
"""An evaluation may always have this share of the run's slots in flight, beyond training's own."""

POLL_SECONDS = 0.1
"""How soon an evaluation sees slots that training has left."""

CANCEL_SECONDS = 10.0
"""How long a cancelled rollout may take to end."""


@dataclass(kw_only=True)
class EvalLine(EvalResult):
    """The fields of a line of ``evals.jsonl``."""

    step: int
    when: str


class EvalLog:
    """The results of every attempt at a run, in ``evals.jsonl``: one per line."""

    def __init__(self, run_dir: Path) -> None:
        """Read what earlier attempts measured. A result after their training is one during the
        training of a run that continues."""
        self.path = run_dir / "evals.jsonl"
        self.results: dict[str, list[EvalResult]] = {BEFORE: [], DURING: [], AFTER: []}
        """In the order of measurement, by when they were measured."""
        names = [each.name for each in fields(EvalResult)]
        for row in read_rows(self.path, EvalLine):
            result = EvalResult(**{name: row[name] for name in names if name in row})
            self.results[BEFORE if row["when"] == BEFORE else DURING].append(result)

    def append(self, when: str, result: EvalResult) -> None:
        """Add a result. If its line cannot be written, the run goes on."""
        self.results[when].append(result)
        line = {"step": result.policy_version, "when": when, **asdict(result)}
        size = None
        try:
            with self.path.open("a", encoding="utf-8") as file:
                size = file.tell()
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            log.error("cannot write to %s: %s", self.path, error)
            with suppress(OSError):  # the next line must not continue a torn one
                if size is not None:
                    os.truncate(self.path, size)


def free_slots(max_inflight: int, training: int) -> int:
    """Rollouts an evaluation may have in flight beside ``training`` ones."""
    return max(1, ceil(max_inflight * SHARE), max_inflight - training)


class Evaluation(Observer):
    """Evaluates what is due of ``[[orchestrator.eval.env]]``, each time at one version, and keeps
    the results."""

    name = "evals"
    reads = ("orchestrator.eval.env", "ckpt.best", "stop.metric")

    def __init__(self, config: PluginConfig, host: ObserverHost) -> None:
        super().__init__(config, host)
        run = self.context = host.shared.run
        self.policy = host.shared.engines.policy
        self.settings = run.config.orchestrator.eval
        self.envs = [
            EvalEnv.of(env, self.settings, host.environment(env, self.settings.harness))
            for env in self.settings.env
        ]
        self.eval_log = EvalLog(run.run_dir)
        self._best = BestCheckpoint(run.config.ckpt.best, run.run_dir)
        self._stop = EarlyStop(run.config.stop, run.run_dir)
        self._open = AsyncExitStack()
        self._began_with = began_with(run.run_dir, run.launch.first_step)
        self._last_seen = self.policy.version
        self._due: asyncio.Queue[tuple[int, list[EvalEnv]]] = asyncio.Queue()
        self._idle = asyncio.Event()
        self._cut = asyncio.Event()
        self._idle.set()
        self._held = 0.0
        self.total = self.inflight = self.finished = 0

    check = staticmethod(check)

    async def setup(self) -> None:
        """Start the environments, and look at what earlier attempts measured."""
        for when in (BEFORE, DURING):
            for result in self.eval_log.results[when]:
                self._best.measured(result.policy_version, result.as_metrics())
                self._stop.measured(result.policy_version, result.as_metrics(), may_end=False)
                self.host.evaluated(result.policy_version, result.as_metrics())
        for env in self.envs:
            await self._open.enter_async_context(env.environment)

    async def close(self) -> None:
        """Stop them."""
        await self._open.aclose()

    # -- when -------------------------------------------------------------------------------------

    async def before_training(self) -> None:
        """Evaluate the first weights, unless an earlier attempt has, and make up for evaluations
        that an earlier attempt did not complete. With ``retrigger_on_resume``, begin to evaluate
        the weights of a resumed run, also those that are measured."""
        unmeasured = self._unmeasured()
        if unmeasured:
            await self._evaluate(BEFORE, unmeasured, self.policy.version)
        last = {env.name: self._began_with for env in self.envs}
        for result in (*self.eval_log.results[BEFORE], *self.eval_log.results[DURING]):
            last[result.env] = max(result.policy_version, last.get(result.env, 0))
        is_again = self.settings.retrigger_on_resume and self._last_seen > self._began_with
        self._begin(
            [env for env in self.envs if is_again or env.is_due(self._last_seen, last[env.name])]
        )

    def _unmeasured(self) -> list[EvalEnv]:
        """What is evaluated before training. A run that resumes its own checkpoint has measured its
        first weights; a run that starts from another run's checkpoint measures those."""
        version = self.context.launch.first_step - 1
        if self.settings.skip_first_step or version != self._began_with:
            return []
        measured = {result.env for result in self.eval_log.results[BEFORE]}
        return [env for env in self.envs if env.name not in measured]

    async def after_training(self) -> None:
        """Evaluate the last weights, unless an attempt that failed later has."""
        await self._idle.wait()  # one that holds nothing back may not be done
        version = self.policy.version
        before = self.eval_log.results[DURING]
        measured = {each.env for each in before if each.policy_version == version}
        left = [env for env in self.envs if env.name not in measured]
        await self._evaluate(AFTER, left, version)

    def version_served(self, version: int) -> None:
        """Start the evaluations that are due at ``version``. The last one's are ``AFTER``."""
        due = [env for env in self.envs if env.is_due(version, self._last_seen)]
        self._last_seen = version
        self._begin(due)

    def _begin(self, due: list[EvalEnv]) -> None:
        if due and self._last_seen < self.context.config.max_steps:
            self._idle.clear()  # at once: the next version may be pending already
            self._due.put_nowait((self._last_seen, due))
            self._report()

    async def run(self) -> None:
        """Evaluate what is due between steps, until cancelled."""
        while True:
            version, envs = await self._due.get()
            if not self.settings.max_hold_seconds:
                while not self._due.empty():  # the newest stands for those that it overtook
                    _, others = self._due.get_nowait()
                    envs = [env for env in self.envs if env in envs or env in others]
                version = self.policy.version
            await self._evaluate(DURING, envs, version)

    async def version_pending(self, version: int) -> None:
        """Wait until the evaluation of the present version is done, or cut it short."""
        if self._idle.is_set() or not self.settings.max_hold_seconds:
            return
        started = time.perf_counter()
        try:
            # Not ``wait_for``: before Python 3.12 it swallows a cancellation that comes in the tick
            # in which a failing evaluation ends, and the run would never end.
            async with asyncio.timeout(self.settings.max_hold_seconds):
                await self._idle.wait()
        except TimeoutError:
            if not self._idle.is_set():  # otherwise the next one would be cut
                self._cut.set()
            await self._idle.wait()

        self._held += time.perf_counter() - started

    # -- one evaluation ---------------------------------------------------------------------------

    async def _evaluate(self, when: str, envs: Sequence[EvalEnv], version: int) -> None:
        """Sample every rollout of some envs at one version, as many at once as there are slots."""
        jobs = list(jobs_of(envs))
        self._idle.clear()
        self.total = len(jobs)
        self.finished = 0
        finished: dict[Job, Finished] = {}
        if jobs:  # before the first rollout ends: the watchdog must see that we work
            self._report(when)
        try:
            await self._sample(when, jobs, version=version, finished=finished)
            for env in envs:
                of_env = [job for job in finished if job.env is env]
                of_env.sort(key=lambda job: (job.example, job.member))
                if not of_env:
                    self._nothing_finished(env, version)
                    continue
                self._add(when, summarize(env, version, [finished[job] for job in of_env]))
                if self.context.config.orchestrator.save_rollouts:
                    answered = {job: finished[job] for job in of_env}
                    save_rollouts(self.context.run_dir, env, version=version, finished=answered)
        finally:
            self.total = self.finished = 0
            if self._due.empty():
                self._idle.set()
            self._cut.clear()
            self._report()

    async def _sample(
        self, when: str, jobs: Sequence[Job], version: int, finished: dict[Job, Finished]
    ) -> None:
        waiting = list(reversed(jobs))
        pending = set[asyncio.Task[None]]()
        try:
            while (waiting or pending) and not self._cut.is_set():
                slots = free_slots(self.host.max_inflight(), self.host.num_inflight())
                while waiting and len(pending) < slots:
                    job = waiting.pop()
                    pending.add(
                        asyncio.create_task(
                            self._one(when, job, version=version, finished=finished)
                        )
                    )
                done, pending = await asyncio.wait(
                    pending, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    task.result()
        finally:
            await self._cancel(pending, version)

    async def _one(self, when: str, job: Job, version: int, finished: dict[Job, Finished]) -> None:
        env = job.env
        # Engines take 63 bits, which the run's seed may fill.
        seed = self.context.config.seed + job.example * env.group_size + job.member
        seed %= 2**63
        # One that holds nothing back begins some of its rollouts under newer weights.
        salt = str(version if self.settings.max_hold_seconds else self.policy.version)
        self.inflight += 1
        try:
            results = await self.host.shared.router.run(
                ("eval", env.name, job.example),
                lambda endpoint: env.environment.run(
                    env.environment.examples[job.example],
                    model=endpoint,
                    sampling=env.sampling,
                    group_id=job.example,
                    cache_salt=salt,
                    seed=seed,
                ),
            )
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # It comes out of the environment. Passed on, it would end ``run`` without a word.
            text = "cancelled from inside its environment"
            results = [RolloutResult(ok=False, error_type=type(error).__name__, error=text)]
        except ExampleFailed as error:
            results = [failed(type(error).__name__, str(error))]
        finally:
            self.inflight -= 1

        finished[job] = Finished(job.example, of_the_policy(results), results)
        self.finished += 1
        self._report(when)

    async def _cancel(self, pending: set[asyncio.Task[None]], version: int) -> None:
        if not pending:
            return
        for task in pending:
            task.cancel()
        _, stuck = await asyncio.wait(pending, timeout=CANCEL_SECONDS)
        if not self._cut.is_set():  # the run ends
            return
        log.warning(
            "the evaluation of version %d is cut short: %d of %d rollouts are left out "
            "(orchestrator.eval.max_hold_seconds = %.0f)%s",
            version,
            self.total - self.finished,
            self.total,
            self.settings.max_hold_seconds,
            f"; {len(stuck)} of them do not end" if stuck else "",
        )

    # -- reports ----------------------------------------------------------------------------------

    def _nothing_finished(self, env: EvalEnv, version: int) -> None:
        """An evaluation without a rollout has no reward; it is not one of reward 0."""
        text = "eval %s at version %d: no rollout finished, so nothing is measured"
        log.warning(text, env.name, version)
        self.host.log(version, {f"eval/{env.name}/cancelled": float(env.num_rollouts)})

    def _add(self, when: str, result: EvalResult) -> None:
        at = f"at version {result.policy_version}" if when == DURING else f"{when} training"
        log.info("eval %s %s: reward %.4f", result.env, at, result.reward)
        metrics = result.as_metrics()
        self.host.log(result.policy_version, metrics)
        self.host.evaluated(result.policy_version, metrics)
        known = [each for results in self.eval_log.results.values() for each in results]
        is_again = any(
            (each.env, each.policy_version) == (result.env, result.policy_version) for each in known
        )
        self.eval_log.append(when, result)
        self._best.measured(result.policy_version, metrics)
        if not is_again:  # the same weights are no further step without a new best
            self._stop.measured(result.policy_version, metrics, may_end=when == DURING)

    def _report(self, when: str = DURING) -> None:
        """Publish the progress: in the status while nothing is trained, else for the sampling."""
        share = self.finished / max(self.total, 1)
        self.policy.evaluated = None if self._idle.is_set() else share
        if when != DURING:
            self.context.status.report(f"evaluating {when} training", progress=share)

    def take_metrics(self) -> dict[str, float]:
        """Rollouts in flight and to come, and the seconds since the last call that versions were
        held back."""
        held = self._held
        self._held = 0.0
        return {
            "dispatcher/inflight/eval": float(self.inflight),
            "dispatcher/queued/eval": float(self.total - self.finished - self.inflight),
            "time/hold_weights_for_eval": held,
        }


class _FirstStep(TypedDict, total=False):
    """The facts that are read of a launch."""

    first_step: int


def began_with(run_dir: Path, first_step: int) -> int:
    """The policy version that the first attempt at this run began with: 0, or that of another run's
    checkpoint. ``first_step``: of this attempt."""
    numbers = (p.stem.rpartition("_")[2] for p in run_dir.glob("configs/launch.attempt_*.json"))
    attempts = [int(number) for number in numbers if number.isdecimal()]
    if not attempts:
        return first_step - 1
    first = run_dir / "configs" / f"launch.attempt_{min(attempts)}.json"
    try:
        step: int = read_table(first, _FirstStep).get("first_step", 1)
        return step - 1
    except (OSError, RunError) as error:
        log.warning("The run counts as new: %s", error)
        return 0
