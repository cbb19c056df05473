"""Rollouts in flight: paced, bounded, voided by group, each accounted for exactly once."""

import asyncio
import random
from contextlib import suppress
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import LIMIT

from prime_rl import RunError
from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.orchestrator.admission import inflight_limit
from prime_rl.orchestrator.dispatcher import Dispatcher
from prime_rl.testing import make_rollout


class World:
    """The engines and the buffer of a dispatcher; the test ends its rollouts."""

    def __init__(
        self, *, size=4, batch=8, lag=8, over=1.0, inflight=1000, max_steps=100, group=None
    ):
        self.version, self.step, self.num_buffered = 0, 1, 0
        self.stubborn = False  # rollouts that finish although they are cancelled
        self.batch_size = batch
        self.waiting: dict[tuple[int, int], asyncio.Future] = {}
        self.most_inflight = 0
        settings = OrchestratorConfig(
            batch_size=batch,
            max_off_policy_steps=lag,
            oversampling_factor=over,
            max_inflight_rollouts=inflight,
        )
        config = SimpleNamespace(orchestrator=settings, max_steps=max_steps)
        self.env = SimpleNamespace(
            name="e",
            group_size=size,
            source=SimpleNamespace(is_live=True),
            host=SimpleNamespace(agents=("agent",)),
        )
        engines = SimpleNamespace(policy=self, fleet=SimpleNamespace(asleep=False))
        self.dispatcher = Dispatcher(
            config, engines, self, [self.env], lambda: self.next_group(), self.run_rollout
        )

    def next_group(self):
        return self.env, 0

    @property
    def batch(self):
        return self  # that has the step

    async def run_rollout(self, group, index):
        future = asyncio.get_running_loop().create_future()
        self.waiting[group.group_id, index] = future
        self.most_inflight = max(self.most_inflight, self.dispatcher.num_inflight)
        try:
            return await future
        except asyncio.CancelledError:
            if self.stubborn:
                return [make_rollout(1.0)]
            raise
        finally:
            del self.waiting[group.group_id, index]

    async def __aenter__(self):
        self.task = asyncio.create_task(self.dispatcher.run())
        await settle()
        return self

    async def __aexit__(self, *exc):
        await self.dispatcher.close()
        self.task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await self.task

    async def end(self, group_id, *members):
        """End members: with a reward, None for a failure, or an exception."""
        for index, outcome in enumerate(members):
            future = self.waiting[group_id, index]
            if isinstance(outcome, BaseException):
                future.set_exception(outcome)
            elif outcome is None:
                future.set_result(None)
            else:
                future.set_result([make_rollout(outcome, group_id=group_id)])
        await settle()

    def balanced(self):
        counts = self.dispatcher.counts
        ended = counts["finished"] + counts["failed"] + counts["cancelled"]
        groups = self.dispatcher._open.values()  # what the counters stand for
        assert self.dispatcher.num_inflight == sum(group.num_inflight for group in groups)
        assert self.dispatcher.num_waiting == sum(group.size for group in groups)
        return counts["dispatched"] == ended + self.dispatcher.num_inflight

    @property
    def groups(self):
        return sorted({group for group, _ in self.waiting})


async def settle():
    for _ in range(6):
        await asyncio.sleep(0)


# -- groups ---------------------------------------------------------------------------------


async def test_a_group_is_handed_on_when_all_its_members_have_finished():
    async with World(size=2, batch=2, lag=0) as world:
        world.waiting[0, 1].set_result([make_rollout(1.0)])
        await settle()
        assert world.dispatcher.arrivals.empty()
        world.waiting[0, 0].set_result([make_rollout(2.0)])
        await settle()
        group = world.dispatcher.arrivals.get_nowait()
        assert [rollout.reward for rollout in group.survivors] == [2.0, 1.0]  # members' order


async def test_how_far_behind_rollouts_in_flight_are():
    async with World(size=2, batch=2, over=2.0) as world:
        await world.end(0, 1.0)  # one of the first group's two
        world.version = 2
        assert world.dispatcher.versions_behind[0] == 2
        behind = world.dispatcher.versions_behind
        assert len(behind) == world.dispatcher.num_inflight and set(behind) == {2}


