"""Long-tailed rollouts: seconds of a step and age of what trains, by admission rule.

    python -m bench tail [--others] [--cells "four envs"] [--trainers 0.5] [--seeds 20]
                         [--rules bound lead] [--steps 400]
    python -m bench tail --slots | --scale

A virtual clock runs the orchestrator's own ``Admission`` against engines whose replies take as long
as a distribution says, and a trainer that takes a fixed time. Nothing sleeps. Batches have 64
rollouts in groups of 8, ``max_off_policy_steps`` is 8. The rules:

    one_ahead    batches may be requested one beyond the one in training (a fixed lead of 1)
    bound        everything that may still train in time is requested (a fixed lead of 8): AReaL
    lead         the lead follows the measured durations: what the orchestrator does
    oracle       knows how long each group will take

Seeds begin with ``HELD_OUT``: they were not used while the rule was developed.

``over_ideal`` is seconds per step over the longer of the trainer and sampling at capacity. A tail
may allow no more: if everything that was requested trains, a step takes at least the longest group
over ``max_off_policy_steps + 1``. ``ks`` is the distance between the durations that trained and
those that were requested (Kolmogorov-Smirnov), the former without the first and last steps.

Two ages say how fresh data may be:

    oracle       the batches of ``bound``, with the same groups at the same pace; but each group is
                 opened as late as it can be to end just before its batch begins. Every group
                 trains, so it is unbiased. A rule without this knowledge opens groups before it
                 knows which are long, and needs some in reserve for those that are late by chance.
                 ``oracle`` is at the pace of ``lead``, ``oracle_105`` at 1.05 times the steps of
                 ``bound``: where that is more than 40 % of the age of ``bound``, both goals are
                 out of reach even with this knowledge, in these batches.
    least_age    of one run: the mean age if each group was opened as a version was served, averaged
                 over all versions, and was in the first batch that began to train after its end

``--others`` are distributions that the rule was not developed with. ``--slots``: engines that run
only so many rollouts at once, with and without a limit of rollouts in flight. ``--scale`` simulates
64 engines with 10,000 rollouts in flight. ``python -m bench overlap --tail`` measures the real
orchestrator.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.records import record
from prime_rl.orchestrator.admission.admission import Admission, Standing
from prime_rl.orchestrator.admission.tickets import Ticket

Draw = Callable[[random.Random], float]
"""The seconds of one rollout."""

ENVS: dict[str, dict[str, Draw]] = {
    "constant": {"a": lambda chance: 0.5},
    "exponential": {"a": lambda chance: chance.expovariate(2.0)},
    "lognormal": {"a": lambda chance: 0.25 * math.exp(chance.gauss(0.0, 1.2))},
    "5 % x 12": {"a": lambda chance: 6.0 if chance.random() < 0.05 else 0.5},
    "two envs": {"fast": lambda chance: 0.5, "slow": lambda chance: 10.0},
}
OTHERS: dict[str, dict[str, Draw]] = {
    "1 % x 50": {"a": lambda chance: 25.0 if chance.random() < 0.01 else 0.5},
    "pareto 1.2": {"a": lambda chance: min(0.1 * chance.paretovariate(1.2), 20.0)},
    "three envs": {
        "a": lambda chance: 0.3,
        "b": lambda chance: chance.expovariate(1.0),
        "c": lambda chance: 3.0 * chance.uniform(0.8, 1.2),
    },
    "gamma": {"a": lambda chance: chance.gammavariate(0.5, 1.0)},
    "20 % x 5": {"a": lambda chance: 2.5 if chance.random() < 0.2 else 0.5},
    "pareto": {"a": lambda chance: min(0.2 * chance.paretovariate(1.5), 6.0)},
    "1 s, 4 s": {"fast": lambda chance: 1.0, "slow": lambda chance: 4.0},
    "2 % x 8": {"a": lambda chance: 4.0 if chance.random() < 0.02 else 0.5},
    "four envs": {
        "a": lambda chance: 0.2 * math.exp(chance.gauss(0.0, 0.5)),
        "b": lambda chance: 0.5 * math.exp(chance.gauss(0.0, 1.0)),
        "c": lambda chance: 5.0 * chance.uniform(0.9, 1.1),
        "d": lambda chance: 1.0,
    },
    "changing": {"a": lambda chance: chance.expovariate(4.0)},
}
"""Not used while the rule was developed, except for what was repaired."""
SCALES: dict[str, Callable[[int], float]] = {
    "changing": lambda number: 6.0 if number // (20 * 8) % 2 else 1.0
}
"""By cell and number of the group: its durations are so many times as long. Every 20 batches, those
of ``changing`` become six times as long or short."""
RATIOS: dict[str, dict[str, float]] = {"1 s, 4 s": {"fast": 3.0, "slow": 1.0}}
RULES: dict[str, float | None] = {"one_ahead": 1.0, "bound": math.inf, "lead": None}
TRAINERS = 0.5, 1.0, 2.0
WARM_UP = 50
"""Steps that are not measured: the lead is not known yet."""
HELD_OUT = 1000
"""The first seed."""
GOAL = 1.05
"""Steps over those of ``bound``, at most."""
LAST = 10
"""Steps of which only the pace is measured: nothing is requested beyond the end."""
TRAINED, ENDED, LOOK = range(3)


@dataclass
class Setting:
    """One simulated run."""

    envs: Mapping[str, Draw]
    trainer: float
    steps: int = 400
    batch_size: int = 64
    group_size: int = 8
    max_off_policy_steps: int = 8
    lead: float | None = None
    max_inflight: int = 1 << 30
    slots: int | None = None
    """Rollouts that the engines run at once; more wait. None: no limit."""
    ratios: Mapping[str, float] = field(default_factory=dict)
    scale: Callable[[int], float] = lambda number: 1.0
    """By number of the group: its durations are so many times as long."""
    failing: float = 0.0
    """Share of rollouts that fail."""
    seed: int = 0


@dataclass(eq=False)
class SimulatedGroup(Ticket):
    group_id: int = -1
    members: list[float] = field(default_factory=list)
    """Seconds of each."""
    failed: list[bool] = field(default_factory=list)
    num_left: int = 0


@dataclass
class Trained:
    """A group in a batch."""

    group: SimulatedGroup
    age: int
    survivors: int


class Simulation:
    """The orchestrator's loop, engines and a trainer under a virtual clock."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.now = 0.0
        self.version = 0
        self.step = 1
        self.num_buffered = 0
        self.num_inflight = 0
        self.admission = self.new_admission()
        self.batches: list[list[Trained]] = []
        """Those that were sent, in order."""
        self.starts: list[float] = []
        """When each batch began to train."""
        self.ends: list[float] = []
        """When each version was served."""
        self.counts: Counter[str] = Counter()
        """Rollouts: dispatched = finished + failed + cancelled + in flight."""
        self.dispatched: list[float] = []
        self.most_inflight = 0
        self.opened: list[tuple[int, float, int]] = []
        """Version, accepted rollouts and rollouts in the system at each opening."""
        self._chance = random.Random(setting.seed)
        self._events: list[tuple[float, int, int, int]] = []
        self._buffer: list[Trained] = []
        self._wire: list[Trained] | None = None
        self._is_training = False
        self._running = 0
        self._queue: deque[tuple[int, int]] = deque()
        self.num_chosen = 0
        self._groups: dict[int, SimulatedGroup] = {}
        """Those that are open and neither complete nor cancelled, by id."""

    def new_admission(self) -> Admission:
        setting = self.setting
        admission = Admission(
            batch_size=setting.batch_size,
            max_off_policy_steps=setting.max_off_policy_steps,
            max_steps=setting.steps,
            lead=setting.lead,
        )
        admission.most_inflight = setting.max_inflight
        return admission

    @property
    def standing(self) -> Standing:
        return Standing(
            self.version, self.step, num_buffered=self.num_buffered, num_inflight=self.num_inflight
        )

    def run(self) -> Simulation:
        self._settle()
        while self.version < self.setting.steps:
            self.advance()
        return self

    def advance(self) -> None:
        """Until the next event."""
        self.now, kind, number, member = heapq.heappop(self._events)
        if kind == TRAINED:
            self._is_training = False
            self._drop_stale(number)
            self.version = number
            self.ends.append(self.now)
            self.admission.version_served(number, self.now)
        elif kind == ENDED:
            was_full = self.num_inflight >= self.setting.max_inflight
            if not self._member_ended(number, member) and not was_full:
                return  # nothing that could open or be handed on now
        self._settle()

    # -- engines ----------------------------------------------------------------------------------

    def _start(self, group_id: int, member: int) -> None:
        if self.setting.slots is not None and self._running >= self.setting.slots:
            self._queue.append((group_id, member))
            return
        group = self._groups.get(group_id)
        if group is None:  # cancelled while it was queued
            return
        self._running += 1
        ends = self.now + group.members[member]
        heapq.heappush(self._events, (ends, ENDED, group_id, member))

    def _member_ended(self, group_id: int, member: int) -> bool:
        """Whether its group is complete."""
        self._running -= 1
        if self._queue:
            self._start(*self._queue.popleft())
        group = self._groups.get(group_id)
        if group is None:
            return False
        self.num_inflight -= 1
        group.num_left -= 1
        self.counts["failed" if group.failed[member] else "finished"] += 1
        self.admission.pace.count(self.num_inflight, self.now)
        if group.num_left:
            return False
        del self._groups[group_id]
        self.admission.complete(group, self.now)
        return True

    def _drop_stale(self, version: int) -> None:
        oldest = version - self.setting.max_off_policy_steps
        for group in [*self.admission.tickets.all.values()]:
            assert isinstance(group, SimulatedGroup)
            is_open = group.opened_at is not None
            if is_open and group.num_left and group.policy_version < oldest:
                self.counts["cancelled"] += group.num_left
                self.num_inflight -= group.num_left
                del self._groups[group.group_id]
                self.admission.cancel(group, self.now)

    # -- the orchestrator -------------------------------------------------------------------------

    def _settle(self) -> None:
        """Everything that happens at one moment."""
        is_moving = True
        while is_moving:
            is_moving = self._take_in() | self._send() | self._open()

    def _take_in(self) -> bool:
        chosen = self.admission.hand_on(self.standing, self.now)
        for group in chosen:
            assert isinstance(group, SimulatedGroup)
            survivors = group.size - sum(group.failed)
            age = self.step - 1 - group.policy_version
            self.admission.remove(group)
            if age > self.setting.max_off_policy_steps:
                self.counts["stale"] += survivors
                continue
            self.num_buffered += survivors
            self._buffer.append(Trained(group, age, survivors))
        return bool(chosen)

    def _send(self) -> bool:
        moved = False
        if self.num_buffered >= self.setting.batch_size and self._wire is None:
            self._wire, self._buffer = self._buffer, []
            self.num_buffered -= self.setting.batch_size
            self.admission.pace.batch_sent(self.step, self.now)
            self.step += 1
            moved = True
        if self._wire is not None and not self._is_training:
            self.batches.append(self._wire)
            self.starts.append(self.now)
            self._wire = None
            self._is_training = True
            ends = self.now + self.setting.trainer
            heapq.heappush(self._events, (ends, TRAINED, len(self.batches), 0))
            moved = True
        return moved

    def _open(self) -> bool:
        admission = self.admission
        before = self.counts["dispatched"]
        if admission.measure(self.version, self.now):
            seconds = admission.leads.look_again
            assert seconds is not None
            heapq.heappush(self._events, (self.now + seconds, LOOK, 0, 0))
        for ticket in admission.to_open(self.standing):
            if self.num_inflight >= self.setting.max_inflight:
                break
            self._open_group(ticket)
        while self.num_inflight < self.setting.max_inflight and admission.room(self.standing) > 0:
            group = self.choose()
            admission.choose(group)
            if admission.is_near(group, self.standing):
                self._open_group(group)
        return self.counts["dispatched"] > before

    def choose(self) -> SimulatedGroup:
        setting = self.setting
        names = list(setting.envs)
        weights = [setting.ratios.get(name, 1.0) for name in names]
        (name,) = self._chance.choices(names, weights)
        size = setting.group_size
        group = SimulatedGroup(name, size, group_id=self.num_chosen, num_left=size)
        scale = setting.scale(self.num_chosen)
        group.members = [scale * setting.envs[name](self._chance) for _ in range(size)]
        group.failed = [self._chance.random() < setting.failing for _ in range(size)]
        self.num_chosen += 1
        return group

    def _open_group(self, ticket: Ticket) -> None:
        assert isinstance(ticket, SimulatedGroup)
        self.admission.open(ticket, self.version, self.now)
        self._groups[ticket.group_id] = ticket
        self.counts["dispatched"] += ticket.size
        self.dispatched += ticket.members
        self.num_inflight += ticket.size
        self.most_inflight = max(self.most_inflight, self.num_inflight)
        accepted = (self.step - 1) * self.setting.batch_size + self.num_buffered
        self.opened.append((self.version, accepted, self.admission.tickets.num_open))
        for member in range(ticket.size):
            self._start(ticket.group_id, member)


