"""``tasks_per_minute``: groups of an env that may begin in any 60 seconds."""

from __future__ import annotations

from itertools import cycle
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from test_dispatcher import World, settle

from prime_rl.orchestrator.admission.rate import RateLimit


@given(per_minute=st.integers(1, 7), gaps=st.lists(st.floats(0.0, 90.0), max_size=60))
def test_no_minute_has_more_and_none_waits_without_need(per_minute: int, gaps: list[float]) -> None:
    rate = RateLimit(per_minute)
    now = 0.0
    opened: list[float] = []
    for gap in gaps:
        now += gap
        recent = [at for at in opened if now - at < 60.0]
        wait = rate.wait(now)
        assert (wait == 0.0) == (len(recent) < per_minute)
        if wait:
            assert wait == 60.0 - (now - recent[0])
            continue
        rate.open(now)
        opened.append(now)
    for at in opened:
        assert sum(at - 60.0 < other <= at for other in opened) <= per_minute


def test_members_that_are_handed_on_alone_make_a_group_together() -> None:
    rate = RateLimit(1)
    for _ in range(3):
        assert rate.wait(0.0) == 0.0
        rate.open(0.0, 1 / 3)
    assert rate.wait(5.0) == 55.0


async def test_groups_beyond_the_rate_keep_their_place_and_open_later() -> None:
    clock = [0.0]
    async with limited(clock, per_minute=3, lag=2) as world:
        assert world.groups == [0, 1, 2]
        assert world.dispatcher.rate_limited == "e"
        clock[0] = 59.0
        world.dispatcher.wake()
        await settle()
        assert world.groups == [0, 1, 2]
        assert world.dispatcher._look_again() == 1.0
        clock[0] = 60.0
        world.dispatcher.wake()
        await settle()
        assert world.groups == [0, 1, 2, 3, 4, 5]
        assert world.balanced()


async def test_a_synchronous_run_keeps_its_order() -> None:
    """Whenever a group opens: the batch has the same groups in the same order."""
    clock = [0.0]
    async with limited(clock, per_minute=1, lag=0) as world:
        order = []
        for number in range(4):
            assert world.groups == [number]
            await world.end(number, 1.0, 0.0)
            group = world.dispatcher.arrivals.get_nowait()
            order.append(group.group_id)
            world.num_buffered += 2
            world.dispatcher.taken(group)
            clock[0] += 60.0
            world.dispatcher.wake()
            await settle()
        assert order == [0, 1, 2, 3] and not world.groups


async def test_of_two_envs_that_wait_the_first_that_may_open_is_looked_for() -> None:
    """``e`` may open in 10 seconds, and ``f`` in 30: whichever is chosen first."""
    for order in (("e", "f"), ("f", "e")):
        world = limited([0.0], per_minute=1, lag=2)
        other: Any = SimpleNamespace(**vars(world.env) | {"name": "f"})
        envs = {"e": world.env, "f": other}
        turns = cycle(order)
        world.next_group = lambda envs=envs, turns=turns: (envs[next(turns)], 0)  # type: ignore[method-assign]
        world.dispatcher._envs["f"] = other
        for name, opened_at in (("e", -50.0), ("f", -30.0)):
            rate = RateLimit(1)
            rate.open(opened_at)
            world.dispatcher._rates[name] = rate
        async with world:
            assert world.groups == []
            assert world.dispatcher.rate_limited == "e"


async def test_members_that_are_handed_on_alone_open_as_a_group() -> None:
    world = World(size=2, batch=8, lag=2, alone=True, env={"tasks_per_minute": 1})
    async with world:
        assert sorted(world.waiting) == [(0, 0), (0, 1)]


async def test_what_comes_first_opens_groups_again() -> None:
    async with limited([0.0], per_minute=3, lag=2) as world:
        leads = world.dispatcher.admission.leads
        for seconds, first in ((7.0, 7.0), (70.0, 60.0), (None, 60.0)):
            leads.look_again = seconds
            assert world.dispatcher._look_again() == first


def limited(clock: list[float], per_minute: int, lag: int) -> World:
    """A dispatcher with batches of four groups of two, on a clock of the test."""
    world = World(size=2, batch=8, lag=lag, env={"tasks_per_minute": per_minute})
    world.dispatcher._clock = lambda: clock[0]  # type: ignore[method-assign]
    return world
