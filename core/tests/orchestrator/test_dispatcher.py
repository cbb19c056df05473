"""Rollouts in flight: paced, bounded, voided by group, each accounted for exactly once."""

import asyncio
import gc
import math
import random
import weakref
from contextlib import suppress
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import LIMIT

from prime_rl import RunError
from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.orchestrator.admission.inflight import Demand, inflight_limit
from prime_rl.orchestrator.batch_size import BatchSize
from prime_rl.orchestrator.context import GroupLimits
from prime_rl.orchestrator.dispatcher import Dispatcher
from prime_rl.testing import make_rollout


class World:
    """The engines and the buffer of a dispatcher; the test ends its rollouts."""

    def __init__(
        self,
        *,
        size=4,
        batch=8,
        lag=8,
        over=1.0,
        inflight=1000,
        max_steps=100,
        alone=False,
        partial=None,
        env=None,
        seq_len=64,
        limits=None,
        wanted=None,
        **tables,
    ):
        self.version, self.step, self.num_buffered = 0, 1, 0
        self.stubborn = False  # rollouts that finish although they are cancelled
        self.batch_size = batch
        self.waiting: dict[tuple[int, int], asyncio.Future] = {}
        self.most_inflight = 0
        if "token_batch_size" not in tables:
            tables["batch_size"] = batch
        settings = OrchestratorConfig(
            **tables,
            max_off_policy_steps=lag,
            oversampling_factor=over,
            max_inflight_rollouts=inflight,
            group_size=size,
            partial_groups=partial,
            train={"env": [{"id": "e", **(env or {})}]},
        )
        config = SimpleNamespace(orchestrator=settings, max_steps=max_steps)
        self.env = SimpleNamespace(
            name="e",
            group_size=size,
            source=SimpleNamespace(is_live=True),
            limits=limits,
            host=SimpleNamespace(agents=("agent",)),
        )
        engines = SimpleNamespace(policy=self, fleet=SimpleNamespace(asleep=False, serving=[]))
        self.dispatcher = Dispatcher(
            config,
            engines,
            self,
            [self.env],
            lambda: self.next_group(),
            self.run_rollout,
            ["e"] if alone else [],
            BatchSize(settings.batch_size, tokens=settings.token_batch_size, longest=seq_len),
            wanted=wanted,
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
            if self.waiting.get((group.group_id, index)) is future:
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


async def test_groups_that_were_taken_or_voided_leave_the_memory():
    """Their durations are remembered, for the estimates, and not their rollouts."""
    async with World(size=2, batch=2, lag=1) as world:
        groups = [weakref.ref(group) for group in world.dispatcher._open.values()]
        await world.end(0, 1.0, 0.5)
        world.dispatcher.taken(world.dispatcher.arrivals.get_nowait())
        world.waiting[1, 0].set_result([make_rollout(1.0)])  # one of two, which is lost
        await settle()
        assert await world.dispatcher.drop_stale(2)
        await settle()
        gc.collect()
        assert len(groups) >= 2 and [group() for group in groups] == [None] * len(groups)


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


MIXED = {"a": Demand(rate=4.0, seconds=3.0), "b": Demand(rate=1.0, seconds=20.0)}


@pytest.mark.parametrize(
    ("configured", "capacities", "synchronous", "demands", "number", "reason"),
    [
        (5, [64], None, {}, 5, "orchestrator.max_inflight_rollouts"),
        (None, [64, 16], None, MIXED, 100, "2 engines run 80 at once, and 25% wait"),
        (None, [64], None, MIXED, 80, "1 engine runs 64 at once, and 25% wait"),
        (None, [64, None], None, {}, 16, "two batches"),
        (None, [], None, {"a": Demand(4.0, 0.5)}, 16, "two batches"),
        # 8 + 1.25 * (4 * 3 + 1 * 20) = 48
        (None, [], None, MIXED, 48, "a batch, b 1/s x 20 s + a 4/s x 3 s, and 25% wait"),
        (None, [64], 8, MIXED, 8, "one batch, since max_off_policy_steps = 0"),
    ],
)
def test_how_many_rollouts_may_be_in_flight_and_why(
    configured, capacities, synchronous, demands, number, reason
):
    limit = inflight_limit(
        configured, capacities, synchronous=synchronous, batch_size=8, demands=demands
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


# -- alone, and partial groups --------------------------------------------------------------


def arrived(world):
    """Group and members of what was handed on, in order."""
    groups = []
    while not world.dispatcher.arrivals.empty():
        group = world.dispatcher.arrivals.get_nowait()
        groups.append((group.group_id, sorted(group.members)))
        world.num_buffered += len(group.survivors)
        world.dispatcher.taken(group)
    return groups


async def test_a_rollout_that_needs_no_siblings_is_handed_on_as_it_ends():
    async with World(size=4, batch=8, lag=1, alone=True) as world:
        world.waiting[1, 2].set_result([make_rollout(1.0, group_id=1)])
        await settle()
        assert arrived(world) == [(1, [2])]
        world.waiting[0, 3].set_result(None)
        await settle()
        group = world.dispatcher.arrivals.get_nowait()
        assert group.num_failed == 1 and group.survivors == []
        assert world.balanced()


async def test_a_synchronous_run_hands_on_whole_groups_all_the_same():
    async with World(size=2, batch=2, lag=0, alone=True) as world:
        world.waiting[0, 0].set_result([make_rollout(1.0)])
        await settle()
        assert arrived(world) == []
        world.waiting[0, 1].set_result([make_rollout(1.0)])
        await settle()
        assert arrived(world) == [(0, [0, 1])]


async def test_a_resumed_run_requests_the_members_that_no_batch_has_got():
    async with World(size=3, batch=6, lag=1, alone=True) as world:
        world.waiting[0, 1].set_result([make_rollout(1.0)])
        await settle()
        assert arrived(world) == [(0, [1])]
        saved = world.dispatcher.requested
        waiting = set(world.waiting)
    again = World(size=3, batch=6, lag=1, alone=True)
    again.dispatcher.resume(saved)
    async with again:
        assert set(again.waiting) >= waiting and (0, 1) not in again.waiting
        assert again.dispatcher.requested.groups_opened >= saved.groups_opened


async def test_a_resumed_run_that_needs_siblings_now_waits_for_those_that_are_left():
    async with World(size=3, batch=3, lag=1, alone=True) as world:
        world.waiting[0, 1].set_result([make_rollout(1.0)])
        await settle()
        arrived(world)
        saved = world.dispatcher.requested
    again = World(size=3, batch=3, lag=1)
    again.dispatcher.resume(saved)
    async with again:
        for member in (0, 2):
            again.waiting[0, member].set_result([make_rollout(1.0)])
        await settle()
        assert arrived(again) == [(0, [0, 2])]


async def test_a_partial_group_is_handed_on_and_its_rest_is_a_group_of_its_own():
    """Two of four finish, and one fails before: the part has these three. A group is split once."""
    partial = {"at_least": 2, "rest": "group"}
    async with World(size=5, batch=5, lag=1, partial=partial) as world:
        await world.end(0, None, 1.0)
        assert arrived(world) == []
        world.waiting[0, 4].set_result([make_rollout(1.0)])
        await settle()
        assert arrived(world) == [(0, [0, 1, 4])]
        assert world.balanced()
        (rest,) = [each for each in world.dispatcher.requested.waiting if each.group_id == 0]
        assert rest.members == [2, 3]
        world.waiting[0, 3].set_result([make_rollout(1.0)])
        await settle()
        assert arrived(world) == []
        world.waiting[0, 2].set_result([make_rollout(1.0)])
        await settle()
        assert arrived(world) == [(0, [2, 3])] and world.balanced()


async def test_the_rest_of_a_partial_group_may_be_cancelled_and_is_counted():
    async with World(size=4, batch=4, lag=1, partial={"at_least": 3, "rest": "cancel"}) as world:
        await world.end(0, 1.0, 1.0, 1.0)
        group = world.dispatcher.arrivals.get_nowait()
        assert sorted(group.members) == [0, 1, 2] and group.num_cut_off == 1
        assert (0, 3) not in world.waiting
        assert world.dispatcher.counts["cancelled"] == 1 and world.dispatcher.cancelled["e"] == 1
        assert world.balanced()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"at_least": 7}, "leaves 1 of a group of 8, expected at least 2 with rest = 'group'"),
        ({"at_least": 8, "rest": "cancel"}, "leaves 0 of a group of 8, expected at least 1"),
        ({"at_least": 9, "rest": "cancel"}, "leaves 0 of a group of 8"),
        ({"at_least": 1}, "greater than or equal to 2"),
    ],
)
def test_a_partial_group_leaves_a_group(settings, reason):
    with pytest.raises(ValueError, match=reason):
        OrchestratorConfig(partial_groups=settings, train={"env": [{"id": "e"}]})


