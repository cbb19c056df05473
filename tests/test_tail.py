"""Admission under a virtual clock: the rule of the orchestrator, the simulator of the bench."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from bench.tail import ENVS, RULES, Setting, SimulatedGroup, Simulation, distance, measured
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.orchestrator.admission import BLOCK, HOLD, SETTLE, Load, Reach, Survival

DURATIONS = st.sampled_from(
    [
        lambda chance: 0.5,
        lambda chance: chance.expovariate(2.0),
        lambda chance: 0.25 * math.exp(chance.gauss(0.0, 1.2)),
        lambda chance: 6.0 if chance.random() < 0.05 else 0.5,
        lambda chance: chance.paretovariate(1.3),
        lambda chance: 10.0,
    ]
)


@st.composite
def simulations(draw: Any, failing: float = 0.0) -> Simulation:
    size = draw(st.integers(1, 8))
    envs = {name: draw(DURATIONS) for name in "abc"[: draw(st.integers(1, 3))]}
    return Simulation(
        Setting(
            envs,
            trainer=draw(st.floats(0.05, 5.0)),
            steps=25,
            group_size=size,
            batch_size=size * draw(st.integers(1, 8)),
            max_off_policy_steps=draw(st.integers(0, 8)),
            max_inflight=size * draw(st.sampled_from([1, 3, 8, 1000])),
            slots=draw(st.sampled_from([None, 4, 64])),
            ratios={name: draw(st.floats(0.2, 5.0)) for name in envs},
            failing=failing,
            seed=draw(st.integers(0, 1000)),
        )
    )


@settings(max_examples=12, deadline=None)
@given(simulations())
def test_nothing_is_requested_that_could_not_train_in_time(simulation: Simulation) -> None:
    setting = simulation.run().setting
    for version, accepted, requested in simulation.opened:
        batches = setting.max_off_policy_steps + version + 1
        assert accepted + requested <= batches * setting.batch_size
    assert simulation.most_inflight < setting.max_inflight + setting.group_size


@settings(max_examples=12, deadline=None)
@given(simulations())
def test_everything_that_was_requested_trains_once_and_none_is_too_old(
    simulation: Simulation,
) -> None:
    """No rollout fails here, so each one trains, whatever the tail."""
    setting = simulation.run().setting
    assert simulation.counts["cancelled"] == simulation.counts["stale"] == 0
    trained = [each.group.group_id for batch in simulation.batches for each in batch]
    waiting = list(simulation.admission.tickets)
    assert len(set(trained)) == len(trained) and not set(trained) & set(waiting)
    assert sorted(trained + waiting) == list(range(simulation.num_chosen))
    ages = [each.age for batch in simulation.batches for each in batch]
    assert min(ages) >= 0 and max(ages) <= setting.max_off_policy_steps


@settings(max_examples=10, deadline=None)
@given(simulations(failing=0.3))
def test_each_rollout_is_accounted_for_once_when_some_fail(simulation: Simulation) -> None:
    setting = simulation.run().setting
    counts = simulation.counts
    ended = counts["finished"] + counts["failed"] + counts["cancelled"]
    assert counts["dispatched"] == ended + simulation.num_inflight
    survivors = [each.survivors for batch in simulation.batches for each in batch]
    assert sum(survivors) + counts["stale"] <= counts["finished"]
    assert len(simulation.batches) == setting.steps


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([0.25, 1.0, 4.0]))
def test_no_env_starves_and_the_ratio_holds_over_ten_steps(seed: int, ratio: float) -> None:
    """The slow env takes twenty times as long. What trains in ten steps has the envs of what the
    sampler chose for these steps, within two quarters of a batch for each border."""
    envs = ENVS["two envs"]
    ratios = {"fast": ratio, "slow": 1.0}
    simulation = Simulation(Setting(envs, 0.5, steps=40, ratios=ratios, seed=seed)).run()
    chosen: dict[int, str] = {}
    for batch in simulation.batches:
        chosen |= {each.group.group_id: each.group.env_name for each in batch}
    for first in range(31):
        ten = [each for batch in simulation.batches[first : first + 10] for each in batch]
        trained = Counter(each.group.env_name for each in ten)
        in_turn = [chosen.get(number) for number in range(first * 8, (first + 10) * 8)]
        for env in envs:
            missing = in_turn.count(None)
            off = trained[env] - in_turn.count(env)
            assert -8 <= off <= 8 + missing, f"{env}: {trained} from step {first + 1}"


def resumed(before: Simulation) -> Simulation:
    """Another simulation that continues as an orchestrator does: what no batch has got is chosen
    again, in the same order and under the same numbers."""
    after = Simulation(before.setting)
    after.version, after.step = before.version, before.step
    after.batches = [*before.batches]
    after._buffer = list(before._buffer)
    after.num_buffered = before.num_buffered
    after._wire = before._wire
    after.num_chosen = before.num_chosen
    after._chance.setstate(before._chance.getstate())
    for ticket in before.admission.tickets.values():
        assert isinstance(ticket, SimulatedGroup)
        again = SimulatedGroup(ticket.group_id, ticket.env_name, ticket.size, num_left=ticket.size)
        again.members, again.failed = ticket.members, ticket.failed
        after.admission.choose(again)
    return after


@settings(max_examples=10, deadline=None)
@given(simulations(), st.integers(1, 20))
def test_a_resumed_run_requests_the_same_groups_each_once(
    simulation: Simulation, version: int
) -> None:
    simulation._settle()
    while simulation.version < version:
        simulation.advance()
    second = resumed(simulation)
    if simulation._is_training:  # its batch is the last of those that were sent
        second.batches.pop()
        second._wire, second._is_training = simulation.batches[-1], False
        second.step = simulation.step - (simulation._wire is not None)
        if simulation._wire is not None:
            second._buffer = [*simulation._wire, *second._buffer]
            second.num_buffered += simulation.setting.batch_size
    second.run()
    trained = [each.group.group_id for batch in second.batches for each in batch]
    assert len(set(trained)) == len(trained)
    assert sorted([*trained, *second.admission.tickets]) == list(range(second.num_chosen))


@pytest.mark.slow
@pytest.mark.parametrize("trainer", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("name", ENVS)
def test_the_step_is_that_of_the_bound_and_the_data_is_fresh(name: str, trainer: float) -> None:
    """At most 1.05 times the step of the bound alone, at no more than 40 % of its age; or, where
    the groups themselves take longer than that, at no more than 1.2 times their duration."""
    bound = measured(Setting(ENVS[name], trainer, lead=RULES["bound"]))
    lead = measured(Setting(ENVS[name], trainer))
    assert lead["step"] <= 1.05 * bound["step"]
    assert lead["age"] <= max(0.4 * bound["age"], 1.2 * lead["least_age"])
    assert lead["lost"] == 0
    if name == "constant":
        assert lead["step"] <= 1.05 * trainer and lead["age"] <= 1.1


@settings(max_examples=5, deadline=None)
@given(st.integers(4, 64), st.floats(0.6, 2.0))
def test_without_a_tail_the_data_is_fresh_however_fast_the_engines(
    slots: int, trainer: float
) -> None:
    """Each reply takes 0.5 s, so that what takes longer than a step waits for an engine. A longer
    lead is tried once, for a few steps."""
    setting = Setting(ENVS["constant"], trainer, steps=110, slots=slots)
    simulation = Simulation(setting).run()
    ages = [each.age for batch in simulation.batches for each in batch]
    assert sum(ages) / len(ages) <= 1.15
    later = [each.age for batch in simulation.batches[30:] for each in batch]
    assert sum(later) / len(later) <= 1.02
    ideal = max(trainer, setting.batch_size * 0.5 / slots)
    seconds = (simulation.ends[-1] - simulation.ends[30]) / (len(simulation.ends) - 31)
    assert seconds <= 1.05 * max(ideal, math.ceil(setting.batch_size / slots) * 0.5)


def test_groups_that_wait_for_their_environment_are_requested_earlier() -> None:
    """All take 5 s, with a trainer of 2 s: three batches have to be on their way."""
    setting = Setting({"slow": lambda chance: 5.0}, 2.0, steps=80, group_size=16)
    simulation = Simulation(setting).run()
    seconds = (simulation.ends[-1] - simulation.ends[50]) / (len(simulation.ends) - 51)
    assert seconds <= 1.05 * 2.0
    ages = [each.age for batch in simulation.batches[50:70] for each in batch]
    assert sum(ages) / len(ages) <= 3.0


FULL_ENGINES = Load(seconds=10.0, starved=5.0, inflight=450.0, most=100.0)
"""The trainer waits for half of the time, and 90 of 100 rollouts are in flight then."""
EMPTY_ENGINES = Load(seconds=10.0, starved=5.0, inflight=100.0, most=100.0)
"""20 of 100 are in flight while it waits."""


def served(reach: Reach, number: int, seconds: float, load: Load, lead: float = 3.0) -> None:
    for _ in range(number):
        reach.version_served(seconds, training=1.0, lead=lead, load=load)


def test_a_trainer_that_is_never_starved_keeps_a_lead_of_one() -> None:
    reach = Reach()
    served(reach, 100, 1.0, Load(seconds=10.0, starved=0.3, inflight=30.0, most=100.0))
    assert reach.limit == 1.0


def test_engines_with_room_while_the_trainer_is_starved_end_the_limit() -> None:
    reach = Reach()
    served(reach, SETTLE + BLOCK - 1, 2.0, EMPTY_ENGINES)
    assert reach.limit == 1.0
    served(reach, 1, 2.0, EMPTY_ENGINES)
    assert reach.limit == math.inf


@pytest.mark.parametrize(("seconds", "kept"), [(1.7, False), (1.6, True)])
def test_full_engines_get_twice_the_lead_for_as_long_as_it_pays(seconds: float, kept: bool) -> None:
    """2 s a step with a lead of 1. With one of 2, three batches instead of two: 4/3 s if nothing
    queues, and half of that is 5/3 s. After the limit changes, two batches of the other limit and
    the one in training are not counted; nine steps are three rounds."""
    reach = Reach()
    served(reach, SETTLE + BLOCK, 2.0, FULL_ENGINES)
    assert reach.limit == 2.0
    served(reach, 3 + 9, seconds, FULL_ENGINES)
    assert reach.limit == (4.0 if kept else 1.0)
    if not kept:
        served(reach, HOLD - 1, 2.0, FULL_ENGINES)
        assert reach.limit == 1.0
        served(reach, BLOCK + 3, 2.0, FULL_ENGINES)
        assert reach.limit == 2.0


def test_a_longer_lead_is_not_tried_where_the_limit_in_flight_is_reached() -> None:
    reach = Reach()
    reached = Load(seconds=10.0, starved=5.0, inflight=450.0, most=100.0, limit=100.0)
    served(reach, 100, 2.0, reached)
    assert reach.limit == 1.0


def test_a_lead_that_only_queues_becomes_shorter() -> None:
    """A lead of 5: half of what is beyond 1 is 3, 2, 1.5; a lead of 1.25 is as good as one of 1."""
    reach = Reach()
    served(reach, SETTLE + BLOCK, 2.0, EMPTY_ENGINES, lead=5.0)
    limits = [reach.limit]
    for _ in range(100):
        served(reach, 1, 2.0, FULL_ENGINES, lead=5.0)
        limits += [reach.limit] if reach.limit != limits[-1] else []
    assert limits == [math.inf, 3.0, 2.0, 1.5, 1.0]


def test_what_trains_has_the_durations_of_what_was_requested() -> None:
    """Two-sample Kolmogorov-Smirnov test at the level 0.001, in the middle of a run: what is in
    flight at either end of it is longer than the rest."""
    simulation = Simulation(Setting(ENVS["lognormal"], 0.5, steps=120)).run()
    trained = [
        s for batch in simulation.batches[30:90] for each in batch for s in each.group.members
    ]
    requested = simulation.dispatched
    sizes = len(trained), len(requested)
    limit = 1.95 * math.sqrt(sum(sizes) / (sizes[0] * sizes[1]))
    assert distance(trained, requested) < limit


def test_ten_thousand_rollouts_in_flight_at_64_engines() -> None:
    setting = Setting(
        ENVS["5 % x 12"], 1.0, steps=9, batch_size=5120, slots=64 * 160, max_inflight=64 * 160
    )
    simulation = Simulation(setting).run()
    assert 64 * 160 <= simulation.most_inflight < 64 * 160 + setting.group_size
    assert simulation.counts["cancelled"] == simulation.counts["stale"] == 0


def test_groups_in_flight_count_as_longer_than_their_age() -> None:
    """Two came back after 1 s and 3 s, one is out for 2 s: P(D > 1) = 2/3, and of those beyond 2 s
    only the one of 3 s is known: P(D > 2) = 2/3, P(D > 3) = 0."""
    import numpy as np

    survival = Survival(np.array([3.0, 1.0]), np.array([2.0]))
    shares = survival.beyond(np.array([0.5, 1.0, 2.0, 2.9, 3.0, 9.0]))
    assert shares == pytest.approx([1.0, 2 / 3, 2 / 3, 2 / 3, 0.0, 0.0])
    tied = Survival(np.array([1.0, 1.0, 1.0, 4.0]), np.array([]))
    assert tied.beyond(np.array([1.0, 3.9])) == pytest.approx([0.25, 0.25])
    unknown = Survival(np.array([1.0]), np.array([5.0]))
    assert unknown.beyond(np.array([4.0, 6.0])) == pytest.approx([0.5, 0.0])
