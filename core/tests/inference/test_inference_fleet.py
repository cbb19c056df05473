"""Engines come and go: groups stay together, no request is lost, no engine serves old weights."""

import asyncio
import itertools
import logging
import re
import time
from collections import Counter
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp import web
from fleets import Engine, fleet_of, serving
from waiting import LIMIT, Clock, skipping, until

from prime_rl import EngineError
from prime_rl.errors import EngineGone
from prime_rl.inference import client, timing
from prime_rl.inference import engine as engine_module
from prime_rl.inference import fleet as fleet_module
from prime_rl.inference import pool as pool_module
from prime_rl.inference.client import EngineFailed, EngineSilent
from prime_rl.inference.engine import EngineState
from prime_rl.inference.pool import GivenUp
from prime_rl.weights.versions import Weights


@pytest.fixture(autouse=True)
def grace(monkeypatch):
    """All that can serve do when a test begins; 0: the first to serve waits for no other."""
    monkeypatch.setattr(timing, "START_GRACE", LIMIT)
    return lambda seconds: monkeypatch.setattr(timing, "START_GRACE", seconds)


@pytest.fixture
def clock(monkeypatch):
    """The fleet's: an engine is silent for as long as a test says."""
    clock = Clock()
    for module in (fleet_module, pool_module, engine_module):
        monkeypatch.setattr(module, "time", clock)
    return clock


# -- routing -----------------------------------------------------------------------------------


async def test_groups_stay_together_and_are_spread_over_the_engines():
    seen, release = [], asyncio.Event()

    async def work(held, group):
        seen.append((group, held.number))
        await release.wait()

    async with fleet_of(Engine(), Engine()) as fleet:
        asks = [fleet.ask(g, lambda e, g=g: work(e, g)) for g in range(6) for _ in range(4)]
        tasks = [asyncio.create_task(each) for each in asks]
        await until(lambda: len(seen) == 24)
        assert [each.running for each in fleet.engines] == [12, 12]
        release.set()
        await asyncio.gather(*tasks)
        homes = {group: {number for g, number in seen if g == group} for group in range(6)}
        assert all(len(numbers) == 1 for numbers in homes.values())
        # A turn later the group is still at home.
        assert await fleet.ask(3, lambda e: asyncio.sleep(0, e.number)) in homes[3]
        assert [each.running for each in fleet.engines] == [0, 0]


async def test_a_new_group_goes_where_the_least_is_in_flight():
    async with fleet_of(Engine(), Engine(), Engine()) as fleet:
        for each, running in zip(fleet.engines, (5, 2, 3), strict=True):
            each.running = running
        assert await fleet.ask("new", lambda e: asyncio.sleep(0, e.number)) == 1


async def test_requests_in_flight_at_a_dead_engine_are_repeated_elsewhere(caplog):
    engines = Engine(), Engine()
    attempts, cancelled = Counter(), []

    async def work(held, number):
        attempts[number] += 1
        try:
            await asyncio.sleep(60 if held.number == 0 else 0)
        except asyncio.CancelledError:
            cancelled.append(number)
            raise
        return number

    async with fleet_of(*engines) as fleet:
        asks = [fleet.ask(n, lambda e, n=n: work(e, n)) for n in range(8)]
        tasks = [asyncio.create_task(each) for each in asks]
        await until(lambda: fleet.engines[0].running > 0)
        held = fleet.engines[0].running
        with caplog.at_level(logging.WARNING):
            engines[0].away = True
            assert sorted(await asyncio.gather(*tasks)) == list(range(8))
        assert len(cancelled) == fleet.engines[0].retried == held > 0
        assert sum(attempts.values()) == 8 + held
        assert not any(engine.flights for engine in fleet.engines)
        # It may go between the two requests of one look.
        asked = r"/(health|v1/models)"
        assert re.search(rf"engine {fleet.urls[0]} did not answer {asked}: ", caplog.text)
        assert f"{held} in flight there are lost" in caplog.text


async def test_a_bug_that_ends_the_look_at_one_engine_reaches_the_next_request(monkeypatch):
    """Else the other engine serves on, and nobody sees that the first one has left."""
    asked = []
    with suppress(ValueError):  # the fleet's own task may have met it too, and ends with it
        async with fleet_of(Engine(), Engine()) as fleet:
            looks = iter([ValueError("a bug")])
            look = fleet._look

            async def fails_once(engine):
                for error in looks:
                    raise error
                return await look(engine)

            monkeypatch.setattr(fleet, "_look", fails_once)
            await until(lambda: any(task.done() for task in fleet._watching.values()))
            with pytest.raises(ValueError, match="a bug"):
                await fleet.ask(0, lambda engine: asyncio.sleep(0))
            asked.append(True)
    assert asked


async def test_a_request_that_fails_at_a_live_engine_is_repeated_four_times():
    calls = []

    async def work(held):
        calls.append(held.number)
        raise EngineFailed("out of luck", 500)

    async with fleet_of(Engine(), poll=0.001) as fleet:
        with pytest.raises(GivenUp, match="a request failed 5 times: out of luck"):
            await fleet.ask(0, work)
        assert len(calls) == 5 and fleet.engines[0].retried == 0