def test_a_synchronous_run_has_no_partial_groups():
    with pytest.raises(ValueError, match="at_least = 4 needs max_off_policy_steps >= 1"):
        OrchestratorConfig(partial_groups={"at_least": 4}, max_off_policy_steps=0)


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


@given(
    st.integers(0, 2**32),
    st.integers(1, 5),
    st.integers(0, 3),
    st.sampled_from([1.0, 1.5]),
    st.sampled_from(["whole", "alone", "group", "cancel"]),
)
def test_every_rollout_is_accounted_for_whatever_happens(seed, size, lag, over, handed_on):
    """Random finishes, failures, versions, batches: nothing lost, nothing counted twice."""
    asyncio.run(random_events(random.Random(seed), size, lag, over, handed_on))


async def random_events(chance, size, lag, over, handed_on):
    bound = 3 * size
    fits = lag > 0 and size >= 4
    partial = {"at_least": 2, "rest": handed_on} if handed_on in ("group", "cancel") else None
    world = World(
        size=size,
        batch=2 * size,
        lag=lag,
        over=over,
        inflight=bound,
        alone=handed_on == "alone",
        partial=partial if fits else None,
    )
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
                arrived += [(group.group_id, member) for member in group.members]
                world.num_buffered += len(group.survivors)
                world.dispatcher.taken(group)
                await settle()  # the next one may fit now
            assert world.balanced()
    counts = world.dispatcher.counts
    assert world.most_inflight < bound + size
    assert len(arrived) == len(set(arrived))
    assert counts["dispatched"] == counts["finished"] + counts["failed"] + counts["cancelled"]
    assert world.dispatcher.num_waiting == 0
    # Members of a group that are handed on alone open one after the other: some were not due yet.
    assert handed_on == "alone" or world.dispatcher.requested.waiting == []


