"""Which envs the sampler may choose while one fails, and how often a run that waits looks again."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from statistics import mean
from types import SimpleNamespace
from typing import Any

import pytest
from simulated_run import Simulated

from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.orchestrator.batch_size import BatchSize
from prime_rl.orchestrator.build import _may_be_sampled
from prime_rl.orchestrator.dispatcher import Dispatcher, OpenGroup
from prime_rl.rollout import Rollout
from prime_rl.testing import make_rollout

ENVS = ("a", "b", "c")


def may_be_sampled(name: str, **states: set[str]) -> bool:
    """``states``: the envs that are failing, asked, closed, empty, or of weight 0."""

    def has(state: str, env: str) -> bool:
        return env in states.get(state, set())

    envs: list[Any] = [
        SimpleNamespace(
            name=env, source=SimpleNamespace(is_ready=lambda env=env: not has("empty", env))
        )
        for env in ENVS
    ]
    curriculum: Any = SimpleNamespace(
        is_open=lambda env: not has("closed", env), weight=lambda env: not has("light", env)
    )
    dispatcher: Any = SimpleNamespace(
        is_failing=lambda env: has("failing", env), is_asked=lambda env: has("asked", env)
    )
    return _may_be_sampled(envs[ENVS.index(name)], envs, curriculum, lambda: dispatcher)


def test_an_env_that_fails_is_asked_by_one_group_at_a_time() -> None:
    assert may_be_sampled("a", failing={"a"})
    assert not may_be_sampled("a", failing={"a"}, asked={"a"})
    assert may_be_sampled("a", failing={"a"}, asked={"b"})
    assert may_be_sampled("b", failing={"a"}, asked={"a", "b"})


@pytest.mark.parametrize("state", ["failing", "closed", "empty", "light"])
def test_unless_the_others_have_nothing_to_give(state: str) -> None:
    states = {"failing": {"a"}, "asked": {*ENVS}}
    states[state] = states.get(state, set()) | {"b", "c"}
    assert may_be_sampled("a", **states)


def test_some_env_may_always_be_sampled_that_has_something() -> None:
    """All states of three envs: the sampler would end the run if none were left."""
    subsets = [
        {e for e, x in zip(ENVS, bits, strict=True) if x} for bits in product((0, 1), repeat=3)
    ]
    for failing, asked, closed in product(subsets, repeat=3):
        states = {"failing": failing, "asked": asked, "closed": closed}
        allowed = {env for env in ENVS if may_be_sampled(env, **states)}
        assert allowed <= {*ENVS} - closed
        assert bool(allowed) == bool({*ENVS} - closed)
        sound = {*ENVS} - closed - failing
        assert sound <= allowed
        if sound:
            assert allowed & failing == (failing - closed) - asked


# -- runs of two envs under a clock that jumps ------------------------------------------------


Outcome = tuple[float, bool]
"""Seconds of a rollout, and whether it finishes."""
BATCH = 16
TRAIN_SECONDS = 0.1


class Run:
    """Batches of 16 rollouts of two envs in turn, and a trainer that takes 0.1 s a step."""

    def __init__(
        self,
        outcome: Callable[[str, float], Outcome],
        lag: int = 8,
        size: int = 4,
        alone: bool = False,
        envs: Sequence[str] = ("sound", "other"),
    ) -> None:
        self.outcome = outcome
        self.version = 0
        self.step = 1
        self.num_buffered = 0
        self.most_inflight = 0
        self.chosen: Counter[str] = Counter()
        self.requested: list[tuple[int, str]] = []
        """The step and the env of each group."""
        self.trained: Counter[str] = Counter()
        self.ends: list[float] = []
        settings = OrchestratorConfig(
            batch_size=BATCH,
            max_off_policy_steps=lag,
            group_size=size,
            max_inflight_rollouts=10_000,
            train={"env": [{"id": name} for name in envs]},
        )
        self.envs: list[Any] = [
            SimpleNamespace(
                name=name,
                group_size=size,
                source=SimpleNamespace(is_live=True, is_ready=lambda: True),
                limits=None,
                host=SimpleNamespace(agents=("agent",)),
            )
            for name in envs
        ]
        engines = SimpleNamespace(policy=self, fleet=SimpleNamespace(asleep=False, serving=[]))
        self.dispatcher = Dispatcher(
            SimpleNamespace(orchestrator=settings, max_steps=10**6),  # type: ignore[arg-type]
            engines,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            self.envs,
            self.next_group,
            self.rollout,
            envs if alone else (),
            BatchSize(BATCH),
        )

    @property
    def batch(self) -> Run:
        return self  # that has the step

    def next_group(self) -> tuple[Any, int]:
        curriculum: Any = SimpleNamespace(is_open=lambda env: True, weight=lambda env: 1.0)
        ready = [
            env
            for env in self.envs
            if _may_be_sampled(env, self.envs, curriculum, lambda: self.dispatcher)
        ]
        least = min(ready, key=lambda env: self.chosen[env.name])
        self.requested.append((self.step, least.name))
        self.chosen[least.name] += 1
        if len(ready) == 1:  # an env that is not asked has no claim on later batches
            for env in self.envs:
                self.chosen[env.name] = max(self.chosen[env.name], self.chosen[least.name])
        return least, 0

    async def rollout(self, group: OpenGroup, index: int) -> list[Rollout] | None:
        self.most_inflight = max(self.most_inflight, self.dispatcher.num_inflight)
        seconds, finishes = self.outcome(group.env.name, asyncio.get_running_loop().time())
        await asyncio.sleep(seconds)
        return [make_rollout(1.0, group_id=group.group_id)] if finishes else None

    async def train(self, sent: asyncio.Queue[int]) -> None:
        while True:
            step = await sent.get()
            await asyncio.sleep(TRAIN_SECONDS)
            self.version = step
            self.dispatcher.version_served(step)
            await self.dispatcher.drop_stale(step)
            self.has_trained.set()

    async def go(self, steps: int) -> None:
        sent: asyncio.Queue[int] = asyncio.Queue()
        self.has_trained = asyncio.Event()
        tasks = [asyncio.create_task(self.dispatcher.run()), asyncio.create_task(self.train(sent))]
        while self.step <= steps:
            group = await self.dispatcher.arrivals.get()
            self.num_buffered += len(group.survivors)
            self.trained[group.env.name] += len(group.survivors)
            self.dispatcher.taken(group)
            while self.num_buffered >= BATCH:
                while self.step > self.version + 2:
                    self.has_trained.clear()
                    await self.has_trained.wait()
                self.num_buffered -= BATCH
                self.dispatcher.batch_sent(self.step)
                sent.put_nowait(self.step)
                self.step += 1
                self.ends.append(asyncio.get_running_loop().time())
                self.dispatcher.wake()

        await self.dispatcher.close()
        for task in tasks:
            task.cancel()
        counts = self.dispatcher.counts
        ended = counts["finished"] + counts["failed"] + counts["cancelled"]
        assert counts["dispatched"] == ended + self.dispatcher.num_inflight

    def seconds_of_steps(self, first: int) -> list[float]:
        return [later - before for before, later in pairwise(self.ends[first:])]


def simulated(run: Run, steps: int) -> Run:
    with asyncio.Runner(loop_factory=Simulated) as runner:
        runner.run(run.go(steps))
    return run


def dead(timeout: float) -> Callable[[str, float], Outcome]:
    return lambda env, now: (0.05, True) if env == "sound" else (timeout, False)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(("lag", "timeout"), [(1, 300.0), (2, 3.0), (8, 3.0), (8, 60.0)])
def test_a_dead_env_costs_the_others_nothing_once_it_is_found(
    lag: int, timeout: float, alone: bool
) -> None:
    """Whatever its time-out: no batch waits for the group that asks."""
    run = simulated(Run(dead(timeout), lag=lag, alone=alone), steps=80)
    assert run.dispatcher.is_failing("other")
    seconds = run.seconds_of_steps(first=40)
    assert mean(seconds) == pytest.approx(TRAIN_SECONDS, rel=0.05)
    assert max(seconds) < 3 * TRAIN_SECONDS
    asking = [group for group in run.dispatcher._open.values() if group.env.name == "other"]
    assert len(asking) <= 1


@pytest.mark.parametrize("num_failures", [120, 1000])
def test_what_a_synchronous_run_requests_of_a_failing_env_depends_on_no_timing(
    num_failures: int,
) -> None:
    """Its batches are those of a run that is killed and resumed, so no count of what has come back
    may choose a group. Durations have a long tail."""

    def requested(seed: int) -> list[tuple[int, str]]:
        durations = random.Random(seed)
        started: Counter[str] = Counter()

        def outcome(env: str, now: float) -> Outcome:
            started[env] += 1
            works = env == "sound" or started[env] > num_failures
            return 0.01 * durations.paretovariate(1.1), works

        return simulated(Run(outcome, lag=0), steps=20).requested

    first = requested(seed=1)
    assert all(requested(seed) == first for seed in range(2, 12))


@pytest.mark.parametrize("lag", [1, 8])
def test_an_env_that_works_again_trains_again(lag: int) -> None:
    """Also one whose rollouts take longer than the versions that a group may be behind."""

    def outcome(env: str, now: float) -> Outcome:
        if env == "sound":
            return 0.05, True
        return (3.0, False) if now < 20 else (0.1, True)

    run = simulated(Run(outcome, lag=lag), steps=400)
    assert not run.dispatcher.is_failing("other")
    share = run.trained["other"] / run.trained.total()
    assert 0.15 < share < 0.5


def test_time_outs_that_come_back_last_do_not_make_an_env_fail(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Half of its rollouts time out, each handed on alone: they come back in a row, after newer
    ones that finished."""
    half = random.Random(1)

    def outcome(env: str, now: float) -> Outcome:
        times_out = env == "other" and half.random() < 0.5
        return (3.0, False) if times_out else (0.05 * (0.5 + half.random()), True)

    simulated(Run(outcome, alone=True, size=8), steps=80)
    assert "rollouts failed" not in caplog.text