async def test_a_request_that_fails_while_the_network_does_waits_until_the_engine_answers():
    """The engine keeps its state meanwhile, since its process may be fine."""
    engine, calls = Engine(), []

    async def work(held):
        calls.append(held.number)
        if len(calls) == 8:
            engine.dropped = 0
        if engine.dropped:
            raise EngineFailed("the connection ended", 500)
        return "answer"

    async with fleet_of(engine, poll=0.001) as fleet:
        engine.dropped = 10**9
        assert await fleet.ask(0, work) == "answer"
        assert len(calls) == 8 and fleet.engines[0].retried == 0


async def test_a_request_that_fails_at_an_engine_is_repeated_at_another_one():
    async def work(held):
        if held.number == 0:
            raise EngineFailed("overloaded", 503)
        return held.number

    async with fleet_of(Engine(), Engine(), poll=0.001) as fleet, asyncio.timeout(30):
        assert await fleet.ask(0, lambda e: asyncio.sleep(0, e.number)) == 0
        assert await fleet.ask(0, work) == 1
        assert len(fleet.serving) == 2
        assert await fleet.ask(0, lambda e: asyncio.sleep(0, e.number)) == 1  # its new home


async def test_errors_of_work_are_raised_and_cancelling_a_request_cancels_its_work():
    ended = []

    async def broken(held):
        raise ValueError("a bug")

    async def long(held):
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async with fleet_of(Engine()) as fleet:
        with pytest.raises(ValueError, match="a bug"):
            await fleet.ask(0, broken)
        asking = asyncio.create_task(fleet.ask(0, long))
        await until(lambda: fleet.engines[0].running == 1)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert ended == [True] and fleet.engines[0].running == 0


# -- coming and going -------------------------------------------------------------------------


async def test_a_late_engine_does_not_delay_the_start_and_joins_with_the_current_weights(
    grace,
):
    grace(0)
    late = Engine()
    late.away = True
    async with fleet_of(Engine(), late) as fleet:
        assert [each.serving for each in fleet.engines] == [True, False]
        await fleet.update_weights(Path("v1"), 1)
        assert late.calls == []
        late.away = False
        await until(lambda: fleet.engines[1].serving)
        assert late.calls == ["/pause", "/update_weights", "/resume"]
        assert (late.version, late.loaded) == (1, "v1")


@asynccontextmanager
async def joining(version):
    """A fleet of two engines, and the first, which was away when ``version`` was published: it is
    back and loads it until ``hold`` is set."""
    engine = Engine()
    async with fleet_of(engine, Engine()) as fleet:
        engine.away = True
        await until(lambda: not fleet.engines[0].serving)
        await fleet.update_weights(Path(f"v{version}"), version)
        engine.hold.clear()
        engine.restart(version=0)
        await until(lambda: "/update_weights" in engine.calls)
        yield fleet, engine


async def test_engines_join_and_leave_and_requests_follow_them():
    """What is in flight at one that leaves is asked again; without any, requests wait."""
    first, second = Engine(), Engine()
    held, free = asyncio.Event(), asyncio.Event()

    async def work(engine):
        if engine.number == 0:
            held.set()
            await free.wait()
        return engine.number

    async with fleet_of(first) as fleet, serving(second) as url:
        await fleet.update_weights("v3", 3)
        asked = asyncio.create_task(fleet.ask("group", work))
        await held.wait()
        fleet.follow([fleet.urls[0], url], ["inference", "inference_1"])
        await until(lambda: len(fleet.serving) == 2)
        assert (second.version, second.loaded) == (3, "v3")
        assert fleet.names[url] == "inference_1"
        fleet.follow([url])
        assert await asked == 1 and [engine.url for engine in fleet.engines] == [url]
        fleet.follow([])
        waits = []
        fleet.on_waiting = waits.append
        asked = asyncio.create_task(fleet.ask("group", work))
        await until(lambda: waits == ["all engines have left: one has to join"])
        first.version = 0  # it was started again
        fleet.follow([fleet.urls[0]])
        free.set()
        assert await asked == 0 and first.version == 3


async def test_an_engine_that_comes_back_gets_no_request_before_it_has_the_current_weights():
    async with joining(version=3) as (fleet, engine):
        asked = [await fleet.ask(n, lambda e: asyncio.sleep(0, e.number)) for n in range(4)]
        assert asked == [1, 1, 1, 1]
        engine.hold.set()
        await until(lambda: fleet.engines[0].serving)
        assert (engine.version, fleet.engines[0].version) == (3, 3)


@asynccontextmanager
async def waiting(clock):
    """The same after version 2: the engine has loaded version 1, for 10 seconds."""
    async with joining(version=1) as (fleet, engine):
        await fleet.update_weights(Path("v2"), 2)
        clock.now += 10
        engine.hold.set()
        await until(lambda: fleet.engines[0].state is EngineState.WAITING)
        await engine.looked_at()
        assert (engine.version, engine.calls.count("/update_weights")) == (1, 1)
        yield fleet, engine


