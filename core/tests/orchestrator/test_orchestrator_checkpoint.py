"""The orchestrator's checkpoints: a resumed run requests the same groups, none skipped or twice."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import math
import shutil
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from disks import SharedDisk
from rotating import RotatingSampler
from waiting import LIMIT

from prime_rl import Observer, PluginConfig, Source
from prime_rl.config.run import RunConfig
from prime_rl.orchestrator.buffer import Buffer
from prime_rl.orchestrator.checkpoint import Checkpointing
from prime_rl.orchestrator.dispatcher import Dispatcher, Requested, RequestedGroup
from prime_rl.orchestrator.scoring import stamp
from prime_rl.orchestrator.sources import ExternalSource
from prime_rl.plugins.algorithm import Algorithm
from prime_rl.plugins.sampler import SampledEnv
from prime_rl.rundir.checkpoints import Checkpoint, complete, unfinished
from prime_rl.rundir.status import Status
from prime_rl.testing import make_rollout


class Remembers(Algorithm):
    """Has state: how many groups it has seen."""

    name = "remembers"

    def __init__(self) -> None:
        super().__init__(PluginConfig())
        self.seen = 0

    def save(self, directory: Path) -> None:
        (directory / "seen").write_text(str(self.seen))

    def load(self, directory: Path) -> None:
        self.seen = int((directory / "seen").read_text())


class NoOdd:
    """Drops groups with odd numbers from batches, if ``on``."""

    def __init__(self, on: bool) -> None:
        self.on = on

    def objectors(self, rollout: Any, group: Any) -> dict[str, str]:
        is_odd = self.on and rollout.group_id % 2
        return {"odd": f"group {rollout.group_id}"} if is_odd else {}


class World:
    """A small orchestrator: 5 examples each in two envs, groups of 2, batches of 4."""

    def __init__(
        self, lag: int = 1, names: tuple[str, ...] = ("a", "b"), drop_odd: bool = False
    ) -> None:
        self.lag, self.version = lag, 0
        self.freezes = True
        """Streams freeze when a group is scored: no plugin has ``score_batch``."""
        self.algorithms = [Remembers() for _ in names]
        self.envs = [
            SimpleNamespace(
                name=name,
                algorithm=algorithm,
                source=SimpleNamespace(is_live=True),
                group_size=2,
                limits=None,
                host=SimpleNamespace(agents=("agent",)),
            )
            for name, algorithm in zip(names, self.algorithms, strict=True)
        ]
        sampled = [SampledEnv(name, 5, None) for name in names]
        self.sampler = RotatingSampler(PluginConfig(), sampled, seed=7)
        self.buffer = Buffer(
            batch_size=4,
            max_off_policy_steps=lag,
            pre=NoOdd(False),
            post=NoOdd(drop_odd),
            max_empty_batches=5,
        )
        self.asked: list[tuple[int, str, int]] = []
        self.ready: dict[tuple[int, int], asyncio.Event] = {}
        config = RunConfig(
            model={"name": "m"},
            max_steps=100,
            orchestrator={
                "batch_size": 4, "max_off_policy_steps": lag, "max_inflight_rollouts": 100
            },
        )  # fmt: skip
        engines = SimpleNamespace(policy=self, fleet=SimpleNamespace(asleep=False, serving=[]))
        self.dispatcher = Dispatcher(
            config, engines, self.buffer, self.envs, self.next_group, self.run_rollout
        )
        self.state = Checkpointing(
            SimpleNamespace(config=config), self.sampler, self.envs, self.dispatcher, self.buffer
        )

    def next_group(self) -> tuple[Any, int]:
        index, example = self.sampler.next_example()
        return self.envs[index], example

    async def run_rollout(self, group: Any, index: int) -> list[Any]:
        if index == 0:
            self.asked.append((group.group_id, group.env.name, group.example_id))
        event = self.ready.setdefault((group.group_id, index), asyncio.Event())
        await event.wait()
        rollout = make_rollout(
            float(group.group_id),
            env=group.env.name,
            group_id=group.group_id,
        )
        rollout.example_id, rollout.policy_version = group.example_id, group.policy_version
        rollout.assign_advantages(0.5 + index)
        return [rollout]

    async def finish(self, *group_ids: int) -> None:
        """End groups, and take in those that are handed on."""
        for group_id in group_ids:
            for index in range(2):
                self.ready[group_id, index].set()
        await settle()
        while not self.dispatcher.arrivals.empty():
            group = self.dispatcher.arrivals.get_nowait()
            group.env.algorithm.seen += 1
            for rollout in group.survivors:
                if self.freezes:
                    rollout.freeze()
            self.buffer.add(group.survivors)
            self.dispatcher.taken(group)
        await settle()

    def save(self, directory: Path, step: int = 1) -> None:
        self.state.save(directory, step)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def running(world: World, story: Callable[[], Awaitable[None]]) -> None:
    task = asyncio.create_task(world.dispatcher.run())
    await settle()
    try:
        await story()
    finally:
        await world.dispatcher.close()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_a_resumed_run_requests_the_groups_in_flight_and_then_the_next(
    tmp_path: Path,
) -> None:
    """Groups 0 to 3 are requested; 0, 2 and 3 finish; batch 1 takes 0 and 2; 3 is buffered and 1 is
    still in flight."""
    first, part = World(), tmp_path / "orchestrator"

    async def until_the_checkpoint() -> None:
        assert [group_id for group_id, _, _ in first.asked] == [0, 1, 2, 3]
        await first.finish(0, 2, 3)
        batch = first.buffer.take()
        assert {rollout.group_id for rollout in batch.kept} == {0, 2}
        first.save(part)

    await running(first, until_the_checkpoint)
    straight = [first.sampler.next_example() for _ in range(12)]

    second = World()
    second.state.restore(part)
    second.buffer.batch.step, second.version = 2, 1
    assert [r.group_id for r, _ in second.buffer.buffered] == [3, 3]
    assert [algorithm.seen for algorithm in second.algorithms] == [
        algorithm.seen for algorithm in first.algorithms
    ]

    async def after_it() -> None:
        assert second.asked[0] == first.asked[1]  # the same number, so the same seeds
        assert [group_id for group_id, _, _ in second.asked] == [1, 4, 5]
        names = [second.envs[index].name for index, _ in straight]
        examples = [example for _, example in straight]
        assert [asked[1:] for asked in second.asked[1:]] == list(
            zip(names[:2], examples[:2], strict=True)
        )

    await running(second, after_it)


async def test_buffered_rollouts_are_restored_with_their_exact_credit_and_frozen(
    tmp_path: Path,
) -> None:
    first = World()

    async def story() -> None:
        await first.finish(0, 1, 2)
        first.buffer.take()
        first.save(tmp_path / "p")

    await running(first, story)
    second = World()
    second.state.restore(tmp_path / "p")
    before, after = first.buffer.buffered, second.buffer.buffered
    assert [r.group_id for r, _ in after] == [2, 2]
    for (old, _), (new, _) in zip(before, after, strict=True):
        assert np.array_equal(old.advantages, new.advantages) and new.advantages[0] > 0
        assert (new.env, new.example_id, new.policy_version, new.frozen) == (
            old.env,
            old.example_id,
            old.policy_version,
            True,
        )


async def test_rollouts_that_wait_for_score_batch_are_restored_open_with_their_assigned_weights(
    tmp_path: Path,
) -> None:
    first = World()
    first.freezes = False

    async def story() -> None:
        await first.finish(0, 1, 2)
        first.buffer.take()
        for rollout, _ in first.buffer.buffered:
            rollout.assign_weights("ce", np.full(rollout.num_trainable_tokens, 0.5))
        first.save(tmp_path / "p")

    await running(first, story)
    second = World()
    second.state.restore(tmp_path / "p")
    assert [r.group_id for r, _ in second.buffer.buffered] == [2, 2]
    for rollout, _ in second.buffer.buffered:
        assert not rollout.frozen and rollout.assigned == {"ce_weights"}
        rollout.assign_advantages(2 * rollout.advantages)
        stamp(rollout, "ce")
        assert set(rollout.samples[0].ce_weights) == {0.0, 0.5}  # not routed again: it was assigned


async def test_rollouts_dropped_before_the_next_batch_stay_on_record(
    tmp_path: Path,
) -> None:
    first = World(drop_odd=True)

    async def story() -> None:
        await first.finish(0, 2, 1)  # 0 and 2 are batch 1; 1 waits behind a full batch
        first.buffer.take()  # ... and is dropped on the way to batch 2
        first.save(tmp_path / "p")

    await running(first, story)
    second = World(drop_odd=True)
    second.state.restore(tmp_path / "p")
    dropped = second.buffer.batch.dropped
    seen = second.buffer.batch.seen
    assert [(r.group_id, dropped[id(r)]) for r in seen] == [(1, "post_batch_filters")] * 2
    assert list(second.buffer.batch.objections.values()) == [{"odd": "group 1"}] * 2
    assert second.buffer.num_buffered == 0


async def test_groups_that_arrived_and_were_not_taken_in_are_requested_again(
    tmp_path: Path,
) -> None:
    world = World()

    async def story() -> None:
        world.ready[0, 0].set()
        world.ready[0, 1].set()
        await settle()
        assert not world.dispatcher.arrivals.empty()
        assert [g.group_id for g in world.dispatcher.requested.waiting] == [0, 1, 2, 3]

    await running(world, story)


async def test_new_parts_start_afresh_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, part = World(), tmp_path / "p"

    async def story() -> None:
        await first.finish(0, 1)
        first.buffer.take()
        first.save(part)

    await running(first, story)
    progress = json.loads((part / "progress.json").read_text())
    progress["saved"]["algorithms/a"] = "other"
    (part / "progress.json").write_text(json.dumps(progress))
    second = World(names=("a", "c"))
    second.state.restore(part)
    assert [algorithm.seen for algorithm in second.algorithms] == [0, 0]
    assert "algorithms/a 'remembers' starts afresh: the checkpoint has 'other''s" in caplog.text
    assert "algorithms/c 'remembers' starts afresh: the checkpoint has none" in caplog.text
    gone = [w for w in progress["waiting"] if w["env"] == "b"]
    assert gone and f"{len(gone)} groups that were in flight are of envs that are gone" in (
        caplog.text
    )


async def test_with_staleness_0_groups_are_handed_on_in_the_order_they_were_opened() -> None:
    world = World(lag=0)

    async def story() -> None:
        assert [group_id for group_id, _, _ in world.asked] == [0, 1]
        for index in range(2):
            world.ready[1, index].set()
        await settle()
        assert world.dispatcher.arrivals.empty()
        for index in range(2):
            world.ready[0, index].set()
        await settle()
        arrivals = world.dispatcher.arrivals
        assert [arrivals.get_nowait().group_id for _ in range(2)] == [0, 1]

    await running(world, story)


async def test_with_staleness_1_groups_are_handed_on_when_they_are_complete() -> None:
    world = World(lag=1)

    async def story() -> None:
        for index in range(2):
            world.ready[1, index].set()
        await settle()
        assert world.dispatcher.arrivals.get_nowait().group_id == 1

    await running(world, story)


def test_a_resumed_dispatcher_saves_the_same_state_again() -> None:
    world = World()
    waiting = [RequestedGroup(4, "a", 3), RequestedGroup(7, "b", 1)]
    requested = Requested(9, waiting, {"a": 1.5})
    world.dispatcher.resume(requested)
    assert world.dispatcher.requested == requested


class Hears(Observer):
    """Keeps each complete checkpoint that it is told of, with the files it found in it."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, str, bool]] = []

    async def checkpoint_complete(self, step: int, folder: Path) -> None:
        self.heard.append((step, folder.name, Checkpoint(folder).is_whole))


