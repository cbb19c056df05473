"""How many batches of each env are requested beyond the one in training.

With L batches requested in advance, a rollout is L versions old on average when it trains (Little's
law, counted in versions). L has to be

    L = 1 + sum over j >= 1 of P(duration of a group > seconds of j steps)

where steps are as short as the durations allow (``least_step``), and a margin, so that one batch is
complete at each version while the others are on their way: a group that takes k steps is requested
k steps before its batch. L lies between 1 (no group takes longer than a step) and S =
``max_off_policy_steps``.

The margin is a number of standard deviations of how many groups of a batch are late. It follows the
trainer: it grows while the trainer is starved for more than ``PRICE`` of a step, and shrinks while
it is starved for less. Each env has its own: the trainer may be starved because others would
overtake one of them. What turns out to cost nothing does not count: had the trainer been starved
for less, it would have been held for longer by a group that was in flight.

The ideal rule would know which groups will be long, and open each so that it ends just before its
batch begins (the oracle of ``python -m bench tail``). This one knows the distribution, the ages of
the groups in flight and the trainer's pace. The margin is the price of what it does not know: which
groups that open now will be long. It also cannot know that durations are about to change.

An env may need a longer lead than S. What it needs is estimated beyond S, and its margin is left as
it is: it waits for a tail then, not for a longer lead.

The lead is for tails: a few long groups are out while the engines have room. Engines that are busy
already are no faster with more requests. Groups only queue there: their durations grow, and the
lead would grow with them. ``Reach`` limits the lead then.

With S = 0 and S = 1 the lead is S, and nothing is measured.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from prime_rl.orchestrator.admission.durations import Durations, Survival
from prime_rl.orchestrator.admission.inflight import Demand
from prime_rl.orchestrator.admission.least_step import LeastStep
from prime_rl.orchestrator.admission.pace import Load, Pace
from prime_rl.orchestrator.admission.reach import KnownLead, Reach
from prime_rl.orchestrator.admission.tickets import Ticket

CHOICES = 512
"""Groups that were chosen last; the share of each env is counted among them."""

PRICE = 0.025
"""Share of a step for which the trainer may be starved, for freshness: half of the 5 % by which
steps may be longer than with the longest lead. The last hundredths cost the most age, since the
batch that fills late by chance has to be in flight then."""

GAIN = 0.5
"""Standard deviations that the margin grows if the trainer was starved for a whole step more than
``PRICE``."""

MARGIN = 0.3
MOST_MARGIN = 1.0
"""Standard deviations at the start of a run, and at most; at least, it is minus that: the mean may
be too long for the price."""

QUIET = 1 / 64
"""Share of the seconds without a new version after which groups that age are looked at again: after
16 steps that is less often than each quarter of one, and an hour takes some hundred looks."""

TOLERANCE = 1e-9


class Leads:
    """The leads of a run's envs, from the durations of their groups and the trainer's pace."""

    def __init__(
        self,
        *,
        batch_size: int,
        max_off_policy_steps: int,
        fixed: float | None,
        places: Callable[[str, int], float],
        unit: Callable[[str], float] = lambda env: 1.0,
    ) -> None:
        self._batch_size = batch_size
        self._max_lead = float(max_off_policy_steps)
        self._fixed = fixed
        self._places = places
        self._unit = unit
        self.durations: dict[str, Durations] = {}
        self.pace = Pace()
        self.least_step = LeastStep(max_off_policy_steps)
        self.reach = Reach()
        self.in_turn = False
        """Engines and trainer share the GPUs."""
        self.margins: dict[str, float] = {}
        """By env."""
        self.by_durations: dict[str, float] = {}
        """By env, without any limit."""
        self.look_again: float | None = None
        """Seconds after which ``measure`` has something new to say. None: nothing is measured."""
        self._demands: dict[str, Demand] = {}
        self._step_seconds = 0.0
        self._served_at = 0.0
        self._measured: tuple[int, float] | None = None
        self._chosen: deque[tuple[str, int]] = deque()
        """Env and size of the groups that were chosen last."""
        self._chosen_members: Counter[str] = Counter()
        """Their members, by env."""
        self._sizes: dict[str, int] = {}

    # -- what happens to a group ------------------------------------------------------------------

    def chosen(self, env: str, size: int) -> None:
        """A group of ``size`` members was chosen."""
        self._chosen.append((env, size))
        self._chosen_members[env] += size
        self._sizes[env] = size
        if len(self._chosen) > CHOICES:
            old_env, old_size = self._chosen.popleft()
            self._chosen_members[old_env] -= old_size

    def opened(self, ticket: Ticket) -> None:
        self.durations.setdefault(ticket.env_name, Durations()).open(ticket.duration)

    def ended(self, ticket: Ticket) -> None:
        """Complete, or cancelled in flight."""
        self.durations[ticket.env_name].num_inflight -= 1
        if ticket.ages:
            self.least_step.ended(ticket.policy_version, ticket.seconds)

    def version_served(self, version: int, now: float, most_inflight: float) -> None:
        """The engines sample from ``version``."""
        pace = self.pace
        pace.version_served(version, now)
        self._served_at = now

        training = pace.training
        if self._max_lead < 2 or not pace.last_seconds or not training:
            return

        # In units of the shortest step: measured steps are longer where a lead is too short.
        step_seconds = float(self.least_step.intervals(training, version)[0].mean())
        wanted = {
            env: min(self.by_durations.get(env, 1.0), self._max_lead) for env in self.durations
        }
        for env, lead in wanted.items():
            # A lead at its limit does not depend on its margin, so the margin stays.
            if lead <= self.reach.limit and lead < self._max_lead:
                # The trainer waited for groups of any env, or for groups of this one.
                starved = pace.last_starved.get(None, 0.0) + pace.last_starved.get(env, 0.0)
                starved -= pace.last_made_up
                margin = self.margins.get(env, MARGIN) + GAIN * (starved / step_seconds - PRICE)
                self.margins[env] = min(max(margin, -MOST_MARGIN), MOST_MARGIN)

        lead = max(wanted.values(), default=1.0)
        pace.load.limit = most_inflight

        is_judged = self.reach.version_served(
            pace.last_seconds, lead, load=pace.load, group_seconds=self._group_seconds(now)
        )
        if is_judged:
            pace.load = Load()

    def _group_seconds(self, now: float) -> float | None:
        """Seconds of a typical group: the median of each env, weighted by the envs' shares. None:
        no group of an env has come back."""
        medians = []
        for env, durations in self.durations.items():
            if durations.mean is None:
                return None
            medians.append(self._share(env) * durations.survival(now).median)
        return sum(medians) if medians else None

    # -- the leads --------------------------------------------------------------------------------

    def lead(self, env: str) -> float:
        """Batches of the env that are requested beyond the one in training."""
        if self._fixed is not None:
            return min(self._fixed, self._max_lead)
        limit = self._max_lead if self.in_turn else min(self._max_lead, self.reach.limit)
        return min(self.by_durations.get(env, 1.0), limit)

    @property
    def longest(self) -> float:
        """The longest lead of all envs."""
        leads = [self.lead(env) for env in self.by_durations]
        return max(leads, default=self.lead(""))

    @property
    def demands(self) -> Mapping[str, Demand]:
        """By env, as last measured."""
        return {
            env: Demand(each.rate, min(each.seconds, self.lead(env) * self._step_seconds))
            for env, each in self._demands.items()
        }

    def measure(self, version: int, now: float, tickets: Iterable[Ticket]) -> bool:
        """Estimate the leads anew: at a new version, and when groups in flight have aged. Returns
        whether it did."""
        training = self.pace.training
        if self._max_lead < 2 or training is None or self._fixed is not None:
            return False

        intervals = self.least_step.intervals(training, version)
        if self.in_turn:
            # Sampling and training alternate, so a whole step counts.
            intervals = self.pace.cycle * np.arange(1.0, self._max_lead + 1)[:, None]

        seconds = float(intervals[0].mean())
        # Groups in flight age meanwhile, so there is news before the next version.
        quarter = max(seconds / 4, 1e-3)
        self.look_again = max(quarter, QUIET * (now - self._served_at))
        if self._measured is not None:
            before, at = self._measured
            if version == before and now - at < quarter - TOLERANCE:
                return False

        self._measured = version, now
        self._step_seconds = max(seconds, TOLERANCE)

        ages: dict[str, list[float]] = {env: [] for env in self.durations}
        for ticket in tickets:
            if ticket.opened_at is not None and not ticket.is_complete:
                ages[ticket.env_name].append(now - ticket.opened_at)

        for env, durations in self.durations.items():
            survival = durations.survival(now)
            late = self._late(
                env,
                survival,
                intervals=intervals,
                since_opened=durations.ages(now),
                inflight=np.array(ages[env]),
            )
            self.by_durations[env] = 1.0 + late

            rate = self.rollouts_per_batch * self._share(env) / self._step_seconds
            self._demands[env] = Demand(rate, survival.mean)

        return True

    def _late(
        self,
        env: str,
        survival: Survival,
        intervals: np.ndarray,
        since_opened: np.ndarray,
        inflight: np.ndarray,
    ) -> float:
        """Batches of the env that are still on their way when the next batch is needed.

        ``intervals``: those of ``LeastStep``. ``since_opened``: seconds since each group that is
        remembered was opened. ``inflight``: the same, of those in flight.
        """
        step = self._step_seconds
        # Beyond S steps, of the usual length: more may be needed than is allowed.
        beyond = intervals[-1] + step * np.arange(1.0, self._max_lead + 1)[:, None]
        shares = survival.beyond(np.concatenate([intervals, beyond])).mean(axis=1)

        # By chance, more or fewer of the groups that were opened will be out than usual. The
        # difference is made up for.
        usual = float(survival.beyond(since_opened + step).sum())
        before = survival.beyond(inflight)
        after = survival.beyond(inflight + step)
        late = np.divide(after, before, out=np.zeros_like(after), where=before > 0)
        deviation = float(late.sum()) - usual

        # Each group of a batch is late by itself, so their number varies as in coin tosses.
        places = self.rollouts_per_batch * self._share(env) * self._unit(env)
        num_groups = places / self._places(env, self._sizes.get(env, 1))
        spread = float(np.sqrt(num_groups * (shares * (1.0 - shares)).sum()))
        margin = self.margins.get(env, MARGIN) * spread
        return max(0.0, float(shares.sum()) + (deviation + margin) / num_groups)

    @property
    def rollouts_per_batch(self) -> float:
        """Where a batch counts tokens, the number follows from the shares of the envs."""
        total = self._chosen_members.total()
        if not total:
            # Before the first choice, the estimate is that of an env without any rollout.
            return self._batch_size / self._unit("")
        places = sum(n * self._unit(env) for env, n in self._chosen_members.items())
        return self._batch_size * total / places

    def _share(self, env: str) -> float:
        """The env's share of the groups that were chosen lately."""
        num_members = self._chosen_members[env]
        return num_members / self._chosen_members.total() if num_members else 1.0

    # -- reports, and resuming from a checkpoint --------------------------------------------------

    def take_metrics(self) -> dict[str, float]:
        """How the seconds since the last call were spent, and the leads."""
        metrics = {f"pace/{cause}": seconds for cause, seconds in self.pace.take_spent().items()}
        for env, seconds in self.pace.take_held().items():
            metrics[f"pace/held/{env}"] = seconds
        for env, durations in self.durations.items():
            metrics[f"dispatcher/lead/{env}"] = self.lead(env)
            if durations.mean is not None:
                metrics[f"dispatcher/group_seconds/{env}"] = durations.mean

        for env, demand in self.demands.items():
            metrics[f"dispatcher/demand/{env}"] = demand.number
        return metrics

    @property
    def known(self) -> KnownLead | None:
        """None: nothing has been measured."""
        return self.reach.known(self.by_durations, self.margins) if self.by_durations else None

    def resume(self, known: KnownLead) -> None:
        """Continue with the leads of an earlier attempt, until they can be measured."""
        self.reach.resume(known)
        self.by_durations = dict(known.leads)
        self.margins = dict(known.margins)