async def test_an_engine_that_has_missed_a_version_loads_the_next_one_with_the_others(clock):
    """Steps that are shorter than loading would keep it out for ever."""
    async with waiting(clock) as (fleet, engine):
        asked = [await fleet.ask(n, lambda e: asyncio.sleep(0, e.number)) for n in range(4)]
        assert asked == [1, 1, 1, 1]
        before = fleet.engines[0].session
        await fleet.update_weights(Path("v3"), 3)
        assert [each.serving for each in fleet.engines] == [True, True]
        assert (engine.version, engine.loaded, fleet.engines[0].down > 0) == (3, "v3", True)
        assert fleet.engines[0].session is before
        assert engine.calls.count("/update_weights") == 2


async def test_an_engine_that_has_missed_a_version_loads_it_if_no_other_comes(clock):
    async with waiting(clock) as (fleet, engine):
        clock.now += 21  # more than twice the time that it took
        await until(lambda: fleet.engines[0].serving)
        assert (engine.version, engine.loaded) == (2, "v2")
        assert engine.calls.count("/update_weights") == 2


async def test_an_engine_that_waits_loads_the_current_version_if_it_is_alone(clock):
    """No rollouts, so no next version."""
    async with waiting(clock) as (fleet, engine):
        url, _ = fleet.urls
        assert fleet.outage() == f"engine {url} waits for the next weights"
        engine.hold.clear()
        fleet.follow([url])
        await until(lambda: engine.calls.count("/update_weights") == 2)
        assert fleet.outage() == f"engine {url} loads weights"
        engine.hold.set()
        await until(lambda: fleet.serving)
        assert (engine.version, engine.loaded) == (2, "v2")


async def test_an_engine_that_refuses_the_version_it_has_waited_for_stays_out(clock):
    async with waiting(clock) as (fleet, engine):
        engine.refuse["/update_weights"] = 400
        await fleet.update_weights(Path("v3"), 3)
        assert [each.serving for each in fleet.engines] == [False, True]
        assert fleet.engines[0].state is EngineState.AWAY
        engine.refuse.clear()
        clock.now += 21
        await until(lambda: fleet.engines[0].serving)
        assert engine.version == 3


async def test_an_engine_that_ends_while_it_waits_is_another_one_when_it_comes_back(clock):
    async with waiting(clock) as (fleet, engine):
        before = fleet.engines[0].session
        engine.away = True
        await until(lambda: fleet.engines[0].state is EngineState.STARTING)
        await fleet.update_weights(Path("v3"), 3)
        engine.restart(version=0)
        await until(lambda: fleet.engines[0].serving)  # at once: it has not failed
        assert engine.version == 3 and fleet.engines[0].session is not before


async def test_an_engine_that_ends_while_it_waits_sleeps_at_once_when_it_comes_back(clock):
    """The trainer needs its memory."""
    async with waiting(clock) as (fleet, engine):
        engine.away = True
        await until(lambda: fleet.engines[0].state is EngineState.STARTING)
        await fleet.sleep()
        engine.restart(version=0)
        await until(lambda: fleet.engines[0].state is EngineState.ASLEEP)
        assert engine.calls[-2:] == ["/pause", "/sleep"]


async def test_an_engine_that_waits_sleeps_with_the_others(clock):
    async with waiting(clock) as (fleet, engine):
        await fleet.sleep()
        await until(lambda: fleet.engines[0].state is EngineState.ASLEEP)
        await fleet.update_weights(Path("v3"), 3)
        assert [each.serving for each in fleet.engines] == [True, True]
        assert engine.version == 3


async def test_a_restart_between_two_looks_is_detected():
    engine = Engine()
    async with fleet_of(engine) as fleet:
        await fleet.update_weights(Path("v1"), 1)
        engine.calls.clear()
        engine.restart(version=0)
        await until(lambda: engine.version == 1)
        assert engine.calls[:2] == ["/pause", "/update_weights"]


async def test_an_engine_that_pauses_itself_samples_until_its_weights_change():
    engine, other = Engine(), Engine()
    engine.pauses_itself = True
    async with fleet_of(engine, other) as fleet:
        await fleet.update_weights(Path("v1"), 1)
        assert engine.calls == ["/update_weights", "/resume"]
        assert other.calls == ["/pause", "/update_weights", "/resume"]
        await fleet.sleep()
        await fleet.update_weights(Path("v2"), 2)
        assert engine.calls[2:] == ["/pause", "/sleep", "/wake_up", "/update_weights", "/resume"]


