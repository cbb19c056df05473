"""Long-tailed rollouts: seconds of a step and age of what trains, by admission rule.

    python -m bench.tail [--steps 400] [--scale]

A virtual clock runs the orchestrator's own ``Admission`` against engines whose replies take as long
as a distribution says, and a trainer that takes a fixed time. Nothing sleeps. Batches have 64
rollouts in groups of 8, ``max_off_policy_steps`` is 8. The rules:

    one_ahead    batches may be requested one beyond the one in training (a fixed lead of 1)
    bound        everything that may still train in time is requested (a fixed lead of 8): AReaL
    lead         the lead follows the measured durations: what the orchestrator does

``over_ideal`` is seconds per step over the longer of the trainer and sampling at capacity. A tail
may allow no more: if everything that was requested trains, a step takes at least the longest group
over ``max_off_policy_steps + 1``. ``least_age`` is the mean duration of a group in steps: about the
least age that is possible at that pace. ``ks`` is the distance between the durations that trained
and those that were requested (Kolmogorov-Smirnov), the former without the first and last steps.

``--scale`` simulates 64 engines with 10,000 rollouts in flight. ``python -m bench overlap --tail``
measures the real orchestrator.
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from prime_rl.orchestrator.admission import Admission, Standing, Ticket

Draw = Callable[[random.Random], float]
"""The seconds of one rollout."""

ENVS: dict[str, dict[str, Draw]] = {
    "constant": {"a": lambda chance: 0.5},
    "exponential": {"a": lambda chance: chance.expovariate(2.0)},
    "lognormal": {"a": lambda chance: 0.25 * math.exp(chance.gauss(0.0, 1.2))},
    "5 % x 12": {"a": lambda chance: 6.0 if chance.random() < 0.05 else 0.5},
    "two envs": {"fast": lambda chance: 0.5, "slow": lambda chance: 10.0},
}
RULES: dict[str, float | None] = {"one_ahead": 1.0, "bound": math.inf, "lead": None}
TRAINERS = 0.5, 1.0, 2.0
WARM_UP = 50
"""Steps that are not measured: the lead is not known yet."""
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
    failing: float = 0.0
    """Share of rollouts that fail."""
    seed: int = 0


@dataclass(eq=False)
class SimulatedGroup(Ticket):
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
        self.version, self.step, self.num_buffered, self.num_inflight = 0, 1, 0, 0
        self.admission = self.new_admission()
        self.batches: list[list[Trained]] = []
        """Those that were sent, in order."""
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
        self._cancelled: dict[int, SimulatedGroup] = {}

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
        return Standing(self.version, self.step, self.num_buffered, self.num_inflight)

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
            self._member_ended(number, member)
        self._settle()

    # -- engines ----------------------------------------------------------------------------------

    def _start(self, group_id: int, member: int) -> None:
        if self.setting.slots is not None and self._running >= self.setting.slots:
            self._queue.append((group_id, member))
            return
        group = self.admission.tickets.get(group_id)
        if not isinstance(group, SimulatedGroup):  # cancelled while it was queued
            return
        self._running += 1
        ends = self.now + group.members[member]
        heapq.heappush(self._events, (ends, ENDED, group_id, member))

    def _member_ended(self, group_id: int, member: int) -> None:
        self._running -= 1
        if self._queue:
            self._start(*self._queue.popleft())
        group = self.admission.tickets.get(group_id)
        if not isinstance(group, SimulatedGroup):
            return
        self.num_inflight -= 1
        group.num_left -= 1
        self.counts["failed" if group.failed[member] else "finished"] += 1
        self.admission.pace.count(self.num_inflight, self.now)
        if not group.num_left:
            self.admission.complete(group, self.now)

    def _drop_stale(self, version: int) -> None:
        oldest = version - self.setting.max_off_policy_steps
        for group in [*self.admission.tickets.values()]:
            assert isinstance(group, SimulatedGroup)
            is_open = group.opened_at is not None
            if is_open and group.num_left and group.policy_version < oldest:
                self.counts["cancelled"] += group.num_left
                self.num_inflight -= group.num_left
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
            self._wire, self._is_training = None, True
            ends = self.now + self.setting.trainer
            heapq.heappush(self._events, (ends, TRAINED, len(self.batches), 0))
            moved = True
        return moved

    def _open(self) -> bool:
        admission, before = self.admission, self.counts["dispatched"]
        if admission.measure(self.version, self.now):
            seconds = admission.look_again
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
        group = SimulatedGroup(self.num_chosen, name, size, num_left=size)
        group.members = [setting.envs[name](self._chance) for _ in range(size)]
        group.failed = [self._chance.random() < setting.failing for _ in range(size)]
        self.num_chosen += 1
        return group

    def _open_group(self, ticket: Ticket) -> None:
        assert isinstance(ticket, SimulatedGroup)
        self.admission.open(ticket, self.version, self.now)
        self.counts["dispatched"] += ticket.size
        self.dispatched += ticket.members
        self.num_inflight += ticket.size
        self.most_inflight = max(self.most_inflight, self.num_inflight)
        accepted = (self.step - 1) * self.setting.batch_size + self.num_buffered
        self.opened.append((self.version, accepted, self.admission.num_open))
        for member in range(ticket.size):
            self._start(ticket.group_id, member)


def distance(some: list[float], others: list[float]) -> float:
    """Kolmogorov-Smirnov: the largest difference of two distributions' shares."""
    values = np.array(sorted({*some, *others}))
    shares = [
        np.searchsorted(np.sort(each), values, side="right") / len(each) for each in (some, others)
    ]
    return float(np.abs(shares[0] - shares[1]).max())


def measured(setting: Setting) -> dict[str, float]:
    """The figures of one run, without its first steps."""
    started = time.process_time()
    simulation = Simulation(setting).run()
    cpu = time.process_time() - started
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
        "least_age": statistics.fmean(span / seconds for span in spans),
        "ks": distance(trained_seconds, simulation.dispatched),
        "lost": float(lost),
        "inflight": float(simulation.most_inflight),
        "cpu_ms_per_step": cpu / setting.steps * 1e3,
    }


COLUMNS = "step", "over_ideal", "age", "age_90", "least_age", "ks", "lost", "cpu_ms_per_step"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
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
        print_row("64 engines", 1.0, "lead", measured(large))
        return 0
    print(f"{'':12s} {'s':>4s} {'rule':10s}", *(f"{name:>15s}" for name in COLUMNS))
    for name, envs in ENVS.items():
        for trainer in TRAINERS:
            figures = {}
            for rule, lead in RULES.items():
                setting = Setting(envs, trainer, asked.steps, lead=lead)
                figures[rule] = measured(setting)
                print_row(name, trainer, rule, figures[rule])
            slower = figures["lead"]["step"] / figures["bound"]["step"]
            younger = figures["lead"]["age"] / figures["bound"]["age"]
            print(f"{'':17s} lead / bound: step x {slower:.3f}, age x {younger:.2f}", flush=True)
    return 0


def print_row(name: str, trainer: float, rule: str, figures: Mapping[str, float]) -> None:
    values = " ".join(f"{figures[column]:15.3f}" for column in COLUMNS)
    print(f"{name:12s} {trainer:4.1f} {rule:10s} {values}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