class Deaf(Observer):
    def __init__(self) -> None:
        pass


async def begun(run_dir: Path, *steps: int, observer: Observer) -> Checkpointing:
    """Checkpoints of which the orchestrator has written its part."""
    state = World().state
    launch = SimpleNamespace(checkpoint=None, first_step=1)
    config = state.context.config
    state.context = SimpleNamespace(  # type: ignore[assignment]
        config=config, run_dir=run_dir, status=Status(None), launch=launch
    )
    state.observers = [observer]
    for step in steps:
        await state._write(step)
    return state


async def test_observers_hear_of_complete_checkpoints_in_order_and_of_no_other(
    tmp_path: Path,
) -> None:
    hears = Hears()
    state = await begun(tmp_path, 2, 4, 6, observer=hears)
    await state._look()
    assert hears.heard == []
    complete(tmp_path, 2)
    await state._look()
    assert hears.heard == [(2, "step_2", True)]

    shutil.rmtree(unfinished(tmp_path, 4).directory)  # the trainer has given it up
    complete(tmp_path, 6)
    await state._look()
    assert len(hears.heard) == 1  # one look that finds neither name may be in the midst of a rename
    await state._look()
    await state._look()
    assert hears.heard == [(2, "step_2", True), (6, "step_6", True)]


class Keeps(Source):
    """Has state, and keeps what it finds in each complete checkpoint."""

    name = "keeps"
    num_examples = 1

    def __init__(self) -> None:
        super().__init__(PluginConfig())
        self.saves = 0
        self.heard: list[str] = []

    def save(self, directory: Path) -> None:
        self.saves += 1
        (directory / "saves").write_text(f"{self.saves}")

    def checkpoint_complete(self, directory: Path) -> None:
        self.heard.append((directory / "saves").read_text())