async def test_the_seconds_for_which_an_update_pauses_the_engines_are_counted(monkeypatch):
    """The clock ticks once per look. An engine that pauses itself says how long; of another one,
    the time between the answers of ``/pause`` and ``/resume`` counts."""
    clock = itertools.count()
    monkeypatch.setattr(client, "time", SimpleNamespace(
        perf_counter=lambda: float(next(clock)), monotonic=time.monotonic
    ))  # fmt: skip
    own, other = Engine(), Engine()
    own.pauses_itself = True
    own.paused_seconds = 0.5
    async with fleet_of(own) as fleet:
        await fleet.update_weights(Path("v1"), 1)
        await fleet.update_weights(Path("v2"), 2)
        assert fleet.take_paused() == 1.0
        assert fleet.take_paused() == 0.0
        assert fleet.engines[0].client.last_paused == 0.5
        await fleet.sleep()
        await fleet.update_weights(Path("v3"), 3)
        assert fleet.take_paused() >= 1.0  # from waking on, whatever it says of the weights
    async with fleet_of(other) as fleet:
        await fleet.update_weights(Path("v1"), 1)
        assert fleet.take_paused() == 1.0
    quiet = Engine()
    quiet.pauses_itself = True  # and it does not say for how long: at most the whole update
    async with fleet_of(quiet) as fleet:
        await fleet.update_weights(Path("v2"), 2)
        assert fleet.take_paused() == 1.0
    async with fleet_of(Engine(), Engine()) as fleet:
        fleet.engines[0].client._paused = 3.0
        fleet.engines[1].client._paused = 1.0
        assert fleet.take_paused() == 2.0


async def test_our_own_engines_have_their_first_weights_and_others_get_them_pushed():
    for own, calls in ((True, []), (False, ["/pause", "/update_weights", "/resume"])):
        engine = Engine(version=7)
        async with fleet_of(engine, own=own, first=Weights(Path("model"), 7)):
            assert engine.calls == calls
    assert engine.loaded == "model"


async def test_our_own_that_were_started_with_a_base_get_the_adapter_they_lack():
    """Of step 4; without it they have version 0. One that does not tell its version gets it too."""
    for version in (0, None):
        engine = Engine(version=version)
        first = Weights(Path("adapter"), 4)
        async with fleet_of(engine, first=first, have_first=False):
            assert (engine.version, engine.loaded) == (4, "adapter")
            assert engine.calls == ["/pause", "/update_weights", "/resume"]


async def test_our_own_that_do_not_tell_their_version_have_what_they_were_started_with():
    engine = Engine(version=None)
    async with fleet_of(engine):
        assert engine.calls == []


async def test_an_engine_that_stays_silent_is_away_after_a_while(impatient, clock):
    mute = Engine()
    async with fleet_of(mute, Engine()) as fleet:
        held = fleet.engines[0]
        mute.mute = True
        await until(lambda: mute.muted)
        assert held.serving  # it may be busy
        await until(passing(clock, lambda: not held.serving))
        assert (held.state, held.reason) == (
            EngineState.AWAY,
            f"engine {fleet.urls[0]} did not answer /health within 0.2 s",
        )


class Discreet(Engine):
    """It does not say its version."""

    version = property(lambda self: None, lambda self, version: None)


async def test_a_look_whose_connection_ends_loses_no_request_however_often():
    engine, begun = Engine(), []
    async with fleet_of(engine) as fleet:

        async def episode(held):
            begun.append(held)
            await asyncio.sleep(60)

        asking = asyncio.create_task(fleet.ask(0, episode))
        await until(lambda: begun)
        for _ in range(timing.LOST_TRIES + 1):
            engine.dropped = 1
            await until(lambda: not engine.dropped)
            await engine.looked_at(2)
        assert fleet.engines[0].serving and len(begun) == 1 and not asking.done()
        asking.cancel()


async def test_an_engine_whose_connections_keep_ending_is_away_after_a_while(clock):
    engine = Engine()
    async with fleet_of(engine) as fleet:
        (held,) = fleet.engines
        engine.dropped = 10**9
        looked = engine.dropped
        await until(lambda: engine.dropped < looked - 3)
        assert held.serving
        await until(passing(clock, lambda: not held.serving))
        assert held.state is EngineState.AWAY
        engine.dropped = 0
        await until(lambda: held.serving)
        assert engine.calls == []  # by its version it is the same process


async def test_an_engine_that_tells_no_version_loads_the_weights_after_a_connection_that_ended():
    """It may be another process by now, behind the same address."""
    engine = Discreet()
    async with fleet_of(engine) as fleet:
        engine.dropped = 1
        await until(lambda: engine.calls)
        await until(lambda: fleet.serving)
        assert engine.calls == ["/pause", "/update_weights", "/resume"]


async def test_while_no_engine_serves_requests_wait_and_the_run_says_what_for():
    engine, said = Engine(), []
    async with fleet_of(engine) as fleet:
        fleet.on_waiting = said.append
        engine.away = True
        await until(lambda: not fleet.serving)
        asking = asyncio.create_task(fleet.ask(0, lambda e: asyncio.sleep(0, "answer")))
        await until(lambda: said)
        looked_at = fleet.engines[0].looked_at
        await until(lambda: fleet.engines[0].looked_at > looked_at)
        assert not asking.done()
        assert said[-1].startswith(f"engine {fleet.urls[0]} did not answer")
        engine.away = False
        assert await asking == "answer"
        assert said[-1] is None


async def test_when_no_engine_has_served_for_too_long_the_run_ends_and_names_them_all():
    engines = Engine(), Engine()
    async with fleet_of(*engines, timeout=0.1) as fleet:
        for engine in engines:
            engine.away = True
        with pytest.raises(EngineError) as caught:
            await fleet.keeping
    message = str(caught.value)
    assert message.startswith("no engine serves after 0 s (inference.ready_timeout): ")
    assert all(url in message for url in fleet.urls) and "inference*.log" in message


