"""The loop over several steps: real sampling, scoring, buffer, packer and watcher; a fake
environment, wire and engines."""

from __future__ import annotations

import asyncio
import json
import random
import selectors
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from prime_rl import (
    Algorithm,
    EngineError,
    Filter,
    Observer,
    PluginConfig,
    Rollout,
    RunError,
    StreamError,
    hookimpl,
)
from prime_rl.orchestrator.buffer import Buffer, FilterSlot
from prime_rl.orchestrator.context import Engines, Outages, RunContext
from prime_rl.orchestrator.dispatcher import Dispatcher
from prime_rl.orchestrator.loop import Orchestrator
from prime_rl.orchestrator.packer import Packer
from prime_rl.orchestrator.policy import Policy, WeightWatcher
from prime_rl.orchestrator.reporter import Reporter
from prime_rl.orchestrator.sampling import Sampling
from prime_rl.orchestrator.sources import RolloutRequest
from prime_rl.plugins.sampler import SampledEnv
from prime_rl.registry.manager import Hooks, scope
from prime_rl.rollout import Batch
from prime_rl.rundir.launch import Launch
from prime_rl.rundir.status import Status
from prime_rl.testing import make_rollout, make_sample
from prime_rl.wire.micro_batch import decode_batch
from prime_rl_app.config import build_config
from prime_rl_observers import watchdog
from prime_rl_samplers.standard import StandardSampler

STEPS = 3


class AboveMean(Algorithm):
    """Credit is the reward above the group's mean."""

    name = "above_mean"

    @hookimpl
    def score_group(self, group: Any) -> None:
        mean = sum(rollout.reward for rollout in group) / len(group)
        for rollout in group:
            rollout.assign_advantages(rollout.reward - mean)


class AtTheEnd(Algorithm):
    """All credit stands at the last token, as the reward of PPO does."""

    name = "at_the_end"

    @hookimpl
    def score_rollout(self, rollout: Rollout) -> None:
        credit = np.zeros(rollout.num_trainable_tokens)
        credit[-1] = 1 + rollout.reward
        rollout.assign_advantages(credit)


class Lengthens(AtTheEnd):
    """Appends a sample of seven tokens."""

    name = "lengthens"

    @hookimpl
    def score_rollout(self, rollout: Rollout) -> None:
        rollout.samples.append(make_sample(completion=5))
        rollout.assign_advantages(1.0)


class OverTheBatch(AboveMean):
    """Multiplies that by the number of rollouts of the batch. Lets others run in between."""

    name = "over_the_batch"

    def __init__(self, config: PluginConfig) -> None:
        super().__init__(config)
        self.batches: list[list[list[tuple[int, float]]]] = []

    @hookimpl
    async def score_batch(self, groups: Any) -> None:
        assert not any(rollout.frozen for group in groups for rollout in group)
        self.batches.append([[(r.group_id, r.reward) for r in group] for group in groups])
        for _ in range(20):
            await asyncio.sleep(0)
        for rollout in (rollout for group in groups for rollout in group):
            rollout.assign_advantages(rollout.advantages * sum(map(len, groups)))


class DropsRewardZero(Filter):
    """Of each group, the first."""

    name = "drops_reward_zero"

    @hookimpl
    def filter_rollout(self, rollout: Rollout) -> str | None:
        return None if rollout.reward else "zero"


class Waits(Algorithm):
    """Waits for a model that never answers."""

    name = "waits"

    @hookimpl
    async def score_group(self, group: Any) -> None:
        await asyncio.Event().wait()


class Rollouts:
    """An environment: rollouts of five tokens, with the member's number as reward."""

    is_live, whole_group, num_examples, is_ready = True, False, 10, True

    def __init__(self, produce: Callable[[RolloutRequest], Awaitable[None]] | None = None) -> None:
        self.asked: list[RolloutRequest] = []
        self._produce = produce

    async def produce(self, ask: RolloutRequest) -> Sequence[Any]:
        self.asked.append(ask)
        if self._produce is not None:
            await self._produce(ask)
        rollout = make_rollout(float(ask.member), env="e", group_id=ask.group_id)
        rollout.policy_version = ask.policy_version
        return [rollout]

    def observe(self, group: Any) -> None:
        pass


