"""Admission under a virtual clock: the rule of the orchestrator, the simulator of the bench."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from bench.tail import (
    ENVS,
    OTHERS,
    RATIOS,
    RULES,
    SCALES,
    TRAINERS,
    Setting,
    SimulatedGroup,
    Simulation,
    distance,
    measured,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.orchestrator.admission.durations import Survival
from prime_rl.orchestrator.admission.least_step import LeastStep
from prime_rl.orchestrator.admission.pace import Load, Pace, Wait
from prime_rl.orchestrator.admission.reach import (
    BLOCK,
    HOLD,
    HOLD_UNCLEAR,
    SETTLE,
    KnownLead,
    Reach,
)
from prime_rl.orchestrator.admission.tickets import Ticket

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


def waiting_ids(simulation: Simulation) -> list[int]:
    """Groups that were chosen and not taken in."""
    tickets = simulation.admission.tickets.all.values()
    return [ticket.group_id for ticket in tickets if isinstance(ticket, SimulatedGroup)]


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
    waiting = waiting_ids(simulation)
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


def test_envs_that_wait_for_one_another_with_nothing_in_flight_go_on() -> None:
    """Groups of a fast env were complete and waited for those of others, which were not near enough
    to open: the run hung at step 56."""
    envs = {
        "a": lambda chance: 0.3,
        "b": lambda chance: chance.expovariate(0.5),
        "d": lambda chance: 7.0 * chance.uniform(0.9, 1.1),
    }
    ratios = {"a": 5.0, "b": 2.0, "d": 1.0}
    simulation = Simulation(Setting(envs, 0.5, steps=90, ratios=ratios, seed=5))
    simulation._settle()
    while simulation.version < 90:
        simulation.advance()
        assert simulation.now < 400.0, f"it hangs at step {simulation.version}"


@settings(max_examples=12, deadline=None)
@given(simulations())
def test_a_batch_that_is_held_waits_for_a_group_that_is_not_complete(
    simulation: Simulation,
) -> None:
    """A complete group kept the others waiting for its place in its last batch, and waited itself
    because it would have overtaken their env: until everything in flight had ended."""
    admission = simulation.admission
    simulation._settle()
    while simulation.version < simulation.setting.steps:
        simulation.advance()
        wait = admission.pace._wait
        if wait.cause == "held":
            awaited = [
                ticket
                for ticket in admission.tickets.all.values()
                if not ticket.is_complete
                and (ticket.opened_at is None or ticket.policy_version <= wait.version)
            ]
            assert awaited, f"held for {wait} at step {simulation.step}"


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
    for ticket in before.admission.tickets.all.values():
        assert isinstance(ticket, SimulatedGroup)
        size = ticket.size
        again = SimulatedGroup(ticket.env_name, size, group_id=ticket.group_id, num_left=size)
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
    assert sorted([*trained, *waiting_ids(second)]) == list(range(second.num_chosen))


QUICK = "constant", "exponential", "lognormal"
MISSES = {"four envs": 1.1}
"""Times the step of the bound where 1.05 is missed (docs/benchmarks.md): it may not become more."""
CELLS = [
    pytest.param(name, trainer, marks=[] if name in QUICK and trainer == 1.0 else pytest.mark.slow)
    for name in ENVS | OTHERS
    if name not in SCALES  # known misses (docs/benchmarks.md)
    for trainer in TRAINERS
]


@pytest.mark.parametrize(("name", "trainer"), CELLS)
def test_the_step_is_that_of_the_bound_and_the_data_is_fresh(name: str, trainer: float) -> None:
    """At most 1.05 times the step of the bound alone, at no more than 40 % of its age; or, where
    the groups themselves take longer than that, at no more than 1.3 times the least age."""
    steps = 300 if name in QUICK else 400
    envs = (ENVS | OTHERS)[name]
    ratios = RATIOS.get(name, {})
    bound = measured(Setting(envs, trainer, steps, lead=RULES["bound"], ratios=ratios))
    lead = measured(Setting(envs, trainer, steps, ratios=ratios))
    assert lead["step"] <= MISSES.get(name, 1.05) * bound["step"]
    assert lead["age"] <= max(0.4 * bound["age"], 1.3 * lead["least_age"])
    assert lead["lost"] == 0
    if name == "constant":
        assert lead["step"] <= 1.05 * trainer and lead["age"] <= 1.1


@settings(max_examples=5, deadline=None)
@given(st.integers(4, 64), st.floats(0.6, 2.0))
def test_without_a_tail_the_data_is_fresh_however_fast_the_engines(
    slots: int, trainer: float
) -> None:
    """Each reply takes 0.5 s, so that what takes longer than a step waits for an engine. With a
    lead of 1, a batch takes whole rounds of the engines. A longer lead stays only where it saves a
    part of a round, as with 40 engines and a trainer of 0.8 s: 0.8 instead of 1.0 s."""
    setting = Setting(ENVS["constant"], trainer, steps=110, slots=slots)
    simulation = Simulation(setting).run()
    later = [each.age for batch in simulation.batches[30:] for each in batch]
    age = sum(later) / len(later)
    ideal = max(trainer, setting.batch_size * 0.5 / slots)
    rounds = max(trainer, math.ceil(setting.batch_size / slots) * 0.5)
    seconds = (simulation.ends[-1] - simulation.ends[30]) / (len(simulation.ends) - 31)
    assert seconds <= 1.05 * rounds
    assert age <= 1.02 or (age <= 2.1 and seconds <= 1.05 * ideal < rounds)


def test_groups_that_wait_for_their_environment_are_requested_earlier() -> None:
    """All take 5 s, with a trainer of 2 s: three batches have to be on their way."""
    setting = Setting({"slow": lambda chance: 5.0}, 2.0, steps=80, group_size=16)
    simulation = Simulation(setting).run()
    seconds = (simulation.ends[-1] - simulation.ends[50]) / (len(simulation.ends) - 51)
    assert seconds <= 1.05 * 2.0
    ages = [each.age for batch in simulation.batches[50:70] for each in batch]
    assert sum(ages) / len(ages) <= 3.0


FULL_ENGINES = Load(seconds=10.0, starved=5.0, inflight=900.0, inflight_starved=450.0, most=100.0)
"""The trainer waits for half of the time, and 90 of 100 rollouts are in flight, then and else."""
EMPTY_ENGINES = Load(seconds=10.0, starved=5.0, inflight=400.0, inflight_starved=100.0, most=100.0)
"""20 of 100 are in flight while it waits."""


def served(
    reach: Reach,
    number: int,
    seconds: float,
    load: Load,
    lead: float = 3.0,
    group_seconds: float | None = None,
) -> None:
    for _ in range(number):
        reach.version_served(seconds, lead, load, group_seconds)


def test_a_trainer_that_is_never_starved_keeps_a_lead_of_one() -> None:
    reach = Reach()
    served(reach, 100, 1.0, Load(seconds=10.0, starved=0.3, inflight_starved=30.0, most=100.0))
    assert reach.limit == 1.0


def test_engines_with_room_while_the_trainer_is_starved_end_the_limit() -> None:
    reach = Reach()
    served(reach, SETTLE + BLOCK - 1, 2.0, EMPTY_ENGINES)
    assert reach.limit == 1.0
    served(reach, 1, 2.0, EMPTY_ENGINES)
    assert reach.limit == math.inf


@pytest.mark.parametrize(("seconds", "kept"), [(1.91, False), (1.89, True)])
def test_full_engines_get_a_longer_lead_for_as_long_as_it_pays(seconds: float, kept: bool) -> None:
    """2 s a step with a lead of 1. With one of 2, steps have to be 5 % shorter. After the limit
    changes, two batches of the other limit and the one in training are not counted; nine steps are
    three rounds."""
    reach = Reach()
    served(reach, SETTLE + BLOCK, 2.0, FULL_ENGINES)
    assert reach.limit == 2.0
    served(reach, 3 + 9, seconds, FULL_ENGINES)
    assert reach.limit == (3.0 if kept else 1.0)
    if not kept:
        served(reach, HOLD - 1, 2.0, FULL_ENGINES)
        assert reach.limit == 1.0
        served(reach, BLOCK + 3, 2.0, FULL_ENGINES)
        assert reach.limit == 2.0


def test_a_trial_that_may_have_failed_by_chance_is_repeated_soon() -> None:
    """Steps of 1 s and 3 s have the same mean as those of 2 s, and a standard error of 1/3 s."""
    reach = Reach()
    served(reach, SETTLE + BLOCK, 2.0, FULL_ENGINES)
    for _ in range(6):
        served(reach, 1, 1.0, FULL_ENGINES)
        served(reach, 1, 3.0, FULL_ENGINES)
    assert reach.limit == 1.0
    served(reach, HOLD_UNCLEAR - 1, 2.0, FULL_ENGINES)
    assert reach.limit == 1.0
    served(reach, BLOCK + 3, 2.0, FULL_ENGINES)
    assert reach.limit == 2.0


TWICE_IN_FLIGHT = Load(
    seconds=10.0, starved=5.0, inflight=1800.0, inflight_starved=900.0, most=200.0
)
"""180 of 200 are in flight."""


@pytest.mark.parametrize(("group_seconds", "queues"), [(4.0, False), (5.6, False), (5.7, True)])
def test_durations_say_whether_what_is_requested_queues(group_seconds: float, queues: bool) -> None:
    """4 s a group under a limit of 1. With twice as many in flight, a group would take 8 s if
    everything queued: from sqrt(2) times 4 s on, it counts as queued. Steps are no shorter here."""
    reach = Reach()
    served(reach, SETTLE + BLOCK, 2.0, FULL_ENGINES, group_seconds=4.0)
    assert reach.limit == 2.0
    served(reach, 3 + 9, 2.0, TWICE_IN_FLIGHT, group_seconds=group_seconds)
    assert reach.limit == (1.0 if queues else 4.0)
    served(reach, 100, 2.0, TWICE_IN_FLIGHT, group_seconds=group_seconds)
    # More than the lead; and no shorter one is tried where nothing queues.
    assert reach.limit == (1.0 if queues else 4.0)


def test_a_resumed_run_goes_on_with_the_lead_that_was_found() -> None:
    """Also in the middle of a trial, which begins again."""
    reach = Reach()
    served(reach, SETTLE + BLOCK, 2.0, FULL_ENGINES)
    known = reach.known({"a": 3.0}, {"a": 0.5})
    assert (known.limit, known.patience, known.leads) == (1.0, HOLD, {"a": 3.0})
    served(reach, 3 + 9, 2.0, FULL_ENGINES)
    known = reach.known({"a": 3.0}, {"a": 0.5})
    assert known == KnownLead(1.0, HOLD, 2 * HOLD, {"a": 3.0}, {"a": 0.5})
    resumed = Reach()
    resumed.resume(known)
    for each in (reach, resumed):
        served(each, HOLD - 1, 2.0, FULL_ENGINES)
    assert resumed.limit == reach.limit == 1.0
    served(resumed, BLOCK + SETTLE, 2.0, FULL_ENGINES)
    assert resumed.limit == 2.0


@pytest.mark.parametrize("limit", [1.0, 4.0, math.inf])
def test_the_lead_comes_back_from_a_file(limit: float) -> None:
    import msgspec

    admission = Simulation(Setting(ENVS["constant"], 1.0)).admission
    assert admission.leads.known is None
    admission.leads.by_durations = {"a": 2.5, "b": 9.0}
    admission.leads.reach.limit = limit
    admission.leads.margins = {"a": 1.25}
    saved = msgspec.json.encode(admission.leads.known)
    again = Simulation(Setting(ENVS["constant"], 1.0)).admission
    again.leads.resume(msgspec.json.decode(saved, type=KnownLead))
    for env in "abc":
        assert again.leads.lead(env) == admission.leads.lead(env)
    assert again.leads.lead("b") == min(8.0, limit)
    assert again.leads.margins == {"a": 1.25}


def test_where_the_limit_in_flight_is_reached_the_lead_has_none() -> None:
    """No more than the limit can queue, and engines run empty while long groups end."""
    reach = Reach()
    reached = Load(
        seconds=10.0, starved=5.0, inflight=900.0, inflight_starved=450.0, most=100.0, limit=100.0
    )
    served(reach, 100, 2.0, reached)
    assert reach.limit == math.inf


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
    # All of them take 1 s, two thirds 2 s more.
    assert survival.mean == pytest.approx(1.0 + 2 / 3 * 2.0)
    assert survival.median == 3.0  # 2/3 take longer than 1 s, none longer than 3 s
    tied = Survival(np.array([1.0, 1.0, 1.0, 4.0]), np.array([]))
    assert tied.beyond(np.array([1.0, 3.9])) == pytest.approx([0.25, 0.25])
    unknown = Survival(np.array([1.0]), np.array([5.0]))
    assert unknown.beyond(np.array([4.0, 6.0])) == pytest.approx([0.5, 0.0])


def test_the_shortest_steps_come_from_the_longest_group_of_each_version() -> None:
    """With S = 2, a group of version 0 trains in batch 3 at the latest. Each version has one of 8 s
    and the trainer takes 1 s, so that t(3) = t(0) + 8 + 1: three steps take 9 s. Groups of versions
    9 and 10 may be in flight."""
    least = LeastStep(2)
    assert least.intervals(1.0, 0).tolist() == [[1.0], [2.0]]
    for version in range(9):
        least.ended(version, 0.5)
        least.ended(version, 8.0)
    least.ended(9, 100.0)
    intervals = least.intervals(1.0, 11)
    assert intervals.shape == (2, 9)
    assert intervals.mean(axis=1).tolist() == [3.0, 6.0]
    assert least.intervals(10.0, 11).tolist() == [9 * [10.0], 9 * [20.0]]  # nothing is held


def test_seconds_without_a_batch_cost_nothing_if_a_group_was_in_flight_all_the_while() -> None:
    """The trainer is starved for 2 s in step 5. In step 7, it is held for a group of version 4,
    which would have held it for 2 s more; one of version 5 was opened after these seconds."""
    for version, made_up in ((4, 2.0), (5, 0.0)):
        pace = Pace()
        pace.version_served(4, 10.0)
        pace.look(Wait("starved"), 8, 10.0)
        pace.look(Wait("training"), 8, 12.0)
        pace.version_served(5, 13.0)
        assert pace.last_starved == {None: 2.0}
        pace.version_served(6, 14.0)
        pace.look(Wait("held", "a", version), 1, 14.0)
        pace.look(Wait("training"), 1, 15.0)
        pace.version_served(7, 16.0)
        assert pace.last_made_up == made_up and pace.held == {"a": 1.0}


def test_a_trial_that_fails_because_the_run_changed_is_repeated_at_once() -> None:
    """Groups become longer during the trial: 2 s a step before it, 3 s in it, 4 s after it."""
    reach = Reach()
    served(reach, SETTLE + BLOCK, 2.0, FULL_ENGINES)
    served(reach, 3 + 9, 3.0, FULL_ENGINES)
    assert reach.limit == 1.0
    served(reach, 3 + BLOCK, 4.0, FULL_ENGINES)
    assert reach.limit == 2.0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_envs_of_many_lengths_have_leads_of_their_own(seed: int) -> None:
    """Of four envs, one takes longer than eight steps. A lead by measured steps, which a short lead
    makes longer, left steps 1.29 times as long as the bound; groups that waited for one another, as
    below, 1.18 times."""
    envs = OTHERS["four envs"]
    bound = measured(Setting(envs, 0.5, 300, lead=RULES["bound"], seed=seed))
    lead = measured(Setting(envs, 0.5, 300, seed=seed))
    assert lead["step"] <= 1.05 * bound["step"]
    assert lead["age"] <= max(0.4 * bound["age"], 1.3 * lead["least_age"])


def test_an_envs_demand_is_its_throughput_times_its_duration() -> None:
    """Steps of 2 s with batches of 64, half of them of each env: 16 rollouts per second, for 0.5 s
    and for 10 s. The lead of the slow one is 6 at most: 1 + P(D > 2 s) + ... + P(D > 8 s)."""
    simulation = Simulation(Setting(ENVS["two envs"], 2.0, steps=80)).run()
    demands = simulation.admission.leads.demands
    assert demands["fast"].number == pytest.approx(16 * 0.5, rel=0.2)
    assert demands["slow"].number == pytest.approx(16 * 10.0, rel=0.2)
    metrics = simulation.admission.leads.take_metrics()
    assert metrics["dispatcher/demand/slow"] == demands["slow"].number


def test_a_part_of_a_group_has_its_place_and_the_rest_goes_behind_everything() -> None:
    admission = Simulation(Setting(ENVS["constant"], 1.0)).admission
    groups = [Ticket("a", 8) for _ in range(3)]
    for group in groups:
        admission.choose(group)
        admission.open(group, version=4, now=1.0)
    part = Ticket("a", 5)
    admission.split(groups[1], part, now=3.0)
    assert [*admission.tickets.all.values()] == [groups[0], part, groups[2], groups[1]]
    assert [*admission.tickets.all] == [0, 1, 2, 3] and admission.tickets.num_open == 24
    assert part.is_complete and (part.seconds, part.policy_version) == (2.0, 4)
    assert not groups[1].is_complete and groups[1].size == 3
    assert admission.leads.durations["a"].num_inflight == 3
    admission.complete(groups[1], now=9.0)
    assert groups[1].seconds == 8.0
    for ticket in [*admission.tickets.all.values()]:
        admission.remove(ticket)
    assert admission.tickets.num_open == 0 and not admission.tickets.by_version