# -- groups whose size a plugin decides -----------------------------------------------------------


class Grows:
    """Rounds of ``size`` until a member has a reward; ``early``: stops when one has."""

    def __init__(self, *, early=False):
        self.early = early
        self.asked: list[tuple[int, list[float], int]] = []

    def __call__(self, group):
        first = range(group.num_judged)
        rewards = [r.reward for number in first for r in group.members[number] or ()]
        size = len(group.requested)
        self.asked.append((group.num_judged, rewards, size))
        if any(rewards) and (self.early or group.num_judged == size):
            return group.num_judged
        return size + group.env.group_size if group.num_judged == size else size


def growing(*, most, trained=None, early=False, **settings):
    limits = GroupLimits(size=most, trained=trained or most)
    return World(limits=limits, wanted=Grows(early=early), **settings)


async def test_a_group_grows_until_it_is_useful():
    async with growing(size=2, most=6, batch=6, lag=0) as world:
        assert world.groups == [0]  # it keeps all six places
        await world.end(0, 0.0, 0.0)
        assert sorted(world.waiting) == [(0, 2), (0, 3)]
        world.waiting[0, 3].set_result([make_rollout(0.0)])
        await settle()
        assert world.dispatcher.arrivals.empty()
        world.waiting[0, 2].set_result([make_rollout(1.0)])
        await settle()
        group = world.dispatcher.arrivals.get_nowait()
        assert [rollout.reward for rollout in group.survivors] == [0.0, 0.0, 1.0, 0.0]
        assert world.dispatcher.counts["dispatched"] == 4
        assert world.groups == []  # its places are kept until it is taken in
        world.num_buffered += 4
        world.dispatcher.taken(group)
        await settle()
        assert world.groups == [1]