@pytest.mark.parametrize("envs", [("other",), ("other", "another")], ids=["one", "both"])
@pytest.mark.parametrize("alone", [False, True])
def test_where_no_env_works_the_run_stays_within_its_bound(
    envs: tuple[str, ...], alone: bool
) -> None:
    """Two batches with one version of staleness, and one group of each env that asks."""

    def outcome(env: str, now: float) -> Outcome:
        return (1.0, False) if now < 50 else (0.05, True)

    run = simulated(Run(outcome, envs=envs, lag=1, alone=alone), steps=20)
    assert run.dispatcher.counts["dispatched"] > 3 * 64
    assert not any(run.dispatcher.is_failing(env) for env in envs)
    assert run.most_inflight <= 2 * BATCH + 4 * len(envs)


def test_a_run_that_waits_for_an_hour_looks_less_and_less_often() -> None:
    """Groups that age may change the leads. After 20 s of short steps, each rollout takes an hour.
    A look for each quarter of a step would be one every 25 ms, 144,000 in all."""
    run = Run(lambda env, now: (0.05 if now < 20 else 3600.0, True), envs=("sound",))
    measured_at: list[float] = []
    measure = run.dispatcher.admission.measure

    def measured(version: int, now: float) -> bool:
        measured_at.append(now)
        return measure(version, now)

    run.dispatcher.admission.measure = measured  # type: ignore[method-assign]
    simulated(run, steps=204)
    looks = [at for at in measured_at if 30 < at < 3600]
    assert 300 < len(looks) < 600
    # None is late by more than a 64th of the time that the run has waited.
    assert all(after - before < (after - 20) / 60 for before, after in pairwise(looks))