async def test_a_start_without_engines_ends_with_their_names_and_the_fix():
    engine = Engine()
    engine.away = True
    async with fleet_of(engine, ready=False, own=False) as fleet:
        with pytest.raises(EngineError, match=r"no engine serves .* fix inference\.base_url"):
            await fleet.wait_ready(0.3)


async def test_a_start_where_no_engine_takes_the_key_ends_at_once_and_says_so(grace):
    grace(0)
    locked, open_ = Engine(), Engine()
    locked.refuse["/pause"] = 403
    async with fleet_of(locked, ready=False, own=False) as fleet:
        with pytest.raises(EngineError, match=r"refused /pause: 403 .*inference\.admin_key_var"):
            await fleet.wait_ready(LIMIT)
    async with fleet_of(locked, open_, own=False) as fleet:  # ready without the one
        assert [each.serving for each in fleet.engines] == [False, True]


async def test_a_start_where_a_foreign_engine_serves_another_model_ends_at_once():
    for engines in ([Engine(model="x")], [Engine(), Engine(model="x")]):
        async with fleet_of(*engines, ready=False, own=False) as fleet:
            with pytest.raises(EngineError) as caught:
                await fleet.wait_ready(LIMIT)
            said = f"engine {fleet.urls[-1]} serves 'x', expected 'm' (model.name). Name the"
            assert str(caught.value).startswith(said)
    async with fleet_of(Engine(model="x"), ready=False) as fleet:  # our own may be starting
        with pytest.raises(EngineError, match="no engine serves after"):
            await fleet.wait_ready(0.2)


# -- hanging ----------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch):
    """Little is waited for an engine that says nothing. One that is only slow to answer counts as
    silent too, but for no longer than the test's clock says."""
    monkeypatch.setattr("prime_rl.inference.timing.HEALTH_SECONDS", 0.2)


def passing(clock, condition):
    """``condition``, for which time passes."""

    def holds():
        clock.now += 1
        return condition()

    return holds


async def test_an_engine_that_answers_nothing_for_long_hangs_until_it_answers(impatient, clock):
    engine, seen = Engine(), []
    async with fleet_of(engine, hang_timeout=10) as fleet:
        (held,) = fleet.engines
        fleet.on_change = lambda: seen.append((held.state, held.hangs))
        engine.mute = True
        await until(lambda: engine.muted)
        assert held.serving
        await until(passing(clock, lambda: held.state is EngineState.HUNG))
        assert seen[-1] == (EngineState.HUNG, 1)
        engine.mute = False
        await until(lambda: held.serving)
        assert (EngineState.STARTING, 1) in seen and seen[-1] == (EngineState.SERVING, 1)
        engine.mute = True
        await until(passing(clock, lambda: held.hangs == 2))


@pytest.mark.parametrize("alone", [True, False])
def test_a_silent_engine_keeps_its_requests_where_no_other_could_take_them(clock, alone):
    """It compiles, or a long call keeps its loop: after ``hang_timeout`` it is restarted."""
    engine = engine_module.Replica(0, SimpleNamespace(asleep=False, url="u"))
    engine.state = EngineState.SERVING
    engine.heard_at = engine.ready_at = clock.now
    silent = EngineSilent("engine u did not answer /health within 10 s")
    clock.now += timing.PATIENCE_SECONDS + 1
    after = EngineState.SERVING if alone else EngineState.AWAY
    assert engine.after(silent, hang_timeout=300, alone=alone) is after
    assert engine.after(EngineFailed("503"), 300, alone=alone) is EngineState.AWAY
    clock.now += 600
    engine.state, engine.heard_at = EngineState.SERVING, clock.now - 301
    assert engine.after(silent, hang_timeout=300, alone=alone) is EngineState.HUNG


async def test_a_restarted_engine_does_not_hang_before_it_has_served(impatient, clock):
    """It may be loading: a process that has ended must not get the next one ended."""
    engine = Engine()
    async with fleet_of(engine, hang_timeout=10) as fleet:
        (held,) = fleet.engines
        engine.away = True
        await until(lambda: held.state is EngineState.STARTING)
        engine.away, engine.mute = False, True
        await until(lambda: engine.muted)
        clock.now += 11
        await until(lambda: engine.muted > 1 and held.looked_at == clock.now)
        assert held.state is EngineState.STARTING and held.hangs == 0
        engine.mute = False
        await until(lambda: held.serving)
        engine.mute = True
        await until(passing(clock, lambda: held.state is EngineState.HUNG))


async def test_an_engine_that_sleeps_does_not_hang(impatient, clock):
    engine = Engine()
    async with fleet_of(engine, hang_timeout=10) as fleet:
        (held,) = fleet.engines
        await fleet.sleep()
        engine.mute = True
        await until(lambda: engine.muted)
        clock.now += timing.PATIENCE_SECONDS + 11
        await until(lambda: engine.muted > 1 and held.looked_at == clock.now)
        assert held.state is EngineState.ASLEEP