async def test_an_episode_that_brings_several_rollouts_counts_as_several():
    async with World(size=2, batch=12, lag=0) as world:
        assert world.groups == [0, 1, 2, 3, 4, 5]  # one rollout a member, as far as it knows
        for member in (0, 1):
            three = tuple(make_rollout(1.0) for _ in range(3))
            world.waiting[0, member].set_result(three)
        await settle()
        group = world.dispatcher.arrivals.get_nowait()
        world.num_buffered += len(group.survivors)
        world.dispatcher.taken(group)
        assert world.dispatcher.room() == 12 - 6 - 5 * 2 * 3
        world.step, world.version, world.num_buffered = 2, 1, 0
        assert world.dispatcher.room() == 12 - 5 * 2 * 3


async def test_failed_members_make_a_smaller_group():
    async with World(size=3, batch=3, lag=0) as world:
        await world.end(0, 1.0, None, 0.5)
        group = world.dispatcher.arrivals.get_nowait()
        assert [rollout.reward for rollout in group.survivors] == [1.0, 0.5]
        assert group.num_failed == 1 and group.members[1] is None
        assert world.dispatcher.counts == {"dispatched": 3, "finished": 2, "failed": 1}


async def test_a_group_whose_members_all_failed_is_handed_on_empty():
    async with World(size=2, batch=2, lag=0) as world:
        await world.end(0, None, None)
        assert world.dispatcher.arrivals.get_nowait().survivors == []
        assert world.balanced()


async def test_several_rollouts_of_one_member_all_survive():
    async with World(size=1, batch=1, lag=0) as world:
        pair = (make_rollout(1.0), make_rollout(0.0))
        world.waiting[0, 0].set_result(pair)
        await settle()
        assert world.dispatcher.arrivals.get_nowait().survivors == list(pair)


# -- pace -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("lag", "batches"), [(0, 1), (1, 2), (8, 2)])
async def test_how_far_ahead_of_the_weights(lag, batches):
    """Version 0 samples batch 1, and batch 2 if that may be off-policy; no further
    one before a step was trained."""
    async with World(size=4, batch=8, lag=lag) as world:
        assert world.dispatcher.num_inflight == 8 * batches


async def test_a_new_version_and_a_shipped_batch_open_the_next():
    async with World(size=4, batch=8, lag=0) as world:
        world.step = 2
        world.dispatcher.wake()
        await settle()
        assert world.groups == [0, 1]  # version 0 may not sample batch 2
        world.version = 1
        world.dispatcher.wake()
        await settle()
        assert world.dispatcher.num_inflight == 8  # the two in flight count for batch 2 now
        for group in (0, 1):
            await world.end(group, 1.0, 1.0, 1.0, 1.0)
            world.dispatcher.taken(world.dispatcher.arrivals.get_nowait())
        await settle()
        assert world.groups == [2, 3]  # nothing of them was buffered: sampled again


async def test_buffered_rollouts_are_not_sampled_again():
    world = World(size=4, batch=8, lag=0)
    world.num_buffered = 4
    async with world:
        assert world.dispatcher.num_inflight == 4


async def test_an_arrived_group_counts_until_it_is_taken_in():
    """Neither in flight nor buffered yet, and still no other group takes its place."""
    async with World(size=4, batch=8, lag=0) as world:
        await world.end(0, 1.0, 1.0, 1.0, 1.0)
        world.dispatcher.wake()
        await settle()
        assert world.groups == [1]
        group = world.dispatcher.arrivals.get_nowait()
        world.dispatcher.wake()
        await settle()
        assert world.groups == [1]
        world.num_buffered = 4
        world.dispatcher.taken(group)
        await settle()
        assert world.groups == [1] and world.dispatcher.counts["dispatched"] == 8


async def test_finished_members_of_an_open_group_still_count():
    async with World(size=4, batch=8, lag=0) as world:
        world.waiting[0, 0].set_result([make_rollout(1.0)])
        await settle()
        assert world.dispatcher.counts["dispatched"] == 8


