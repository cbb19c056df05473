"""The loop over several steps: real sampling, scoring, buffer, packer and watcher; a fake
environment, wire and engines."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from simulated_run import AboveMean, Simulated, TimedTrainer, World

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
from prime_rl.orchestrator.admission.inflight import Demand
from prime_rl.orchestrator.sampling import Sampling
from prime_rl.orchestrator.sources import RolloutRequest
from prime_rl.testing import make_rollout, make_sample
from prime_rl.wire import decode_batch


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
    waits = world.context.waited.take()
    assert {"wait/orchestrator/trainer_room", "wait/orchestrator/inference"} <= waits.keys()


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
    reason = "no sampled token is among the first 2 (seq_len)"
    assert sorted(world.source.fates[:2]) == [(0.0, reason), (1.0, reason)]


async def test_a_source_hears_once_what_became_of_each_of_its_rollouts(tmp_path: Path) -> None:
    """The sampler rejects every second group."""
    world = World(tmp_path)
    world.sampling.sampler.reject = (  # type: ignore[method-assign]
        lambda group: "dull" if group[0].group_id % 2 else None
    )
    assert await world.loop.run() is None
    groups = [[(0.0, reason), (1.0, reason)] for reason in (None, "dull") * 6]
    fates = world.source.fates
    assert fates == [fate for group in groups for fate in group][: len(fates)]
    assert fates.count((0.0, None)) == 6


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


async def test_the_status_says_how_many_may_be_in_flight_and_why_and_how_long_the_last_pause_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, max_off_policy_steps=8)
    world.fleet.serving = [
        SimpleNamespace(
            client=SimpleNamespace(last_paused=seconds, health=SimpleNamespace(capacity=None))
        )
        for seconds in (0.25, 0.5, None)
    ]
    world.sampling.dispatcher.admission.leads._demands = {"e": Demand(rate=2.0, seconds=10.0)}
    world.sampling.dispatcher.admission.leads._step_seconds = 2.0
    world.sampling.dispatcher.admission.leads.by_durations = {"e": 5.0}
    world.sampling.dispatcher.admission.leads.reach.limit = 8.0
    reports: list[dict[str, Any]] = []
    monkeypatch.setattr(
        world.context.status, "report", lambda text, **detail: reports.append(detail)
    )
    world.sampling.report()
    # A batch of 4, and 1.25 * 2 * 10
    assert reports[0]["inflight_limit"] == "29 (a batch, e 2/s x 10 s, and 25% wait)"
    assert reports[0]["last_pause"] == "0.375 s"


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


async def test_a_stop_reaches_every_rank_once_the_last_version_is_published(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    calls: list[tuple[str, int, int]] = []

    async def send(step: int, frames: Sequence[bytes]) -> None:
        assert all(decode_batch(frame) == (step, []) for frame in frames)
        calls.append(("send", step, len(frames)))

    async def drain(*version: int) -> None:
        calls.append(("drain", *version, 0) if version else ("sent", 0, 0))

    loop: Any = world.loop
    launch = msgspec.structs.replace(loop.context.launch, num_ranks=3)
    loop.context = replace(loop.context, launch=launch)
    loop.wire = SimpleNamespace(send=send, drain=drain)
    loop.weights = SimpleNamespace(drain=drain)
    loop.buffer.batch.step = 2  # batch 1 was sent
    assert await loop._end_early() == 1
    assert calls == [("drain", 1, 0), ("send", 2, 3), ("sent", 0, 0)]


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


# -- what trains is what was requested ------------------------------------------------------------


@pytest.mark.parametrize(("lag", "over"), [(1, 1.0), (2, 1.0), (1, 1.5)])
def test_the_lengths_that_train_are_those_that_were_requested(
    tmp_path: Path, lag: int, over: float
) -> None:
    """Lengths with a heavy tail: one in ten rollouts lasts longer than three steps of the trainer,
    one in a hundred longer than 20. Two-sample Kolmogorov-Smirnov test at the level 0.001."""
    chance, seconds = random.Random(0), []

    async def simulate() -> World:
        world = World(
            tmp_path, max_steps=60, batch_size=16, oversampling_factor=over,
            max_off_policy_steps=lag, max_inflight_rollouts=64,
        )  # fmt: skip
        world.loop.wire = TimedTrainer(tmp_path, seconds=1.0)

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


async def test_observers_hear_how_many_rollouts_of_each_env_new_weights_made_too_old() -> None:
    lost: list[tuple[str, str, int]] = []

    async def drop_stale(version: int) -> dict[str, int]:
        return {"a": 3, "b": 1} if version == 7 else {}

    listener = SimpleNamespace(rollouts_lost=lambda *more: lost.append(more))
    sampling = Sampling.__new__(Sampling)
    sampling.dispatcher = SimpleNamespace(drop_stale=drop_stale)  # type: ignore[assignment]
    sampling._installed = [listener]  # type: ignore[list-item]
    await sampling.version_pending(7)
    assert lost == [("a", "cancelled", 3), ("b", "cancelled", 1)]