def distance(some: list[float], others: list[float]) -> float:
    """Kolmogorov-Smirnov: the largest difference of two distributions' shares."""
    values = np.array(sorted({*some, *others}))
    shares = [
        np.searchsorted(np.sort(each), values, side="right") / len(each) for each in (some, others)
    ]
    return float(np.abs(shares[0] - shares[1]).max())


def least_age(simulation: Simulation, spans: list[float]) -> float:
    """Mean versions that groups of these durations are behind at least: see the module."""
    starts = np.array(simulation.starts)
    served = np.array(simulation.ends)[WARM_UP:-LAST]
    versions = np.arange(WARM_UP, WARM_UP + len(served)) + 1
    durations, counts = np.unique(spans, return_counts=True)
    ended = served[:, None] + durations[None, :]
    # The batch at index i is made of the weights of version i.
    ages = np.searchsorted(starts, ended - 1e-9) - versions[:, None]
    known = ended <= starts[-1]
    means = (ages * known).sum(axis=0) / np.maximum(known.sum(axis=0), 1)
    return float((means * counts).sum() / counts.sum())


def oracle_age(bound: Simulation, stretch: float = 1.0) -> float:
    """Mean age of the batches of ``bound`` if each group is opened as late as its duration allows,
    with steps ``stretch`` times as long: see the module."""
    starts = np.array(bound.starts) * stretch
    served = np.append(-np.inf, starts + bound.setting.trainer)
    ages: list[int] = []
    for index in range(WARM_UP, len(bound.batches) - LAST):
        spans = [max(each.group.members) for each in bound.batches[index]]
        # The batch at index i is made of the weights of version i.
        versions = np.searchsorted(served, starts[index] - np.array(spans) + 1e-9, "right") - 1
        ages += (index - versions).tolist()

    return statistics.fmean(ages)