async def test_a_source_hears_which_of_its_states_are_in_a_complete_checkpoint(
    tmp_path: Path,
) -> None:
    state = await begun(tmp_path, observer=Deaf())
    source = Keeps()
    state.envs[0].source = ExternalSource("a", SimpleNamespace(), source)  # type: ignore[arg-type]
    state._parts["sources/a"] = source
    for step in (2, 4, 6):
        await state._write(step)
    shutil.rmtree(unfinished(tmp_path, 2).directory)  # the trainer has given it up
    complete(tmp_path, 4)
    for _ in range(3):
        await state._look()
    assert source.heard == ["2"]
    made = complete(tmp_path, 6)
    state.context.launch = SimpleNamespace(checkpoint=made, first_step=7)  # type: ignore[misc]
    await state.before_training()
    assert source.heard == ["2", "3"]


async def test_a_source_whose_part_the_disk_refuses_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hears = Hears()
    state = await begun(tmp_path, observer=hears)
    source = Keeps()
    state.envs[0].source = ExternalSource("a", SimpleNamespace(), source)  # type: ignore[arg-type]
    state._parts["sources/a"] = source
    await state._write(2)
    complete(tmp_path, 2)
    is_dir = Path.is_dir

    def refused(path: Path) -> bool:
        if path.parent.name == "sources":
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return is_dir(path)

    monkeypatch.setattr(Path, "is_dir", refused)
    await state._look()
    assert source.heard == []
    assert [step for step, *_ in hears.heard] == [2]