async def test_a_group_does_not_grow_beyond_its_limit():
    async with growing(size=2, most=3, batch=6, lag=0) as world:
        await world.end(0, 0.0, 0.0)
        assert (0, 2) in world.waiting and (0, 3) not in world.waiting
        world.waiting[0, 2].set_result(None)
        await settle()
        group = world.dispatcher.arrivals.get_nowait()
        assert len(group.survivors) == 2 and group.num_failed == 1


async def test_members_decide_in_the_order_of_their_numbers():
    """Member 1 has a reward first, and is left out all the same: member 0 is useful alone."""
    async with growing(size=3, most=3, early=True, batch=3, lag=0) as world:
        world.waiting[0, 1].set_result([make_rollout(1.0)])
        await settle()
        assert world.dispatcher._wanted.asked == []
        world.waiting[0, 0].set_result([make_rollout(1.0)])
        await settle()
        group = world.dispatcher.arrivals.get_nowait()
        assert [*group.members] == [0] and group.num_cut_off == 2
        assert world.waiting == {}
        assert world.dispatcher.counts["cancelled"] == 1
        assert world.balanced() and world.dispatcher.cancelled == {"e": 1}


async def test_places_are_kept_for_those_that_may_train():
    async with growing(size=2, most=8, trained=2, batch=6, lag=0) as world:
        assert world.groups == [0, 1, 2]
        await world.end(0, 0.0, 0.0)
        assert world.groups == [0, 1, 2]  # four of the first group, and no group more
        assert world.dispatcher.num_inflight == 6
        assert world.dispatcher.rollouts_per_group("e") == 2


async def test_what_a_group_has_not_used_is_free_for_others():
    async with growing(size=2, most=4, batch=8, lag=1) as world:
        before = world.dispatcher.counts["dispatched"]
        await world.end(0, 1.0, 0.0)
        group = world.dispatcher.arrivals.get_nowait()
        assert group.size == 2
        assert world.dispatcher.counts["dispatched"] == before + 2


async def test_further_members_wait_until_fewer_rollouts_are_in_flight():
    async with growing(size=2, most=6, trained=2, batch=4, lag=0, inflight=3) as world:
        assert world.groups == [0, 1]  # the last group may go beyond the limit
        await world.end(0, 0.0, 0.0)
        assert sorted(world.waiting) == [(0, 2), (1, 0), (1, 1)]
        await world.end(1, 1.0)
        assert sorted(world.waiting) == [(0, 2), (0, 3), (1, 1)]
        assert world.balanced()


async def test_a_stale_group_is_cancelled_with_members_that_wait():
    async with growing(size=2, most=6, trained=2, batch=4, lag=1, inflight=3) as world:
        await world.end(0, 0.0, 0.0)
        (group,) = world.dispatcher._growing.values()
        assert (group.group_id, group.unstarted) == (0, [3])
        world.version = 2
        lost = await world.dispatcher.drop_stale(2)
        await settle()
        assert lost["e"] >= 4 and not world.dispatcher._growing
        assert 0 not in world.groups  # and none of its waiting members begins
        assert world.balanced()