async def test_oversampling_opens_more_groups():
    async with World(size=4, batch=8, lag=0, over=1.5) as world:
        assert world.dispatcher.num_inflight == 12


async def test_oversampling_counts_what_the_batch_still_needs():
    world = World(size=4, batch=8, lag=0, over=2.0)
    world.num_buffered = 6  # two are missing, so four are asked for: one group
    async with world:
        assert world.dispatcher.num_inflight == 4
        world.num_buffered = 8
        assert world.dispatcher.room() <= 0


async def test_the_last_batch_is_the_last():
    async with World(size=4, batch=8, lag=8, max_steps=1) as world:
        assert world.dispatcher.num_inflight == 8
        world.step = 2
        assert world.dispatcher.room() == 0


async def test_rollouts_in_flight_exceed_the_bound_by_less_than_a_group():
    async with World(size=4, batch=64, lag=0, inflight=10) as world:
        assert world.dispatcher.num_inflight == 12


@pytest.mark.parametrize(
    ("configured", "capacities", "synchronous", "lead", "number", "reason"),
    [
        (5, [64], None, 1.0, 5, "orchestrator.max_inflight_rollouts"),
        (None, [64, 16], None, 4.0, 100, "2 engines run 80 at once, and 25% wait"),
        (None, [64, None], None, 1.0, 16, "two batches"),
        (None, [], None, 3.0, 32, "4.0 batches, by the durations of groups"),
        (None, [64], 8, 1.0, 8, "one batch, since max_off_policy_steps = 0"),
    ],
)
def test_how_many_rollouts_may_be_in_flight_and_why(
    configured, capacities, synchronous, lead, number, reason
):
    limit = inflight_limit(
        configured, capacities, synchronous=synchronous, batch_size=8, longest_lead=lead
    )
    assert (limit.number, limit.reason) == (number, reason)


# -- age ------------------------------------------------------------------------------------


async def test_a_batch_keeps_places_for_groups_that_no_later_batch_may_train():
    """Batch 2, version 1, lag 1: groups of version 0 are too old for batch 3. Batches of two groups
    of four."""
    async with World(size=4, batch=8, lag=1) as world:
        assert world.groups == [0, 1, 2, 3]
        world.step, world.version, ones = 2, 1, [1.0] * 4
        world.num_buffered = 4  # one place for a group, and groups 0 to 3 may fill it last now
        world.env.source.is_live = False
        await world.end(3, *ones)
        third = world.dispatcher.arrivals.get_nowait()
        assert third.group_id == 3  # it does not age
        world.env.source.is_live = True
        await world.end(2, *ones)
        await world.end(1, *ones)
        assert world.dispatcher.arrivals.empty()  # group 0 was requested before them
        await world.end(0, *ones)
        assert world.dispatcher.arrivals.empty()  # the batch is full with group 3
        world.dispatcher.taken(third)  # a filter dropped it: nothing was buffered
        await settle()
        assert world.dispatcher.arrivals.get_nowait().group_id == 0
        assert world.dispatcher.arrivals.empty()


# -- staleness ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lag", "version", "dropped"), [(0, 1, 8), (1, 1, 0), (1, 2, 8), (8, 8, 0)]
)
async def test_groups_too_old_for_the_coming_version_are_voided(lag, version, dropped):
    world = World(size=4, batch=8, lag=lag)
    world.num_buffered = 8 * (min(lag, 1))  # so that two groups are in flight, whatever the lead
    async with world:
        assert world.dispatcher.num_inflight == 8
        world.num_buffered = 1000
        assert (await world.dispatcher.drop_stale(version)).total() == dropped
        await settle()
        assert world.dispatcher.num_inflight == 8 - dropped
        assert world.dispatcher.counts["cancelled"] == dropped and world.balanced()
        assert world.dispatcher.cancelled["e"] == dropped


async def test_finished_members_of_a_voided_group_never_arrive():
    async with World(size=3, batch=3, lag=0) as world:
        world.waiting[0, 0].set_result([make_rollout(1.0)])
        await settle()
        world.num_buffered = 1000
        assert (await world.dispatcher.drop_stale(1)).total() == 3
        await settle()
        assert world.dispatcher.arrivals.empty()
        assert world.dispatcher.counts == {"dispatched": 3, "finished": 1, "cancelled": 2}