def measured(setting: Setting) -> dict[str, float]:
    """The figures of one run, without its first steps."""
    started = time.process_time()
    simulation = Simulation(setting).run()
    return figures(simulation, time.process_time() - started)


def figures(simulation: Simulation, cpu: float = 0.0) -> dict[str, float]:
    """``cpu``: seconds of the run."""
    setting = simulation.setting
    batches = simulation.batches[WARM_UP:-LAST]
    trained = [each for batch in batches for each in batch]
    ages = [each.age for each in trained]
    ends = simulation.ends
    seconds = (ends[-1] - ends[WARM_UP]) / (len(ends) - 1 - WARM_UP)
    spans = [max(each.group.members) for each in trained]
    trained_seconds = [second for each in trained for second in each.group.members]
    ideal = setting.trainer
    if setting.slots is not None:
        ideal = max(ideal, setting.batch_size * statistics.fmean(trained_seconds) / setting.slots)
    lost = simulation.counts["cancelled"] + simulation.counts["stale"]
    return {
        "step": seconds,
        "over_ideal": seconds / ideal,
        "age": statistics.fmean(ages),
        "age_90": float(np.quantile(ages, 0.9)),
        "least_age": least_age(simulation, spans),
        "ks": distance(trained_seconds, simulation.dispatched),
        "lost": float(lost),
        "inflight": float(simulation.most_inflight),
        "cpu_ms_per_step": cpu / setting.steps * 1e3,
    }