async def test_an_engine_that_says_that_it_is_not_ready_is_away_and_does_not_hang(clock):
    engine = Engine()
    async with fleet_of(engine, hang_timeout=10) as fleet:
        (held,) = fleet.engines
        engine.refuse["/health"] = 503
        await until(passing(clock, lambda: not held.serving))
        assert (held.state, held.reason) == (
            EngineState.AWAY,
            f"engine {fleet.urls[0]} refused /health: 503 loading",
        )
        clock.now += 11
        await until(lambda: held.looked_at == clock.now)
        assert held.state is EngineState.AWAY


async def test_an_engine_that_never_answers_an_update_hangs_though_it_is_healthy(
    monkeypatch,
):
    monkeypatch.setattr(timing, "UPDATE_SECONDS", 0.1)
    engine = Engine()
    async with fleet_of(engine) as fleet:
        engine.hold.clear()
        with pytest.raises(EngineGone):
            await fleet.update_weights(Path("v1"), 1)
        assert fleet.engines[0].hangs == 1


async def test_an_engine_that_answers_nothing_hangs_also_while_weights_wait_for_it(
    impatient, clock
):
    engine = Engine()
    async with fleet_of(engine, hang_timeout=10) as fleet:
        (held,) = fleet.engines
        engine.mute = True
        updating = asyncio.create_task(fleet.update_weights(Path("v1"), 1))
        await until(passing(clock, lambda: held.state is EngineState.HUNG))
        assert not updating.done()  # it has timeouts of its own
        updating.cancel()
        engine.mute = False
        with suppress(asyncio.CancelledError):
            await updating


# -- weights ----------------------------------------------------------------------------------


async def test_an_update_reaches_every_replica():
    engines = Engine(), Engine(), Engine()
    async with fleet_of(*engines) as fleet:
        assert await fleet.update_weights(Path("v1"), 1) > 0
        assert [engine.version for engine in engines] == [1, 1, 1]
        assert engines[2].calls == ["/pause", "/update_weights", "/resume"]


async def test_an_update_continues_without_an_engine_that_dies_in_it_and_says_so(caplog):
    engines = Engine(), Engine()
    async with fleet_of(*engines, poll=LIMIT) as fleet:  # after the first look, none
        engines[0].away = True
        with caplog.at_level(logging.WARNING):
            await fleet.update_weights(Path("v1"), 1)
        assert [each.serving for each in fleet.engines] == [False, True]
        assert "did not answer /pause" in caplog.text


@pytest.fixture
def hurried(monkeypatch):
    """An engine is a straggler a little after the others."""
    monkeypatch.setattr(timing, "STRAGGLER_SECONDS", 0.05)
    monkeypatch.setattr(timing, "STRAGGLER_FACTOR", 1.0)


async def test_a_straggler_is_taken_out_and_joins_when_it_is_done(hurried):
    engines = Engine(), Engine()
    async with fleet_of(*engines) as fleet:
        engines[0].hold.clear()
        await fleet.update_weights(Path("v1"), 1)
        assert [each.serving for each in fleet.engines] == [False, True]
        assert fleet.engines[0].reason.endswith("is late with new weights that others have loaded")
        assert await fleet.ask(0, lambda e: asyncio.sleep(0, e.number)) == 1
        await until(lambda: len(engines[0].calls) == 2)
        await engines[0].looked_at()
        assert engines[0].calls == ["/pause", "/update_weights"]  # it is not asked twice
        engines[0].hold.set()
        await until(lambda: fleet.engines[0].serving)
        assert engines[0].calls == ["/pause", "/update_weights", "/resume"]


async def test_what_an_engine_says_while_it_loads_weights_is_not_used(hurried, monkeypatch):
    """A look that began before the straggler was done reports the version before."""
    engines = Engine(), Engine()
    async with fleet_of(*engines) as fleet:
        straggler, look = fleet.engines[0], fleet.engines[0].client.look
        engines[0].hold.clear()
        await fleet.update_weights(Path("v1"), 1)
        await until(lambda: "/update_weights" in engines[0].calls)
        looking, released = asyncio.Event(), asyncio.Event()

        async def slow_look(model=None):
            health = await look(model)
            looking.set()
            await released.wait()
            return health

        monkeypatch.setattr(straggler.client, "look", slow_look)
        await looking.wait()
        engines[0].hold.set()
        await until(lambda: straggler.version == 1 and not straggler.loading.locked())
        released.set()
        await until(lambda: straggler.serving)
        assert engines[0].calls.count("/update_weights") == 1


async def test_a_straggler_loads_what_was_published_meanwhile_before_it_serves(hurried):
    engines = Engine(), Engine()
    async with fleet_of(*engines) as fleet:
        engines[0].hold.clear()
        await fleet.update_weights(Path("v1"), 1)
        await until(lambda: "/update_weights" in engines[0].calls)
        await fleet.update_weights(Path("v2"), 2)
        served = []
        fleet.on_change = lambda: served.extend(e.version for e in fleet.serving if not e.number)
        engines[0].hold.set()
        await until(lambda: fleet.engines[0].serving)
        assert engines[0].loaded == "v2" and set(served) == {2}