async def test_a_group_that_completes_while_others_are_voided_is_voided_too():
    world = World(size=1, batch=2, lag=0)
    async with world:
        world.num_buffered = 1000
        stubborn = world.waiting[1, 0]
        dropping = asyncio.create_task(world.dispatcher.drop_stale(1))
        await asyncio.sleep(0)
        if not stubborn.done():
            stubborn.set_result([make_rollout(1.0)])
        assert await dropping == {"e": 2}
        assert world.dispatcher.arrivals.empty() and world.balanced()


async def test_a_rollout_that_ignores_its_cancellation_does_not_revive_its_group():
    world = World(size=2, batch=2, lag=0)
    world.stubborn = True
    async with world:
        world.num_buffered = 1000
        assert (await world.dispatcher.drop_stale(1)).total() == 2
        await settle()
        assert world.dispatcher.arrivals.empty() and not world.task.done()
        assert world.dispatcher.counts == {"dispatched": 2, "finished": 2, "cancelled": 0}


async def test_closing_cancels_everything():
    async with World(size=4, batch=8, lag=0) as world:
        await world.dispatcher.close()
        assert not world.waiting and world.dispatcher.num_inflight == 0
        assert world.dispatcher.counts == {"dispatched": 8, "cancelled": 8}


# -- errors ---------------------------------------------------------------------------------


async def test_a_plugins_exception_ends_the_run():
    async with World(size=2, batch=2, lag=0) as world:
        await world.end(0, KeyError("judge"))
        with pytest.raises(KeyError, match="judge"):
            await asyncio.wait_for(world.task, LIMIT)


async def test_an_exhausted_sampler_ends_the_run():
    world = World()

    def exhausted():
        raise RunError("no examples left")

    world.next_group = exhausted
    with pytest.raises(RunError, match="no examples left"):
        await asyncio.wait_for(world.dispatcher.run(), LIMIT)


async def test_a_cancellation_from_inside_an_environment_ends_the_run():
    async with World(size=2, batch=2, lag=0) as world:
        world.waiting[0, 0].cancel()
        with pytest.raises(RunError, match="group 0 was cancelled from inside its environment"):
            await asyncio.wait_for(world.task, LIMIT)


# -- random events --------------------------------------------------------------------------


@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(0, 3), st.sampled_from([1.0, 1.5]))
def test_every_rollout_is_accounted_for_whatever_happens(seed, size, lag, over):
    """Random finishes, failures, versions, batches: nothing lost, nothing counted twice."""
    asyncio.run(random_events(random.Random(seed), size, lag, over))


async def random_events(chance, size, lag, over):
    bound = 3 * size
    world = World(size=size, batch=2 * size, lag=lag, over=over, inflight=bound)
    arrived = []
    async with world:
        for _ in range(60):
            event = chance.random()
            if event < 0.7 and world.waiting:
                future = world.waiting[chance.choice(list(world.waiting))]
                if not future.done():
                    failed = chance.random() < 0.3
                    future.set_result(None if failed else [make_rollout(1.0)])
            elif event < 0.85:
                await world.dispatcher.drop_stale(world.version + 1)
                world.version += 1
                world.step = max(world.step, world.version + 1)
                world.dispatcher.wake()
            elif world.num_buffered >= world.batch_size and world.step <= world.version + 1:
                world.num_buffered -= world.batch_size
                world.step += 1
                world.dispatcher.wake()
            await settle()
            while not world.dispatcher.arrivals.empty():
                group = world.dispatcher.arrivals.get_nowait()
                arrived.append(group.group_id)
                world.num_buffered += len(group.survivors)
                world.dispatcher.taken(group)
                await settle()  # the next one may fit now
            assert world.balanced()
    counts = world.dispatcher.counts
    assert world.most_inflight < bound + size
    assert len(arrived) == len(set(arrived))
    assert counts["dispatched"] == counts["finished"] + counts["failed"] + counts["cancelled"]
    assert world.dispatcher.requested.waiting == []