UNITS = {"age": "versions", "oracle": "versions", "oracle_105": "versions", "ks": "distance"}
"""Of what is recorded beside ratios."""
COLUMNS = "step", "over_ideal", "age", "age_90", "least_age", "ks", "lost", "cpu_ms_per_step"
SLOTS = (
    ("5 % x 12", 32, 40),
    ("exponential", 32, 40),
    ("lognormal", 32, 40),
    ("pareto", 32, 40),
    ("two envs", 64, 80),
    ("5 % x 12", 32, None),
    ("pareto", 32, None),
    ("lognormal", 32, None),
    ("two envs", 64, None),
    ("lognormal", 16, None),
    ("pareto", 16, None),
)
"""Distribution, what the engines run at once, and the limit of rollouts in flight."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=1, help=f"how many, from {HELD_OUT}")
    parser.add_argument("--cells", nargs="+", choices=[*ENVS, *OTHERS])
    parser.add_argument("--trainers", type=float, nargs="+", default=[*TRAINERS])
    parser.add_argument("--rules", nargs="+", choices=[*RULES], default=[*RULES])
    parser.add_argument("--others", action="store_true")
    parser.add_argument("--slots", action="store_true")
    parser.add_argument("--scale", action="store_true")
    asked = parser.parse_args()
    if asked.scale:
        large = Setting(
            envs=ENVS["5 % x 12"],
            trainer=1.0,
            steps=60 + WARM_UP,
            batch_size=5120,
            slots=64 * 160,
            max_inflight=64 * 160,
        )
        print_head()
        print_row("64 engines", 1.0, rule="lead", figures=measured(large))
        return 0

    seeds = range(HELD_OUT, HELD_OUT + asked.seeds)
    if asked.slots:
        for name, slots, limit in SLOTS:
            print_slots(name, slots, limit=limit, steps=asked.steps, seeds=seeds)
        return 0

    print_head()
    for name in asked.cells or (OTHERS if asked.others else ENVS):
        for trainer in asked.trainers:
            print_cell(name, trainer, rules=asked.rules, steps=asked.steps, seeds=seeds)
    return 0


def cell(name: str, trainer: float, steps: int, seed: int, lead: float | None) -> Setting:
    """A distribution by name."""
    return Setting(
        (ENVS | OTHERS)[name],
        trainer,
        steps,
        lead=lead,
        ratios=RATIOS.get(name, {}),
        scale=SCALES.get(name, lambda number: 1.0),
        seed=seed,
    )


def print_cell(
    name: str, trainer: float, rules: Sequence[str], steps: int, seeds: Sequence[int]
) -> None:
    """A row for each rule, means over the seeds; then ``lead`` beside ``bound``, if both ran."""
    rows: dict[str, list[dict[str, float]]] = {rule: [] for rule in rules}
    oracles: list[tuple[float, float]] = []
    """Of each seed, at the pace of ``lead`` and at the goal's."""
    for seed in seeds:
        bound = None
        for rule in rules:
            started = time.process_time()
            simulation = Simulation(cell(name, trainer, steps, seed, RULES[rule])).run()
            rows[rule].append(figures(simulation, time.process_time() - started))
            bound = simulation if rule == "bound" else bound
        if bound is not None and "lead" in rows:
            slower = rows["lead"][-1]["step"] / rows["bound"][-1]["step"]
            oracles.append((oracle_age(bound, slower), oracle_age(bound, GOAL)))

    for rule, runs in rows.items():
        means = {column: statistics.fmean(run[column] for run in runs) for column in COLUMNS}
        print_row(name, trainer, rule=rule, figures=means)
    if not oracles:
        return

    pairs = list(zip(rows["lead"], rows["bound"], strict=True))
    steps_to_bound = [lead["step"] / bound["step"] for lead, bound in pairs]
    found = {
        "step": statistics.fmean(steps_to_bound),
        "worst": max(steps_to_bound),
        "age": statistics.fmean(lead["age"] for lead, _ in pairs),
        "to_bound": statistics.fmean(lead["age"] / bound["age"] for lead, bound in pairs),
        "oracle": statistics.fmean(oracle for oracle, _ in oracles),
        "oracle_105": statistics.fmean(oracle for _, oracle in oracles),
        "ks": statistics.fmean(lead["ks"] for lead, _ in pairs),
    }
    for what, value in found.items():
        record(f"tail.{name}, trainer {trainer:g} s.{what}", value, UNITS.get(what, "x"))
    bound_age = statistics.fmean(bound["age"] for _, bound in pairs)
    out_of_reach = found["oracle_105"] > 0.4 * bound_age
    print(
        f"{'':17s} lead / bound: step x {found['step']:.3f} (worst of {len(seeds)} seeds "
        f"{found['worst']:.3f}), age x {found['to_bound']:.2f}; age / oracle "
        f"{found['age'] / found['oracle']:.2f}; 40 % of the age of bound is {0.4 * bound_age:.2f}, "
        f"the oracle's at {GOAL} x its step {found['oracle_105']:.2f}"
        f"{': out of reach of the oracle' if out_of_reach else ''}",
        flush=True,
    )


