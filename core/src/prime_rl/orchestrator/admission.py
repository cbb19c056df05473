"""Which groups may open, and which complete ones the next batch gets. No I/O, no clock: the
dispatcher and the simulator of ``python -m bench tail`` use the same rule.

Two limits are kept apart:

    bound    nothing is opened that could not train within ``max_off_policy_steps`` = S versions:
             accepted + requested <= (S + version + 1) * batch_size      (AReaL, arXiv 2505.24298)
    lead     what is requested in advance is as fresh as the trainer allows. With L batches
             requested beyond the one in training, a rollout is L versions old on average when it
             trains (Little's law, counted in versions). L has to be

                 L = 1 + sum over j >= 1 of P(duration of a group > j * seconds of a step)

             so that one batch is complete at each version while the others are on their way: a
             group that takes k steps is requested k steps before its batch. L lies between 1 (no
             group takes longer than a step) and S, and each env has its own.

The lead is for tails: a few long groups are out while the engines have room. Engines that are busy
with everything that was requested are no faster with more, and groups only queue there: their
durations grow, and the lead would grow with them. ``Reach`` limits the lead then.

With S = 0 and S = 1 both limits are the bound, and nothing is measured.

Each request has a place in the sequence of batches: its rank among everything that was chosen and
has not been taken in. An env with short episodes opens its groups when their place is near, an env
with long ones earlier, so both reach the batch that they were chosen for, in the ratio in which the
sampler chose them.

Complete groups are handed on, oldest first, while two conditions hold. The batches ahead keep
places for every older group, until the last batch that may train it: what trains would else be
shorter than what was requested, because long rollouts age the most. And an env does not overtake
the others by more than ``AHEAD`` of a batch.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import ceil, inf
from statistics import fmean, median_low

import numpy as np

WINDOW = 128
INFLIGHT_WINDOW = 4
"""The groups of an env that were opened last and whose durations are remembered: so many, and so
many times those in flight. What was slow only at the start of a run is soon forgotten."""

CHOICES = 512
"""Groups that were chosen last; the share of each env is counted among them."""

STEPS = 10
"""Steps whose seconds are remembered."""

AHEAD = 0.25
"""Share of a batch by which an env may overtake the others. Over ten steps, the ratio of the envs
then deviates by a few percent."""

LATE = 1.04
"""Steps count as this much longer than measured: the last hundredths of a second are worth half a
version of age."""

CORRECTED = 0.5
"""Share of a chance deviation that is made up for."""

TOLERANCE = 1e-9

QUEUE = 0.25
"""Share of the engines' capacity that may wait, so that a place that becomes free is taken at once,
and rollouts that are busy in their environment do not leave it empty."""

BLOCK = 8
"""Steps under one limit of the lead before it is judged."""

SETTLE = 3
"""Steps at the start of a run that are not judged: processes warm up."""

STARVED = 0.04
"""Share of the seconds for which the trainer may be starved without a reason to request more."""

ROOM = 0.45
FULL = 0.6
"""Rollouts in flight while the trainer is starved, as a share of the most in flight. Below ROOM, a
few long rollouts are left; above FULL, the engines are busy with what was requested."""

WORTH = 0.2
"""Share of the seconds for which the trainer is starved that makes a lower limit worth a trial: one
that fails costs a few slow steps."""

NO_SLOWER = 1.03
"""A lower limit may make steps this much longer."""

LESS = 0.5
"""How much of a lead beyond 1 a lower limit leaves."""

LITTLE = 0.25
"""Versions of a lead beyond 1 that are not worth a trial."""

HOLD = 200
"""Steps until a limit that was kept is judged again; twice as many each time."""

CAUSES = "training", "held", "starved"
"""What the seconds of a step are spent on."""


@dataclass(eq=False)
class Ticket:
    """A group that was chosen and is not taken in yet."""

    group_id: int
    """Groups are chosen in this order."""
    env_name: str
    size: int
    """Rollouts that it requests."""
    policy_version: int = 0
    """The version when it was opened; its staleness counts from it."""
    opened_at: float | None = None
    """None: it waits for its place to come near."""
    seconds: float = 0.0
    """From its opening until it was complete or cancelled."""
    is_complete: bool = False
    is_cancelled: bool = False
    handed_on: bool = False

    @property
    def ages(self) -> bool:
        """False: no live policy samples it, so it never goes stale."""
        return True

    def age(self, now: float) -> float:
        """Seconds for which it has been in flight, or was until it was cancelled."""
        return self.seconds if self.is_cancelled else now - (self.opened_at or 0.0)


@dataclass(frozen=True)
class Standing:
    """Where the run is."""

    version: int
    """The engines sample from it."""
    step: int
    """Of the batch that is being filled."""
    num_buffered: int
    """Rollouts that have a place in that batch."""
    num_inflight: int = 0
    """Rollouts that are being sampled."""


class Durations:
    """How long the groups of one env take, from those that came back and those that have not."""

    def __init__(self) -> None:
        self._opened: deque[Ticket] = deque()
        """The groups that were opened last, in this order."""
        self.num_inflight = 0

    def open(self, ticket: Ticket) -> None:
        self._opened.append(ticket)
        self.num_inflight += 1
        while len(self._opened) > max(WINDOW, INFLIGHT_WINDOW * self.num_inflight):
            self._opened.popleft()

    @property
    def mean(self) -> float | None:
        """Of those that came back. None: no group has."""
        seconds = [ticket.seconds for ticket in self._opened if ticket.is_complete]
        return fmean(seconds) if seconds else None

    def survival(self, now: float) -> Survival:
        """The distribution, as far as it is known."""
        return Survival(
            ended=np.array([each.seconds for each in self._opened if each.is_complete]),
            ages=np.array([each.age(now) for each in self._opened if not each.is_complete]),
        )

    def ages(self, now: float) -> np.ndarray:
        """Seconds since each group was opened, whether it has come back or not."""
        return np.array([now - (ticket.opened_at or 0.0) for ticket in self._opened])


class Survival:
    """The share of groups that take longer than a time: the Kaplan-Meier estimate.

    A group in flight counts as one that takes longer than its age. Without it, the long groups
    would be missing until they come back. No group is expected to take longer than the longest that
    was seen.
    """

    def __init__(self, ended: np.ndarray, ages: np.ndarray) -> None:
        """``ended``: seconds of the groups that came back. ``ages``: of those that have not."""
        everything = np.sort(np.concatenate([ended, ages]))
        self._ended = np.sort(ended)
        self._longest = everything[-1] if len(everything) else 0.0
        at_risk = len(everything) - np.searchsorted(everything, self._ended, side="left")
        # Equal durations leave one after the other, so that each factor is a single departure.
        ties = np.arange(len(ended)) - np.searchsorted(self._ended, self._ended, side="left")
        self._shares = np.cumprod(np.append(1.0, 1.0 - 1.0 / (at_risk - ties)))

    def beyond(self, seconds: np.ndarray) -> np.ndarray:
        """The share that takes longer, for each of ``seconds``."""
        shares = self._shares[np.searchsorted(self._ended, seconds, side="right")]
        return np.where(seconds < self._longest, shares, 0.0)


@dataclass
class Load:
    """How busy the engines were while the trainer had no batch."""

    seconds: float = 0.0
    starved: float = 0.0
    inflight: float = 0.0
    """Rollouts in flight, times the seconds for which the trainer was starved."""
    most: float = 0.0
    limit: float = inf
    """Of rollouts in flight, by the config or the engines."""

    def add(self, cause: str, seconds: float) -> None:
        self.seconds += seconds
        if cause == "starved":
            self.starved += seconds

    @property
    def is_starved(self) -> bool:
        return self.starved > STARVED * self.seconds

    @property
    def is_full(self) -> bool:
        """Whether the engines were busy with most of what was requested."""
        return self.inflight > FULL * self.most * self.starved

    @property
    def has_room(self) -> bool:
        """Whether only a few rollouts were left."""
        return self.inflight <= ROOM * self.most * self.starved

    @property
    def is_limited(self) -> bool:
        """Whether no longer lead could bring more rollouts in flight."""
        return self.most >= self.limit


class Reach:
    """The limit of the lead: 1 until a trainer that is starved shows that more is of use.

    A run starts with a limit of 1, which is kept while the trainer always has a batch. If it is
    starved, there are two cases:

        room    few rollouts are in flight then, which are long: the lead has no limit any more
        full    the engines are busy. A longer lead is of use only if groups wait for something else
                than the engines, such as a slow environment. Measured durations cannot tell: they
                grow with what waits. So twice the limit is tried for some steps, and kept if it
                makes them shorter by at least half of what it would if nothing queued. It is not
                tried if the limit of rollouts in flight is reached.

    A lead that has no limit, under which the engines are full and the trainer is starved all the
    same, gets lower limits as long as these make no step longer.
    """

    def __init__(self) -> None:
        self.limit = 1.0
        self._before: float | None = None
        """During a trial: the limit before it."""
        self._most_seconds = 0.0
        """During a trial: what its steps may take."""
        self._seconds: list[float] = []
        self._skip = SETTLE
        self._hold = 0
        self._patience = HOLD

    def version_served(self, seconds: float, training: float, lead: float, load: Load) -> bool:
        """``seconds``: of the step. ``training``: those of the trainer. ``lead``: by durations.
        ``load``: since the last judgment. Returns whether ``load`` shall start again."""
        self._hold -= 1
        if self._skip > 0:
            self._skip -= 1
            return True
        self._seconds.append(seconds)
        # What was requested together comes back together: whole rounds are compared.
        per_round = ceil(min(lead, self.limit)) + 1
        if len(self._seconds) < ceil(BLOCK / per_round) * per_round:
            return False

        usual = fmean(self._seconds)
        self._seconds.clear()
        has_failed = self._before is not None and usual > self._most_seconds
        if not has_failed and self._before is not None and self.limit == 1.0:
            self._hold_on()  # what a longer lead brings is known
        if has_failed:
            self._restore(lead)
        elif load.is_starved and load.has_room:
            self._before = None
            if self.limit < inf:
                self._set(inf, lead)
                self._hold = 0
        elif load.is_starved and self._hold <= 0:
            self._begin_trial(usual, training, lead, load)
        else:
            self._before = None
        return True

    def _begin_trial(self, usual: float, training: float, lead: float, load: Load) -> None:
        limit = self.limit
        was_raised = self._before is not None and limit > self._before
        self._before = None
        if was_raised and lead <= limit:
            self._hold_on()  # more in flight was faster
            return
        if (limit == 1.0 or was_raised) and lead > limit and not load.is_limited:
            # More batches in flight would take less time in this proportion, down to the trainer's.
            trial = 2.0 * limit
            best = max((1.0 + limit) / (1.0 + trial), training / usual)
            self._most_seconds = usual * (1.0 + best) / 2
        elif (
            min(limit, lead) > 1.0 + LITTLE and load.is_full and load.starved > WORTH * load.seconds
        ):
            trial = 1.0 + LESS * (min(limit, lead) - 1.0)
            trial = trial if trial > 1.0 + LITTLE else 1.0
            self._most_seconds = usual * NO_SLOWER
        else:
            return
        self._before = limit
        self._set(trial, lead)

    def _restore(self, lead: float) -> None:
        """The limit before a trial that has failed."""
        assert self._before is not None
        self._set(self._before, lead)
        self._before = None
        self._hold_on()

    def _hold_on(self) -> None:
        self._hold = self._patience
        self._patience *= 2

    def _set(self, limit: float, lead: float) -> None:
        """What was requested under the other limit trains first, and is not judged."""
        if limit != self.limit:
            self._skip = ceil(min(lead, max(limit, self.limit))) + 1
        self.limit = limit


class Pace:
    """What the seconds of a step were spent on, as the trainer sees it."""

    def __init__(self) -> None:
        self._training: deque[float] = deque(maxlen=STEPS)
        self._held: deque[float] = deque(maxlen=STEPS)
        self._cycles: deque[float] = deque(maxlen=STEPS)
        self._version: int | None = None
        self._served_at = self._looked_at = 0.0
        self._sent_at: dict[int, float] = {}
        self._cause = "training"
        self._env: str | None = None
        self._held_now = 0.0
        """Seconds held since the version was served."""
        self._inflight = 0
        self._counted_at = 0.0
        self.load = Load()
        self.spent: dict[str, float] = dict.fromkeys(CAUSES, 0.0)
        """Seconds by cause: ``training``; the trainer had no batch because it was ``held`` for a
        group that is late, or ``starved`` because too few groups were complete."""
        self.held: dict[str, float] = {}
        """Seconds ``held``, by the env of the group that was waited for."""

    def batch_sent(self, step: int, now: float) -> None:
        self._sent_at[step] = now

    def version_served(self, version: int, now: float) -> None:
        """The trainer has made ``version`` out of the batch of that number."""
        if self._version is not None and version > self._version:
            steps = version - self._version
            began = max(self._served_at, self._sent_at.get(version, self._served_at))
            self._training.append(max(now - began, 0.0) / steps)
            self._held.append(self._held_now / steps)
            self._cycles.append((now - self._served_at) / steps)

        self._held_now = 0.0
        self._version = version
        self._served_at = now
        self._sent_at = {step: at for step, at in self._sent_at.items() if step > version}

    def look(self, cause: str, waits_for: str | None, inflight: int, now: float) -> None:
        """The trainer's state from now on; the time since the last look had the cause of then.
        ``waits_for``: the env of the group that it is held for."""
        elapsed = max(now - self._looked_at, 0.0) if self._looked_at else 0.0
        self.spent[self._cause] += elapsed
        self.load.add(self._cause, elapsed)
        self.count(inflight, now)
        if self._cause == "held":
            self._held_now += elapsed
            env = self._env or ""
            self.held[env] = self.held.get(env, 0.0) + elapsed

        self._cause = cause
        self._env = waits_for
        self._looked_at = now

    def count(self, inflight: int, now: float) -> None:
        """Rollouts in flight from now on."""
        if self._cause == "starved":
            self.load.inflight += self._inflight * max(now - self._counted_at, 0.0)
        self.load.most = max(self.load.most, inflight)
        self._inflight = inflight
        self._counted_at = now

    def take_spent(self) -> dict[str, float]:
        """Seconds by cause since the last call."""
        spent = self.spent
        self.spent = dict.fromkeys(CAUSES, 0.0)
        return spent

    def take_held(self) -> dict[str, float]:
        """Seconds ``held`` by env since the last call; an env that was named stays."""
        held = self.held
        self.held = dict.fromkeys(held, 0.0)
        return held

    @property
    def last_seconds(self) -> float:
        """Of the last step; 0.0: none has been trained."""
        return self._cycles[-1] if self._cycles else 0.0

    def step_seconds(self, in_turn: bool) -> float | None:
        """What a step takes if enough groups are complete: the trainer's time, and the time for
        which it is held by a tail. ``in_turn``: sampling and training alternate, so the whole step
        counts. None: no step has been trained."""
        if not self._training:
            return None
        if in_turn:
            return fmean(self._cycles)
        return median_low(self._training) + fmean(self._held)


@dataclass(frozen=True)
class InflightLimit:
    """Rollouts that may be sampled at once, and why so many."""

    number: int
    reason: str
    follows_lead: bool = False
    """The number comes from the lead, and does not limit it."""


def inflight_limit(
    configured: int | None,
    capacities: Sequence[int | None],
    *,
    synchronous: int | None,
    batch_size: int,
    longest_lead: float,
) -> InflightLimit:
    """The limit of a run.

    ``configured``: the user's. ``capacities``: what each engine that serves can run at once, None
    if it does not say. ``synchronous``: what a run with ``max_off_policy_steps = 0`` needs; None
    for other runs. ``longest_lead``: batches that are requested beyond the one in training, by the
    measured durations; with throughput times duration (Little's law) that many are in flight.
    """
    if configured is not None:
        return InflightLimit(configured, "orchestrator.max_inflight_rollouts")
    if synchronous is not None:
        return InflightLimit(synchronous, "one batch, since max_off_policy_steps = 0")
    known = [capacity for capacity in capacities if capacity is not None]
    if known and len(known) == len(capacities):
        number = ceil(sum(known) * (1 + QUEUE))
        return InflightLimit(
            number, f"{len(known)} engines run {sum(known)} at once, and {QUEUE:.0%} wait"
        )

    batches = max(2.0, longest_lead + 1)
    number = ceil(batches * batch_size)
    if batches > 2:
        why = f"{batches:.1f} batches, by the durations of groups"
        return InflightLimit(number, why, follows_lead=True)
    return InflightLimit(number, "two batches", follows_lead=True)


class Admission:
    """The groups that were chosen and are not taken in, and what may happen to them."""

    def __init__(
        self,
        *,
        batch_size: int,
        max_off_policy_steps: int,
        max_steps: int,
        oversampling_factor: float = 1.0,
        lead: float | None = None,
        places: Callable[[str, int], float] = lambda env, members: members,
    ) -> None:
        """``lead``: fixed, for comparisons. ``places``: the rollouts that so many members of an env
        will bring."""
        self.batch_size = batch_size
        self.max_off_policy_steps = max_off_policy_steps
        self._max_steps = max_steps
        self._factor = oversampling_factor
        self._fixed_lead = lead
        self._places = places
        self.most_inflight = inf
        """Rollouts that the engines or the config allow, as far as known."""
        self.in_turn = False
        """Engines and trainer share the GPUs."""
        self.in_order = max_off_policy_steps == 0
        self.tickets: dict[int, Ticket] = {}
        """In the order in which they were chosen."""
        self.durations: dict[str, Durations] = {}
        self.pace = Pace()
        self.reach = Reach()
        self._members: Counter[str] = Counter()
        """Members of the tickets, by env."""
        self._unopened: dict[int, Ticket] = {}
        self._complete: dict[int, Ticket] = {}
        """Those that are not handed on yet."""
        self._passed: Counter[str] = Counter()
        """Members of groups that are handed on and not taken in, by env."""
        self._by_version: dict[int, Counter[str]] = {}
        """Members of groups that are open, not handed on, and go stale, by version and env."""
        self._leads: dict[str, float] = {}
        self._measured: tuple[int, float] | None = None
        self._chosen: deque[tuple[str, int]] = deque(maxlen=CHOICES)
        """The env and the size of the groups that were chosen last."""
        self.look_again: float | None = None
        """Seconds after which ``measure`` has something new to say. None: nothing is measured."""

    # -- what happens to a group ------------------------------------------------------------------

    def choose(self, ticket: Ticket) -> None:
        """The sampler has chosen a group; it has the highest id so far, or is requested again."""
        self.tickets[ticket.group_id] = ticket
        self._unopened[ticket.group_id] = ticket
        self._members[ticket.env_name] += ticket.size
        self._chosen.append((ticket.env_name, ticket.size))

    def open(self, ticket: Ticket, version: int, now: float) -> None:
        """Its members are being sampled."""
        ticket.policy_version = version
        ticket.opened_at = now
        del self._unopened[ticket.group_id]
        self._age(ticket, ticket.size)
        self.durations.setdefault(ticket.env_name, Durations()).open(ticket)

    def complete(self, ticket: Ticket, now: float) -> None:
        """All its members have come back."""
        ticket.seconds = ticket.age(now)
        ticket.is_complete = True
        self._complete[ticket.group_id] = ticket
        self.durations[ticket.env_name].num_inflight -= 1

    def cancel(self, ticket: Ticket, now: float) -> None:
        """It will not come back."""
        if not ticket.is_complete:
            ticket.seconds = ticket.age(now)
            ticket.is_cancelled = True
            self.durations[ticket.env_name].num_inflight -= 1
        self.remove(ticket)

    def remove(self, ticket: Ticket) -> None:
        """It is taken in."""
        del self.tickets[ticket.group_id]
        self._unopened.pop(ticket.group_id, None)
        self._complete.pop(ticket.group_id, None)
        self._members[ticket.env_name] -= ticket.size
        if ticket.handed_on:
            self._passed[ticket.env_name] -= ticket.size
        else:
            self._age(ticket, -ticket.size)

    def _age(self, ticket: Ticket, members: int) -> None:
        if ticket.ages and ticket.opened_at is not None:
            of_version = self._by_version.setdefault(ticket.policy_version, Counter())
            of_version[ticket.env_name] += members
            if not of_version.total():
                del self._by_version[ticket.policy_version]

    def version_served(self, version: int, now: float) -> None:
        """The engines sample from ``version``."""
        pace = self.pace
        pace.version_served(version, now)
        if self.max_off_policy_steps < 2 or not pace.last_seconds:
            return
        lead = max(self._leads.values(), default=1.0)
        lead = min(lead, float(self.max_off_policy_steps))
        training = pace.step_seconds(in_turn=False) or 0.0
        pace.load.limit = self.most_inflight
        if self.reach.version_served(pace.last_seconds, training, lead, pace.load):
            pace.load = Load()

    def take_metrics(self) -> dict[str, float]:
        """What the seconds since the last call were spent on, and the leads."""
        metrics = {f"pace/{cause}": seconds for cause, seconds in self.pace.take_spent().items()}
        for env, seconds in self.pace.take_held().items():
            metrics[f"pace/held/{env}"] = seconds
        for env, durations in self.durations.items():
            metrics[f"dispatcher/lead/{env}"] = self.lead(env)
            if durations.mean is not None:
                metrics[f"dispatcher/group_seconds/{env}"] = durations.mean
        return metrics

    # -- which may open ---------------------------------------------------------------------------

    def lead(self, env: str) -> float:
        """Batches of the env that are requested beyond the one in training."""
        most = float(self.max_off_policy_steps)
        if self._fixed_lead is not None:
            return min(self._fixed_lead, most)
        if not self.in_turn:
            most = min(most, self.reach.limit)
        return min(self._leads.get(env, 1.0), most)

    @property
    def longest_lead(self) -> float:
        """Of all envs."""
        known = [self.lead(env) for env in self._leads]
        return max(known, default=self.lead(""))

    def measure(self, version: int, now: float) -> bool:
        """Estimate the leads anew: at a new version, and when groups in flight have aged. Returns
        whether it did."""
        seconds = self.pace.step_seconds(self.in_turn)
        if self.max_off_policy_steps < 2 or seconds is None:
            return False
        self.look_again = max(seconds / 4, 1e-3)
        if self._measured is not None:
            before, at = self._measured
            if version == before and now - at < self.look_again - TOLERANCE:
                return False

        self._measured = version, now
        step = max(seconds * LATE, TOLERANCE)
        for env in self.durations:
            self._leads[env] = 1.0 + self._late(env, step, now)
        return True

    def _late(self, env: str, step: float, now: float) -> float:
        """Batches of the env that are still on their way when the next batch is needed."""
        durations = self.durations[env]
        survival = durations.survival(now)
        steps = np.arange(1, self.max_off_policy_steps) * step
        steady = float(survival.beyond(steps).sum())

        # By chance, more or fewer of the groups that were opened will be out than usual. Half of
        # the difference is made up for: what is opened now helps only after it has come back.
        usual = float(survival.beyond(durations.ages(now) + step).sum())
        inflight = np.array(
            [
                now - ticket.opened_at
                for ticket in self.tickets.values()
                if ticket.env_name == env
                and ticket.opened_at is not None
                and not ticket.is_complete
            ]
        )
        before = survival.beyond(inflight)
        after = survival.beyond(inflight + step)
        present = float(np.divide(after, before, out=np.zeros_like(after), where=before > 0).sum())

        batch = self.batch_size * self._share(env) / self._places(env, self._size(env))
        return max(0.0, steady + CORRECTED * (present - usual) / batch)

    def _size(self, env: str) -> int:
        """Members of its groups."""
        return next((size for name, size in reversed(self._chosen) if name == env), 1)

    def _share(self, env: str) -> float:
        """The env's part of what was chosen lately."""
        total = sum(size for _, size in self._chosen)
        mine = sum(size for name, size in self._chosen if name == env)
        return mine / total if mine else 1.0

    @property
    def num_open(self) -> int:
        """Rollouts of groups that are open and not taken in."""
        return self._members.total() - sum(ticket.size for ticket in self._unopened.values())

    def room(self, at: Standing) -> int:
        """How many more rollouts may be chosen now, if their env has the longest lead."""
        return self._room(at, self.longest_lead, self._coming(self._members))

    def is_near(self, ticket: Ticket, at: Standing) -> bool:
        """Whether the group that was chosen last may open."""
        before = self._coming(self._members) - self._places(ticket.env_name, ticket.size)
        return self._room(at, self.lead(ticket.env_name), before) > 0

    def to_open(self, at: Standing) -> Iterator[Ticket]:
        """Chosen groups whose place is near enough, nearest first."""
        if not self._unopened:
            return
        coming = 0.0
        left = len(self._unopened)
        for ticket in [*self.tickets.values()]:
            if ticket.opened_at is None:
                left -= 1
                if self._room(at, self.lead(ticket.env_name), coming) > 0:
                    yield ticket
            if not left:
                return
            coming += self._places(ticket.env_name, ticket.size)

    def _room(self, at: Standing, lead: float, coming: float) -> int:
        """Places up to the last batch that ``lead`` reaches, without those that ``coming``
        takes."""
        needed = self._needed(at, lead) * self._factor
        if self.max_off_policy_steps > 1:
            # What oversampling asks for beyond the bound would only be dropped for its age.
            needed = min(needed, self._needed(at, self.max_off_policy_steps))
        return ceil(needed - coming - TOLERANCE) if needed > 0 else 0

    def _needed(self, at: Standing, lead: float) -> float:
        last_batch = min(at.version + 1 + lead, self._max_steps)
        batches = last_batch - at.step + 1
        return max(0.0, batches * self.batch_size - at.num_buffered) if batches > 0 else 0.0

    def _coming(self, members: Mapping[str, int]) -> float:
        return sum(self._places(env, number) for env, number in members.items())

    # -- which are handed on ----------------------------------------------------------------------

    def hand_on(self, at: Standing, now: float) -> list[Ticket]:
        """Complete groups that the batch gets now."""
        chosen, cause, env = self._handed_on(at)
        for ticket in chosen:
            ticket.handed_on = True
            del self._complete[ticket.group_id]
            self._age(ticket, -ticket.size)
            self._passed[ticket.env_name] += ticket.size

        # Batch ``version + 1`` is the one that the trainer needs next.
        waits = at.step <= at.version + 1
        self.pace.look(cause if waits else "training", env, at.num_inflight, now)
        return chosen

    def _handed_on(self, at: Standing) -> tuple[list[Ticket], str, str | None]:
        """Also the reason if the batch is not full yet, and the env of the group it waits for."""
        if self.in_order:
            prefix = takewhile(
                lambda ticket: ticket.is_complete,
                (t for t in self.tickets.values() if t.opened_at is not None),
            )
            return [ticket for ticket in prefix if not ticket.handed_on], "starved", None

        if self.max_off_policy_steps == 1:
            return [*self._fitting(at)], "starved", None
        if at.step > at.version + 2:
            return [], "training", None  # one complete batch beyond the one in training is enough
        left = self.batch_size - at.num_buffered - self._coming(self._passed)
        reserved = {v: self._coming(c) for v, c in sorted(self._by_version.items())}
        chosen: list[Ticket] = []
        refused = 0.0
        blocker = None
        waiting = sorted(self._complete.values(), key=self._deadline)
        for ticket in waiting:
            if left <= 0:
                break
            places = self._places(ticket.env_name, ticket.size)
            late = self._overtaken(ticket, reserved, left, places, at) or self._env_ahead(
                ticket, {each.group_id for each in chosen}
            )
            if late is not None:
                refused += places
                blocker = blocker or late
                continue

            chosen.append(ticket)
            left -= places
            if ticket.ages:
                reserved[ticket.policy_version] -= places

        cause = "held" if refused and refused >= left > 0 else "starved"
        return chosen, cause, blocker

    def _fitting(self, at: Standing) -> Iterator[Ticket]:
        """With ``max_off_policy_steps = 1``: oldest first, those that no later batch may train,
        while the batch has places; then others, unless they take the place of one of the former in
        flight. What does not fit waits in the buffer."""
        left = self.batch_size - at.num_buffered - self._coming(self._passed)
        due = []
        others = []
        for ticket in self.tickets.values():
            if ticket.handed_on or ticket.opened_at is None:
                continue
            if ticket.ages and ticket.policy_version < at.step - 1:
                due.append(ticket)
            elif ticket.is_complete:
                others.append(ticket)

        for ticket in due:
            if left > 0 and ticket.is_complete:
                yield ticket
            left -= self._places(ticket.env_name, ticket.size)

        expects_due = any(not ticket.is_complete for ticket in due)
        for ticket in others:
            places = self._places(ticket.env_name, ticket.size)
            if left >= places or not expects_due:
                yield ticket
                left -= places

    def _deadline(self, ticket: Ticket) -> tuple[float, int]:
        return (ticket.policy_version if ticket.ages else inf), ticket.group_id

    def _overtaken(
        self,
        ticket: Ticket,
        reserved: Mapping[int, float],
        left: float,
        places: float,
        at: Standing,
    ) -> str | None:
        """The env of an older group that would miss its last batch if ``ticket`` took a place."""
        older = 0.0
        for version, needed in reserved.items():
            if ticket.ages and version >= ticket.policy_version:
                break
            older += needed
            last_batch = max(version + self.max_off_policy_steps + 1, at.step)
            room = left + (last_batch - at.step) * self.batch_size
            if needed > TOLERANCE and older + places > room + TOLERANCE:
                return next(iter(self._by_version[version]))

        return None

    def _env_ahead(self, ticket: Ticket, chosen: set[int]) -> str | None:
        """The env that ``ticket``'s env would overtake by too much."""
        if self.max_off_policy_steps < 2 or len(self._members) < 2:
            return None
        ahead = 0.0
        first = None
        for other in self.tickets.values():
            if other.handed_on or other.group_id in chosen:
                continue
            if other.env_name == ticket.env_name:
                return None
            first = first or other.env_name
            ahead += self._places(other.env_name, other.size)
            if ahead > max(AHEAD * self.batch_size, other.size):
                return first

        return None