class Trainer:
    """The wire and the trainer: publishes a version for each batch."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.frames = run_dir, []
        self.credit: list[set[float]] = []
        """The distinct advantages of each step's sampled tokens."""

    async def send(self, step: int, frames: Sequence[bytes]) -> None:
        number, rows = decode_batch(frames[0])
        assert number == step
        self.frames.append((step, sum(map(len, rows))))
        self.credit.append({float(a) for row in rows for a in row.advantages[row.loss_mask]})
        if rows:
            folder = self.run_dir / "broadcasts" / f"step_{step}"
            folder.mkdir(parents=True)
            with (self.run_dir / "trainer.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "time": 0.0, "metrics": {"loss": 0.5}}) + "\n")
            (folder / "STABLE").touch()

    async def drain(self) -> None:
        pass


class Fleet:
    """Engines that load whatever is published."""

    asleep = False

    def __init__(self) -> None:
        self.loaded: list[int] = []

    async def update_weights(self, folder: Path, version: int) -> float:
        self.loaded.append(version)
        return 0.0


class Diary(Observer):
    """Records the calls of the loop, in order."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.scored: list[tuple[int, int]] = []

    async def before_training(self) -> None:
        self.lines.append("before")

    async def after_training(self) -> None:
        self.lines.append("after")

    async def stopping(self, last: int) -> None:
        self.lines.append(f"stopping {last}")

    async def batch_taken(self, batch: Batch) -> None:
        assert all(rollout.frozen for rollout in batch.kept)
        self.lines.append(f"taken {batch.step}")

    async def batch_leaves(self, step: int) -> None:
        self.lines.append(f"leaves {step}")

    def batch_sent(self, batch: Batch, frames: Sequence[bytes]) -> None:
        self.lines.append(f"sent {batch.step}")

    def group_scored(self, group: Any, version: int) -> None:
        self.scored.append((group[0].group_id, version))

    def version_served(self, version: int) -> None:
        self.lines.append(f"version {version}")

    def step_trained(self, step: int, metrics: Any) -> None:
        self.lines.append(f"trained {step} {metrics['loss']}")


class World:
    """A run of three batches of four rollouts, two to a group."""

    def __init__(
        self,
        run_dir: Path,
        produce: Any = None,
        algorithm: type = AboveMean,
        filters: Sequence[Filter] = (),
        max_steps: int = STEPS,
        seq_len: int = 64,
        **settings: Any,
    ) -> None:
        settings = {"batch_size": 4, "group_size": 2, "max_off_policy_steps": 0} | settings
        config = build_config(
            {
                "model": {"name": "m"},
                "max_steps": max_steps,
                "seq_len": seq_len,
                "orchestrator": {
                    **settings, "weights_timeout": 5, "train": {"env": [{"id": "e"}]},
                },
            }
        )  # fmt: skip
        launch = Launch(
            model_path="m", served_model_name="m", engine_urls=[], transport_type="zmq",
            transport_host="", transport_ports=[],
        )  # fmt: skip
        hooks = Hooks()
        self.context = RunContext(config, launch, run_dir, hooks, Status(None))
        self.fleet, self.trainer, self.diary = Fleet(), Trainer(run_dir), Diary()
        self.engines = Engines(self.fleet, Policy(0), Outages())  # type: ignore[arg-type]
        self.source, built = Rollouts(produce), algorithm(PluginConfig())
        env = SimpleNamespace(
            name="e", source=self.source, algorithm=built, hooks=scope("e", hooks, [built]),
            group_size=2, host=SimpleNamespace(agents=("agent",)),
        )  # fmt: skip
        sampler = StandardSampler(PluginConfig(), [SampledEnv("e", 10, None)], 0)
        slots = [
            FilterSlot("pre", hooks, []),
            FilterSlot("post", hooks, [(f, True) for f in filters]),
        ]
        size, lag = (settings[key] for key in ("batch_size", "max_off_policy_steps"))
        buffer = Buffer(
            batch_size=size, max_off_policy_steps=lag, pre=slots[0], post=slots[1],
            max_empty_batches=9,
        )  # fmt: skip
        reporter = Reporter(hooks, [])
        self.sampling = Sampling(
            self.context,
            self.engines,
            [env],
            sampler,
            buffer,
            [self.diary],  # type: ignore[list-item]
        )
        observers = [self.diary, reporter, self.sampling]
        weights = WeightWatcher(
            run_dir,
            self.engines.policy,
            self.fleet,
            observers,  # type: ignore[arg-type]
        )
        packer = Packer(config, 1, hooks, self.context.losses)
        self.loop = Orchestrator(
            self.context, self.sampling, buffer, packer, self.trainer, weights, observers
        )


async def test_every_step_goes_from_the_sampler_to_new_weights(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert await world.loop.run() is None
    assert world.trainer.frames == [(1, 20), (2, 20), (3, 20)]  # four rollouts of five tokens
    assert world.fleet.loaded == [1, 2, 3]
    events = ("taken {}", "leaves {}", "sent {}", "trained {} 0.5", "version {}")
    steps = [event.format(step) for step in (1, 2, 3) for event in events]
    assert world.diary.lines == ["before", *steps, "after"]
    assert world.diary.scored == [(group, group // 2) for group in range(6)]
    asked = [(ask.group_id, ask.example_id, ask.policy_version) for ask in world.source.asked[::2]]
    assert asked == [(0, 0, 0), (1, 1, 0), (2, 2, 1), (3, 3, 1), (4, 4, 2), (5, 5, 2)]
    assert world.sampling.dispatcher.num_inflight == 0


async def test_rollouts_are_cut_before_they_are_scored(tmp_path: Path) -> None:
    """Three of five tokens stay: the prompt and one sampled one, which gets the whole credit."""
    world = World(tmp_path, algorithm=AtTheEnd, seq_len=3)
    assert await world.loop.run() is None
    assert world.trainer.frames == [(1, 12), (2, 12), (3, 12)]
    assert world.trainer.credit == [{1.0, 2.0}] * 3
    assert world.sampling.take_metrics()["batch/truncated_samples"] == 12
    assert world.sampling.take_metrics()["batch/truncated_samples"] == 0


async def test_a_rollout_with_no_sampled_token_within_seq_len_has_failed(tmp_path: Path) -> None:
    world = World(tmp_path, algorithm=AtTheEnd, seq_len=2)
    with pytest.raises(RunError, match=r"left nothing to train .*failed"):
        await world.loop.run()
    assert not world.trainer.frames


async def test_a_sample_that_a_plugin_makes_too_long_is_refused(tmp_path: Path) -> None:
    world = World(tmp_path, algorithm=Lengthens, seq_len=6)
    with pytest.raises(StreamError, match=r"7 tokens, and seq_len is 6.*host\.seq_len"):
        await world.loop.run()


async def test_a_batch_is_scored_after_the_filters_and_leaves_with_that_credit(
    tmp_path: Path,
) -> None:
    """Each group of two has rewards 0 and 1, so credit -0.5 and 0.5; the first is dropped. A batch
    is four rollouts of reward 1, so their credit is 0.5 x 4."""
    world = World(tmp_path, algorithm=OverTheBatch, filters=[DropsRewardZero(PluginConfig())])
    assert await world.loop.run() is None
    assert world.trainer.credit == [{2.0}, {2.0}, {2.0}]
    (env,) = world.sampling.envs
    assert env.algorithm.batches == [  # type: ignore[attr-defined]
        [[(group, 1.0)] for group in range(first, first + 4)] for first in (0, 4, 8)
    ]
    assert [group for group, _ in world.diary.scored] == [*range(12)]


async def test_what_left_nothing_to_train_is_handed_to_the_observers(tmp_path: Path) -> None:
    class DropsAll(DropsRewardZero):
        @hookimpl
        def filter_rollout(self, rollout: Rollout) -> str | None:
            return "none is good"

    world, lost = World(tmp_path, filters=[DropsAll(PluginConfig())]), []
    world.diary.batch_lost = lost.append  # type: ignore[method-assign]
    with pytest.raises(RunError, match="left nothing to train"):
        await world.loop.run()
    (batch,) = lost
    assert batch.step == 1 and not batch.kept and len(batch.seen) == 36  # nine batches of four
    assert {batch.dropped[id(rollout)] for rollout in batch.seen} == {"post_batch_filters"}


async def test_a_stop_while_a_batch_is_scored_waits_for_its_credit(tmp_path: Path) -> None:
    stop = asyncio.get_running_loop().create_future()

    class Stops(OverTheBatch):
        @hookimpl
        async def score_batch(self, groups: Any) -> None:
            stop.done() or stop.set_result(None)
            await super().score_batch(groups)

    world = World(tmp_path, algorithm=Stops)
    assert await world.loop.run(stop) == 1
    assert world.trainer.credit == [{-2.0, 2.0}, set()]


async def test_a_stop_ends_with_the_batch_in_training(tmp_path: Path) -> None:
    stop = asyncio.get_running_loop().create_future()

    async def produce(ask: RolloutRequest) -> None:
        if ask.policy_version == 1:  # batch 1 is trained, batch 2 is being sampled
            stop.set_result(None) if not stop.done() else None
            await asyncio.Event().wait()

    world, asked = World(tmp_path, produce), []

    class Saves(Observer):
        async def stopping(self, last: int) -> None:
            waiting = world.sampling.dispatcher.requested.waiting
            asked.extend(group.group_id for group in waiting)

    world.loop.observers.append(Saves(PluginConfig(), None))  # type: ignore
    assert await world.loop.run(stop) == 1
    assert world.trainer.frames == [(1, 20), (2, 0)]  # an empty batch ends the training
    assert world.diary.lines[-1] == "stopping 1"
    assert asked == [2, 3]  # a resumed run asks for the groups in flight again
    assert world.sampling.dispatcher.num_inflight == 0


async def test_an_error_of_a_plugin_ends_the_run_with_that_error(tmp_path: Path) -> None:
    async def produce(ask: RolloutRequest) -> None:
        if ask.policy_version == 1:
            raise KeyError("oops")

    world = World(tmp_path, produce)
    with pytest.raises(KeyError, match="oops"):
        await world.loop.run()
    assert world.trainer.frames == [(1, 20)] and world.sampling.dispatcher.num_inflight == 0


@pytest.mark.parametrize("algorithm", [AboveMean, Waits])
async def test_an_engine_error_ends_the_run_whatever_the_loop_waits_for(
    tmp_path: Path, algorithm: type
) -> None:
    begun = asyncio.Event()

    async def produce(ask: RolloutRequest) -> None:
        begun.set()
        if algorithm is AboveMean:
            await asyncio.Event().wait()

    class Gone(Observer):
        async def run(self) -> None:
            await begun.wait()
            raise EngineError("no engine serves after 600 s")

    world = World(tmp_path, produce, algorithm)
    world.loop.observers.append(Gone(PluginConfig(), None))  # type: ignore
    with pytest.raises(EngineError, match="no engine serves"):
        await world.loop.run()


@pytest.mark.parametrize("part", ["run", "before_training", "after_training"])
async def test_a_cancellation_from_inside_an_observer_ends_the_run_with_an_error(
    tmp_path: Path, part: str
) -> None:
    async def cancelled(self: Observer) -> None:
        raise asyncio.CancelledError

    cancelled.__qualname__ = f"Bad.{part}"
    world = World(tmp_path)
    bad = type("Bad", (Observer,), {part: cancelled})
    world.loop.observers.append(bad(PluginConfig(), None))
    with pytest.raises(RunError, match=f"Bad.{part} was cancelled from inside"):
        await world.loop.run()


async def test_a_failed_look_for_a_stop_is_an_error_and_no_stop(tmp_path: Path) -> None:
    stop = asyncio.get_running_loop().create_future()
    stop.set_exception(OSError("stale file handle"))
    world = World(tmp_path, algorithm=Waits)
    with pytest.raises(OSError, match="stale file handle"):
        await world.loop.run(stop)


async def watched(world: World, monkeypatch: pytest.MonkeyPatch, looks: int = 20) -> None:
    """Run the watchdog for some looks of a second each, on a clock of its own."""
    monkeypatch.setattr(watchdog, "LOOK_SECONDS", 0)
    clock = iter(float(second) for second in range(10_000))
    host = SimpleNamespace(
        shared=SimpleNamespace(run=world.context, engines=world.engines),
        num_inflight=lambda: world.sampling.dispatcher.num_inflight,
        is_scoring=lambda: world.sampling.is_scoring,
    )
    watching = watchdog.Watchdog(PluginConfig(), host)  # type: ignore[arg-type]
    watching._clock = lambda: next(clock)  # type: ignore[method-assign]
    task = asyncio.create_task(watching.run())
    for _ in range(looks):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_watchdog_ends_a_run_in_which_nothing_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    world.context.status.report("sampling batch 5", waiting_for="trainer (weights of step 4)")
    with pytest.raises(RunError) as caught:
        await watched(world, monkeypatch)
    assert str(caught.value) == (
        "nothing has moved for 5 s (orchestrator.weights_timeout): sampling batch 5, waiting for "
        "trainer (weights of step 4). The engines have version 0. See logs/latest/trainer.log."
    )


@pytest.mark.parametrize("busy", ["scoring", "evaluating", "sampling", "loading", "training"])
async def test_the_watchdog_waits_while_work_is_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: str
) -> None:
    world = World(tmp_path)
    world.sampling.is_scoring = busy == "scoring"
    world.engines.policy.evaluated = 0.5 if busy == "evaluating" else None
    world.engines.policy.is_loading = busy == "loading"
    if busy == "sampling":
        monkeypatch.setattr(Dispatcher, "num_inflight", 1)
    if busy == "training":  # a step may take longer than orchestrator.weights_timeout
        trainer = Status(tmp_path / "status" / "trainer.json")
        trainer.report("training", step=4.0)
    await watched(world, monkeypatch)


# -- what trains is what was requested ------------------------------------------------------------


class Simulated(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next event: no test waits for it."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(selector := selectors.DefaultSelector())
        select = selector.select

        def jump(timeout: float | None = None) -> Any:
            assert timeout is not None, "nothing will ever happen"
            self.now += timeout
            return select(0)

        selector.select = jump  # type: ignore[method-assign]

    def time(self) -> float:
        return self.now


@pytest.mark.parametrize(("lag", "over"), [(1, 1.0), (2, 1.0), (1, 1.5)])
def test_the_lengths_that_train_are_those_that_were_requested(
    tmp_path: Path, lag: int, over: float
) -> None:
    """Lengths with a heavy tail: one in ten rollouts lasts longer than three steps of the trainer,
    one in a hundred longer than 20. Two-sample Kolmogorov-Smirnov test at the level 0.001."""
    chance, seconds = random.Random(0), []

    class Trains(Trainer):
        """One second for each batch."""

        free = 0.0

        async def send(self, step: int, frames: Sequence[bytes]) -> None:
            loop, send = asyncio.get_running_loop(), super().send
            self.free = max(self.free, loop.time()) + 1.0
            loop.call_at(self.free, lambda: loop.create_task(send(step, frames)))

    async def simulate() -> World:
        world = World(
            tmp_path, max_steps=60, batch_size=16, oversampling_factor=over,
            max_off_policy_steps=lag, max_inflight_rollouts=64,
        )  # fmt: skip
        trainer = Trains(tmp_path)
        world.loop.wire = trainer

        async def produce(ask: RolloutRequest) -> Sequence[Any]:
            seconds.append(min(0.5 * chance.paretovariate(1.3), 60.0))
            rollout = make_rollout(seconds[-1], env="e", group_id=ask.group_id)
            rollout.policy_version = ask.policy_version
            await asyncio.sleep(rollout.reward)
            return [rollout]

        world.source.produce = produce  # type: ignore[method-assign]
        world.diary.batch_sent = lambda batch, frames: trained.extend(batch.kept)  # type: ignore
        await world.loop.run()
        return world

    trained: list[Rollout] = []
    with asyncio.Runner(loop_factory=Simulated) as runner:
        world = runner.run(simulate())
    assert len(trained) == 60 * 16 and max(r.policy_version for r in trained) > 50
    both = np.array([rollout.reward for rollout in trained]), np.array(seconds)
    grid = np.sort(np.concatenate(both))
    below = [np.searchsorted(np.sort(lengths), grid, "right") / len(lengths) for lengths in both]
    sizes = len(trained), len(seconds)
    limit = 1.95 * (sum(sizes) / (sizes[0] * sizes[1])) ** 0.5
    assert np.abs(below[0] - below[1]).max() < limit
    if over == 1.0:
        assert sorted(r.reward for r in trained) == sorted(seconds)  # none was dropped
        assert world.sampling.dispatcher.counts["cancelled"] == 0