def print_slots(name: str, slots: int, limit: int | None, steps: int, seeds: Sequence[int]) -> None:
    """Step and age by rule where engines run only ``slots`` rollouts at once."""
    found: dict[str, list[dict[str, float]]] = {"bound": [], "one_ahead": [], "lead": []}
    for seed in seeds:
        for rule, runs in found.items():
            setting = cell(name, 1.0, steps, seed, RULES[rule])
            setting.slots = slots
            setting.max_inflight = limit or setting.max_inflight
            runs.append(measured(setting))

    cells = []
    for rule, runs in found.items():
        step = statistics.fmean(run["step"] for run in runs)
        age = statistics.fmean(run["age"] for run in runs)
        prefix = f"tail_slots.{name}.{slots}.{limit or 'none'}.{rule}"
        record(f"{prefix}.step", step, "s")
        record(f"{prefix}.age", age, "versions")
        cells.append(f"{rule} {step:.2f} s / {age:.1f}")
    print(f"{name:12s} {slots:3d} at once, limit {limit or '-'}: {', '.join(cells)}", flush=True)


def print_head() -> None:
    print(f"{'':12s} {'s':>4s} {'rule':10s}", *(f"{name:>15s}" for name in COLUMNS))


def print_row(name: str, trainer: float, rule: str, figures: Mapping[str, float]) -> None:
    values = " ".join(f"{figures[column]:15.3f}" for column in COLUMNS)
    print(f"{name:12s} {trainer:4.1f} {rule:10s} {values}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