async def test_an_engine_alone_is_no_straggler(monkeypatch):
    monkeypatch.setattr(timing, "STRAGGLER_SECONDS", 0.0)
    engine = Engine()
    async with fleet_of(engine) as fleet:
        engine.hold.clear()
        updating = asyncio.create_task(fleet.update_weights(Path("v1"), 1))
        await until(lambda: "/update_weights" in engine.calls)
        await engine.looked_at()
        assert not updating.done()
        engine.hold.set()
        await updating
        assert fleet.serving


def test_a_straggler_takes_ten_times_what_the_slowest_success_took_and_failures_set_no_pace(
    monkeypatch,
):
    clock = Clock()
    monkeypatch.setattr(timing, "STRAGGLER_SECONDS", 0.0)
    monkeypatch.setattr(fleet_module, "time", clock)

    async def failing():
        raise EngineError("no")

    async def waited(*tasks):
        began = clock.now
        tasks = [asyncio.ensure_future(task) for task in tasks]
        await fleet_module.all_but_stragglers(tasks)
        done = [task.done() for task in tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return done, pytest.approx(clock.now - began)

    async def main():
        sleep = asyncio.sleep
        assert await waited(sleep(2), sleep(10), sleep(3600)) == ([True, True, False], 100)
        assert await waited(failing(), sleep(20)) == ([True, True], 20)
        assert await waited(failing(), sleep(1), sleep(3600)) == ([True, True, False], 10)

    skipping(clock, main)


async def test_an_engine_that_refuses_what_the_others_load_is_out_until_it_loads_it(monkeypatch):
    monkeypatch.setattr(timing, "REJOIN_SECONDS", 0.05)
    engines = Engine(), Engine()
    engines[0].refuse = {"/update_weights": 400}
    async with fleet_of(*engines) as fleet:
        await fleet.update_weights(Path("v1"), 1)
        assert [each.serving for each in fleet.engines] == [False, True]
        assert "refused /update_weights: 400 the reason" in fleet.engines[0].reason
        assert engines[0].calls[:3] == ["/pause", "/update_weights", "/resume"]
        engines[0].refuse = {}
        await until(lambda: fleet.engines[0].serving)
        assert engines[0].version == 1


async def test_weights_that_all_refuse_are_an_error_and_the_engines_serve_as_before():
    engines = Engine(), Engine()
    for engine in engines:
        engine.refuse = {"/update_weights": 422}
    async with fleet_of(*engines) as fleet:
        with pytest.raises(EngineError, match="refused /update_weights: 422 the reason"):
            await fleet.update_weights(Path("bad"), 1)
        assert [each.version for each in fleet.serving] == [0, 0]
        assert all(engine.calls[-1] == "/resume" for engine in engines)
        # Nor does one that comes back get what the others have refused.
        engines[0].refuse, engines[0].loaded = {}, None
        engines[0].restart(version=9)
        await until(lambda: engines[0].version == 0)
        assert engines[0].loaded == "first"


async def test_an_update_without_engines_says_so_and_the_first_that_is_back_loads_it():
    engine = Engine()
    async with fleet_of(engine) as fleet:
        engine.away = True
        with pytest.raises(EngineGone):
            await fleet.update_weights(Path("v1"), 1)
        engine.restart()
        await until(lambda: fleet.serving)
        assert (engine.version, engine.loaded) == (1, "v1")
        engine.calls.clear()
        await fleet.update_weights(Path("v1"), 1)  # the watcher, trying on
        assert engine.calls == []


async def test_an_engine_that_tells_no_version_joins_while_the_watcher_tries_again_and_again():
    """Each attempt announces the version anew, and the engine loads for longer than one takes."""
    engine = Discreet()
    async with fleet_of(engine) as fleet:
        engine.away = True
        await until(lambda: not fleet.serving)
        engine.restart()
        engine.hold.clear()
        with pytest.raises(EngineGone):
            await fleet.update_weights(Path("v1"), 1)
        await until(lambda: "/update_weights" in engine.calls)
        with pytest.raises(EngineGone):
            await fleet.update_weights(Path("v1"), 1)
        engine.hold.set()
        await until(lambda: fleet.serving)
        assert engine.calls == ["/pause", "/update_weights", "/resume"] and engine.loaded == "v1"


async def test_an_engine_elsewhere_that_lists_no_model_yet_is_waited_for():
    engine = Engine()
    listed = engine.handle

    async def handle(request):
        if request.path == "/v1/models" and engine.model is None:
            return web.json_response({"data": []})
        return await listed(request)

    engine.handle, engine.model = handle, None
    async with fleet_of(engine, ready=False, own=False) as fleet:
        ready = asyncio.create_task(fleet.wait_ready(LIMIT))
        await until(lambda: fleet.engines[0].reason)
        assert fleet.engines[0].reason.endswith("serves no model, expected 'm'")
        await engine.looked_at()
        assert not ready.done()
        engine.model = "m"
        await ready


# -- sleep ------------------------------------------------------------------------------------


async def test_sleeping_engines_get_no_requests_and_new_weights_wake_them():
    engines = Engine(), Engine()
    async with fleet_of(*engines) as fleet:
        await fleet.sleep()
        asking = asyncio.create_task(fleet.ask(0, lambda e: asyncio.sleep(0, e.version)))
        await engines[0].looked_at()
        assert not asking.done()
        await fleet.update_weights(Path("v1"), 1)
        assert await asking == 1
    for engine in engines:
        assert engine.calls == ["/pause", "/sleep", "/wake_up", "/update_weights", "/resume"]


async def test_an_engine_that_comes_back_while_the_others_sleep_sleeps_too():
    engines = Engine(), Engine()
    async with fleet_of(*engines) as fleet:
        engines[0].away = True
        await until(lambda: not fleet.engines[0].serving)
        await fleet.sleep()
        engines[0].restart(version=9)
        await until(lambda: fleet.engines[0].state is EngineState.ASLEEP)
        await engines[0].looked_at()
        assert engines[0].calls == ["/pause", "/sleep"] and not fleet.engines[0].serving
        await fleet.update_weights(Path("v1"), 1)
        await until(lambda: fleet.engines[0].serving)
        assert engines[0].calls[2:] == ["/wake_up", "/update_weights", "/resume"]


async def test_an_engine_that_restarts_while_all_sleep_is_put_to_sleep_again():
    engine = Engine()
    async with fleet_of(engine) as fleet:
        await fleet.sleep()
        engine.away = True
        await until(lambda: fleet.engines[0].state is EngineState.STARTING)
        engine.calls.clear()
        engine.restart()
        await until(lambda: fleet.engines[0].state is EngineState.ASLEEP)
        assert engine.calls == ["/pause", "/sleep"]


async def test_an_engine_that_restarts_while_all_sleep_begins_a_new_session():
    """A weight transport must not use the old process's connections."""
    engine = Engine()
    async with fleet_of(engine) as fleet:
        (held,) = fleet.engines
        before = held.session
        await fleet.sleep()
        assert held.session is before
        engine.away = True
        await until(lambda: held.state is EngineState.STARTING)
        engine.restart()
        await until(lambda: held.state is EngineState.ASLEEP)
        assert held.session is not before and not held.lost.done()


async def test_an_engine_put_to_sleep_during_an_update_is_woken_before_it_serves(tmp_path):
    engines, begun = (Engine(), Engine()), asyncio.Event()
    weights = tmp_path / "step_1"
    weights.mkdir()
    (weights / "MEMORY").touch()

    class Failing:
        """Sends nothing, and all have to load files; the first engine has died by then."""

        timeout = LIMIT

        def check(self, engine):
            pass

        async def deliver(self, weights, asked, update):
            engines[0].away = True
            await until(lambda: fleet.engines[0].state is EngineState.STARTING)
            (weights.directory / "model.safetensors").touch()
            begun.set()
            return list(asked), {}

    async with fleet_of(*engines, delivery=Failing()) as fleet:
        await fleet.sleep()
        engines[1].hold.clear()
        updating = asyncio.create_task(fleet.update_weights(weights, 1))
        await begun.wait()
        await until(lambda: "/update_weights" in engines[1].calls)
        engines[0].calls.clear()
        engines[0].restart(version=9)
        await until(lambda: fleet.engines[0].state is EngineState.ASLEEP)
        engines[1].hold.set()
        await updating
        assert [each.serving for each in fleet.engines] == [False, True]
        await until(lambda: fleet.engines[0].serving)
        assert engines[0].version == 1
        assert engines[0].calls == ["/pause", "/sleep", "/wake_up", "/update_weights", "/resume"]


async def test_an_engine_that_dies_in_its_sleep_is_gone_when_the_others_wake(caplog):
    engines = Engine(), Engine()
    async with fleet_of(*engines) as fleet:
        await fleet.sleep()
        engines[0].away = True
        await fleet.update_weights(Path("v1"), 1)
        assert [each.serving for each in fleet.engines] == [False, True]


async def test_an_engine_that_cannot_sleep_ends_the_run_with_the_reason():
    engine = Engine()
    engine.refuse = {"/sleep": 404}
    async with fleet_of(engine) as fleet:
        with pytest.raises(EngineError, match=r"refused /sleep: 404 .*deployment\.colocated needs"):
            await fleet.sleep()


async def test_a_request_under_which_four_engines_went_away_is_given_up():
    """It may be what kills them."""
    begun = []

    async with fleet_of(Engine()) as fleet:

        async def deadly(held):
            begun.append(held.number)
            engine.away = True
            await asyncio.sleep(60)

        engine = Engine()
        async with fleet_of(engine) as own:
            own.on_change = lambda: setattr(engine, "away", False)
            with pytest.raises(GivenUp) as caught:
                await own.ask(0, deadly)
            assert str(caught.value) == (
                "4 engines have gone away under a request; the last was engine "
                f"{own.engines[0].url}. See its log."
            )
        assert begun == [0, 0, 0, 0] and fleet.serving