async def test_a_checkpoint_that_replaces_another_is_announced_when_it_is_complete(
    tmp_path: Path,
) -> None:
    hears = Hears()
    state = await begun(tmp_path, 2, observer=hears)
    complete(tmp_path, 2)
    await state._look()
    await state._write(2)
    await state._look()
    assert len(hears.heard) == 1
    complete(tmp_path, 2)
    await state._look()
    assert len(hears.heard) == 2


async def test_a_run_waits_at_its_end_for_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prime_rl.orchestrator.checkpoint.LOOK_SECONDS", 0.001)
    hears = Hears()
    state = await begun(tmp_path, 3, observer=hears)
    waits = asyncio.create_task(state.settle(within=LIMIT))
    while state.context.status.last.waiting_for != "trainer (checkpoint of step 3)":
        await asyncio.sleep(0)
    complete(tmp_path, 3)
    await asyncio.wait_for(waits, LIMIT)
    assert hears.heard == [(3, "step_3", True)]


async def test_a_run_does_not_wait_for_a_trainer_that_does_nothing_nor_for_deaf_observers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    deaf = await begun(tmp_path, 3, observer=Deaf())
    await deaf.settle(within=math.inf)
    hears = await begun(tmp_path, 3, observer=Hears())
    assert caplog.text == ""
    await hears.settle(within=-1)
    assert "step 3: the checkpoint is not complete after -1 s" in caplog.text


async def test_a_trainer_that_works_is_waited_for_however_long_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prime_rl.orchestrator.checkpoint.LOOK_SECONDS", 0)
    hears = Hears()
    state = await begun(tmp_path, 3, observer=hears)
    Status(tmp_path / "status/trainer.json").report("waiting", waiting_for="disk (a checkpoint)")
    clock = itertools.count(0, 1000)
    fake = SimpleNamespace(monotonic=lambda: next(clock))
    monkeypatch.setattr("prime_rl.orchestrator.checkpoint.time", fake)
    looks = 0
    look = state._look

    async def counted() -> None:
        nonlocal looks
        looks += 1
        if looks == 20:
            complete(tmp_path, 3)
        await look()

    monkeypatch.setattr(state, "_look", counted)
    await state.settle(within=1500)
    assert hears.heard == [(3, "step_3", True)]


async def test_a_resumed_run_announces_the_checkpoint_that_it_resumes(tmp_path: Path) -> None:
    hears = Hears()
    state = await begun(tmp_path, 5, observer=hears)
    made = complete(tmp_path, 5)
    await state.before_training()
    assert hears.heard == []
    state.context.launch = SimpleNamespace(checkpoint=made, first_step=6)  # type: ignore[misc]
    await state.before_training()
    assert hears.heard == [(5, "step_5", True)]


async def test_a_stop_outlives_a_look_that_the_disk_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = await begun(tmp_path, 3, observer=Deaf())
    first = unfinished(tmp_path, 3).orchestrator / "of the first writing"
    first.touch()
    disk = SharedDisk(monkeypatch, unfinished(tmp_path, 3).orchestrator)
    write = state._write
    with disk.refusing() as answer:

        async def written(step: int) -> None:
            answer()
            await write(step)

        monkeypatch.setattr(state, "_write", written)
        await state.stopping(3)

    assert disk.refused == 1
    assert unfinished(tmp_path, 3).progress.exists() and not first.exists()
