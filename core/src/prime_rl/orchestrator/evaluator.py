"""When held-out examples are sampled, and how training and they keep out of each other's way.

Evaluations go on before training, whenever an env's ``interval`` of versions has passed, and after
training. An engine swaps weights under every request it holds, so what is sampled across a swap
belongs to no version. While an evaluation is under way the next version therefore waits at the
engines' door (``hold``). The alternatives lose more: samples of mixed versions measure nothing,
sampling anew what a swap has hit may never end, and pausing the run idles the trainer.

Training loses little. Its rollouts keep every slot they may have: an evaluation takes what they
leave, and a quarter more. Batches go on being sampled and trained as far ahead of the version as
ever. And what keeps a new version waiting for ``max_hold_seconds`` is cut short: what is unfinished
then is cancelled, left out of the means, and counted (``eval/ENV/cancelled``).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import ceil

from prime_rl.orchestrator.engines import EngineRouter
from prime_rl.orchestrator.evals import EvalEnv, EvalResult, Finished, of_the_policy, summarise

log = logging.getLogger(__name__)

SHARE = 0.25
"""An evaluation may always have this share of the run's slots in flight, beyond training's own."""

POLL_SECONDS = 0.1
"""How soon an evaluation sees slots that training has left."""

CANCEL_SECONDS = 10.0
"""How long a cancelled rollout may take to end."""


@dataclass(frozen=True, eq=False)
class Job:
    """One rollout to come."""

    env: EvalEnv
    example: int
    member: int


def jobs_of(envs: Sequence[EvalEnv]) -> Iterator[Job]:
    """Every rollout of every env, the envs taking turns."""
    turns = zip_longest(*(range(env.num_rollouts) for env in envs))
    for numbers in turns:
        for env, number in zip(envs, numbers, strict=True):
            if number is not None:
                yield Job(env, *divmod(number, env.group_size))


def free_slots(max_inflight: int, training: int) -> int:
    """Rollouts an evaluation may have in flight beside ``training`` ones."""
    return max(1, ceil(max_inflight * SHARE), max_inflight - training)


@dataclass(frozen=True)
class Schedule:
    """Between which versions evaluations fall due, and how they are sampled."""

    version: int
    """The policy's at the start."""
    last_version: int
    """The run's last one: it is evaluated after training only."""
    seed: int
    max_hold_seconds: float = 300.0


class Evaluator:
    """Samples held-out examples, each time at one version."""

    def __init__(
        self,
        envs: Sequence[EvalEnv],
        router: EngineRouter,
        schedule: Schedule,
        *,
        slots: Callable[[], int],
        on_result: Callable[[EvalResult], None],
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """``slots()``: rollouts that may be in flight now."""
        self.envs = envs
        self._router, self._schedule, self._slots = router, schedule, slots
        self._last_seen = schedule.version
        self._on_result, self._on_progress = on_result, on_progress
        self._due: tuple[int, list[EvalEnv]] | None = None
        self._wake, self._idle, self._cut = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._held = 0.0
        self.total = self.inflight = self.finished = 0

    # -- what the loop asks and tells -----------------------------------------------------------

    @property
    def is_running(self) -> bool:
        return not self._idle.is_set()

    @property
    def share(self) -> float:
        """How much of the present evaluation is done, 0 to 1."""
        return self.finished / max(self.total, 1)

    def take_metrics(self) -> dict[str, float]:
        """In flight, yet to come, and the seconds since the last call that versions waited."""
        held, self._held = self._held, 0.0
        return {
            "dispatcher/inflight/eval": float(self.inflight),
            "dispatcher/queued/eval": float(self.total - self.finished - self.inflight),
            "time/hold_weights_for_eval": held,
        }

    def on_version(self, version: int) -> None:
        """The engines sample from ``version`` now: is any env due?"""
        due = [env for env in self.envs if env.is_due(version, self._last_seen)]
        self._last_seen = version
        self._begin(due)

    def make_up(self, last: Mapping[str, int]) -> None:
        """At the start of a run that goes on: is any env due since the version that it was ``last``
        measured at? Its evaluation was cut off then."""
        self._begin([env for env in self.envs if env.is_due(self._last_seen, last[env.name])])

    def _begin(self, due: list[EvalEnv]) -> None:
        if due and self._last_seen < self._schedule.last_version:
            self._due = self._last_seen, due
            self._idle.clear()
            self._wake.set()

    async def hold(self) -> None:
        """Before the engines get another version: until the evaluation of the present one is done,
        or cut short."""
        if self._idle.is_set():
            return
        started = time.perf_counter()
        try:
            await asyncio.wait_for(self._idle.wait(), self._schedule.max_hold_seconds)
        except TimeoutError:
            self._cut.set()
            await self._idle.wait()
        self._held += time.perf_counter() - started

    async def run(self) -> None:
        """Evaluate what falls due between steps, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._due is not None:
                version, envs = self._due
                self._due = None
                await self.evaluate(envs, version)
                self._idle.set()
                self._cut.clear()
                self._on_progress()

    # -- one evaluation -------------------------------------------------------------------------

    async def evaluate(self, envs: Sequence[EvalEnv], version: int) -> list[EvalResult]:
        """Sample every rollout of some envs at one version, as many at once as there are slots."""
        jobs = list(jobs_of(envs))
        self.total, self.finished = len(jobs), 0
        finished: dict[Job, Finished] = {}
        await self._sample(jobs, version, finished)
        results = []
        for env in envs:
            own = [finished[job] for job in sorted(finished, key=_place) if job.env is env]
            results.append(summarise(env, version, own))
            self._on_result(results[-1])
        self.total = self.finished = 0
        return results

    async def _sample(
        self, jobs: Sequence[Job], version: int, finished: dict[Job, Finished]
    ) -> None:
        pending: set[asyncio.Task[None]] = set()
        try:
            for job in jobs:
                while len(pending) >= self._slots() and not self._cut.is_set():
                    pending = await self._some_of(pending)
                if self._cut.is_set():
                    break
                pending.add(asyncio.create_task(self._one(job, version, finished)))
            while pending and not self._cut.is_set():
                pending = await self._some_of(pending)
        finally:
            await self._cancel(pending, version)

    async def _some_of(self, pending: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
        """Those that are still to come, after a while."""
        done, pending = await asyncio.wait(
            pending, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        for task in done:
            task.result()
        return pending

    async def _one(self, job: Job, version: int, finished: dict[Job, Finished]) -> None:
        environment = job.env.environment
        self.inflight += 1
        try:
            results = await self._router.run(
                ("eval", job.env.name, job.example),
                lambda endpoint: environment.run(
                    environment.examples[job.example],
                    model=endpoint,
                    sampling=job.env.sampling,
                    group_id=job.example,
                    cache_salt=str(version),
                    seed=self._schedule.seed + job.example * job.env.group_size + job.member,
                ),
            )
        finally:
            self.inflight -= 1
        finished[job] = Finished(job.example, of_the_policy(results))
        self.finished += 1
        self._on_progress()

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
            *(version, self.total - self.finished, self.total, self._schedule.max_hold_seconds),
            f"; {len(stuck)} of them do not end" if stuck else "",
        )


def _place(job: Job) -> tuple[int, int]:
    return job.example, job.member