@pytest.mark.parametrize(("inflight", "bound"), [(None, math.inf), (20, 20)])
async def test_a_limit_that_follows_the_lead_does_not_bound_it(inflight, bound):
    async with World(inflight=inflight) as world:
        assert world.dispatcher.limit.follows_lead == (inflight is None)
        assert world.dispatcher.admission.most_inflight == bound


async def test_a_resumed_run_lets_groups_grow_anew():
    async with growing(size=2, most=6, batch=6, lag=0) as world:
        await world.end(0, 0.0, 0.0)
        requested = world.dispatcher.requested
        assert [(group.group_id, group.members) for group in requested.waiting] == [(0, None)]
    again = growing(size=2, most=6, batch=6, lag=0)
    again.dispatcher.resume(requested)
    async with again:
        assert sorted(again.waiting) == [(0, 0), (0, 1)]


@given(
    rewards=st.lists(st.sampled_from([0.0, 0.0, 1.0, None]), min_size=12, max_size=12),
    order=st.randoms(use_true_random=False),
    early=st.booleans(),
    lag=st.sampled_from([0, 1, 4]),
)
@settings(max_examples=40, deadline=None)
def test_groups_do_not_depend_on_the_order_in_which_members_end(rewards, order, early, lag):
    """Each of three groups has the members that its first ones call for, and all are counted."""

    async def ended(shuffle):
        sizes = {}
        async with growing(size=2, most=4, early=early, batch=12, lag=lag) as world:
            while world.waiting and len(sizes) < 3:
                open_now = [key for key in world.waiting if key[0] < 3]
                if not open_now:
                    break
                key = order.choice(open_now) if shuffle else min(open_now)
                reward = rewards[key[0] * 4 + key[1]]
                done = None if reward is None else [make_rollout(reward, group_id=key[0])]
                world.waiting[key].set_result(done)
                await settle()
                assert world.balanced()
                while not world.dispatcher.arrivals.empty():
                    group = world.dispatcher.arrivals.get_nowait()
                    sizes[group.group_id] = sorted(group.members)
        return sizes

    assert asyncio.run(ended(True)) == asyncio.run(ended(False))


# -- envs that fail -------------------------------------------------------------------------


async def fail_groups(world, number, finished=0):
    """The next groups come back: their first ``finished`` members finish, all others fail."""
    for _ in range(number):
        group_id = world.groups[0]
        size = world.env.group_size
        await world.end(group_id, *[1.0] * finished, *[None] * (size - finished))
        while not world.dispatcher.arrivals.empty():
            world.dispatcher.taken(world.dispatcher.arrivals.get_nowait())
        await settle()


async def test_an_env_fails_once_64_rollouts_in_a_row_have_failed(caplog):
    async with World(size=8, batch=16, lag=4) as world:
        assert world.dispatcher.is_asked("e")
        await fail_groups(world, 7)
        assert not world.dispatcher.is_failing("e")
        await fail_groups(world, 1)
        assert world.dispatcher.is_failing("e")
        assert "env 'e': the last 64 rollouts failed" in caplog.text
        await fail_groups(world, 3)
        assert caplog.text.count("rollouts failed") == 1
        await fail_groups(world, 1, finished=1)  # one of eight is enough
        assert not world.dispatcher.is_failing("e")
        await fail_groups(world, 7)
        assert not world.dispatcher.is_failing("e")


async def test_no_env_fails_in_a_synchronous_run():
    async with World(size=8, batch=16, lag=0) as world:
        await fail_groups(world, 12)
        assert not world.dispatcher.is_failing("e")


async def test_members_that_a_plugin_left_out_have_not_failed():
    async with World(size=2, batch=2, lag=4) as world:
        for _ in range(40):
            group_id = world.groups[0]
            for member in (0, 1):
                world.waiting[group_id, member].set_result([])
            await settle()
            world.dispatcher.taken(world.dispatcher.arrivals.get_nowait())
            await settle()
        assert not world.dispatcher.is_failing("e")
