"""The rule: which groups open, and which complete ones the next batch gets.

Two limits are kept apart:

    bound    nothing is opened that could not train within ``max_off_policy_steps`` = S versions:
             accepted + requested <= (S + version + 1) * batch_size      (AReaL, arXiv 2505.24298)
    lead     what is requested in advance is as fresh as the trainer allows (``leads``)

With S = 0 and S = 1 both limits are the bound.

Each request has a place in the sequence of batches: its rank among everything that was chosen and
has not been taken in. An env with short episodes opens its groups when their place is near, an env
with long ones earlier, so both reach the batch that they were chosen for, in the ratio in which the
sampler chose them.

Complete groups are handed on, oldest first, while two conditions hold. The batches ahead keep
places for every older group, until the last batch that may train it: what trains would else be
shorter than what was requested, because long rollouts age the most. And an env does not overtake
the others by more than ``AHEAD`` of a batch, unless the places that are left are kept for its
groups: the others would wait for these, and these for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from math import ceil, inf

from prime_rl.orchestrator.admission.leads import Leads
from prime_rl.orchestrator.admission.pace import Wait
from prime_rl.orchestrator.admission.tickets import Ticket, Tickets

AHEAD = 0.25
"""Share of a batch by which an env may overtake the others. Over ten steps, the ratio of the envs
then deviates by a few percent."""

TOLERANCE = 1e-9
"""Tolerance of a sum of places."""


@dataclass(frozen=True)
class Standing:
    """Where the run is."""

    version: int
    """The engines sample from it."""
    step: int
    """The step of the batch that is being filled."""
    num_buffered: int
    """Rollouts or tokens that are in that batch or wait for a place in it."""
    num_inflight: int = 0
    """Rollouts that are being sampled."""


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
        unit: Callable[[str], float] = lambda env: 1.0,
    ) -> None:
        """``batch_size``: in places: rollouts, or tokens. ``lead``: fixed, for comparisons.
        ``places``: those that so many members of an env will take. ``unit``: those of a rollout of
        an env."""
        self.batch_size = batch_size
        self.max_off_policy_steps = max_off_policy_steps
        self._max_steps = max_steps
        self._factor = oversampling_factor
        self._places = places
        self._unit = unit

        self.most_inflight = inf
        """Rollouts that the engines or the config allow, as far as known."""
        self.in_order = max_off_policy_steps == 0
        self.tickets = Tickets()

        self.leads = Leads(
            batch_size=batch_size,
            max_off_policy_steps=max_off_policy_steps,
            fixed=lead,
            places=places,
            unit=unit,
        )
        self.pace = self.leads.pace

    # -- what happens to a group ------------------------------------------------------------------

    def choose(self, ticket: Ticket) -> None:
        """The sampler has chosen it: it is behind everything else."""
        self.tickets.choose(ticket)
        self.leads.chosen(ticket.env_name, ticket.size)

    def open(self, ticket: Ticket, version: int, now: float) -> None:
        """Its members are being sampled."""
        self.tickets.open(ticket, version, now)
        self.leads.opened(ticket)

    def split(self, ticket: Ticket, part: Ticket, now: float) -> None:
        """A part of an open ticket is complete, and has its place. The rest goes behind everything
        else, and keeps its version and its age. ``part``: its env and size."""
        self.tickets.split(ticket, part)
        self.leads.opened(part)
        self.complete(part, now)

    def complete(self, ticket: Ticket, now: float, size: int | None = None) -> None:
        """All its members have come back: ``size``, if that was not known before. In a synchronous
        run, it keeps its places until it is taken in: what opens then depends on no timing."""
        if size is not None and not self.in_order:
            self.tickets.resize(ticket, size)
        self.tickets.end(ticket, now)
        self.leads.ended(ticket)

    def cancel(self, ticket: Ticket, now: float) -> None:
        """It will not come back."""
        if not ticket.is_complete:
            ticket.duration.cancel(now)
            self.leads.ended(ticket)
        self.tickets.remove(ticket)

    def wait_no_more(self, ticket: Ticket) -> None:
        """It takes no places until ``complete`` says how many members it brings."""
        self.tickets.resize(ticket, 0)

    def remove(self, ticket: Ticket) -> None:
        """It is taken in, or will never open."""
        self.tickets.remove(ticket)

    def version_served(self, version: int, now: float) -> None:
        """The engines sample from ``version``."""
        self.leads.version_served(version, now, self.most_inflight)

    def measure(self, version: int, now: float) -> bool:
        """Estimate the leads anew if there is something new. Returns whether it did."""
        return self.leads.measure(version, now, self.tickets.all.values())

    # -- which may open ---------------------------------------------------------------------------

    def room(self, at: Standing) -> int:
        """How many more rollouts may be chosen now, if their env has the longest lead."""
        return self._room(at, self.leads.longest, self._coming(self.tickets.members))

    def next_step(self, at: Standing) -> int:
        """The step of the batch that a group chosen now has its place in. It depends on what was
        chosen before and on what was lost, but not on how fast the groups are."""
        taken = at.num_buffered + self._coming(self.tickets.members)
        place = at.step + int((taken + TOLERANCE) // self.batch_size)
        # No group is requested for a batch beyond the bound.
        last = min(at.version + 1 + self.max_off_policy_steps, self._max_steps)
        return max(at.step, min(place, last))

    def is_near(self, ticket: Ticket, at: Standing) -> bool:
        """Whether the group that was chosen last may open."""
        # The group's own places do not count, only those of groups before it.
        before = self._coming(self.tickets.members) - self._places(ticket.env_name, ticket.size)
        return self._room(at, self.leads.lead(ticket.env_name), before) > 0

    def to_open(self, at: Standing) -> Iterator[Ticket]:
        """Chosen groups whose place is near enough, nearest first."""
        if not self.tickets.unopened:
            return

        needed = {env: self._places_for(at, self.leads.lead(env)) for env in self.tickets.members}
        most_needed = max(needed.values()) - TOLERANCE

        coming = 0.0
        num_unopened = len(self.tickets.unopened)

        for ticket in [*self.tickets.all.values()]:
            if not num_unopened or coming >= most_needed:
                return

            # Each ticket takes its places, whether it is open or not.
            if ticket.opened_at is None:
                num_unopened -= 1
                if coming < needed[ticket.env_name] - TOLERANCE:
                    yield ticket

            coming += self._places(ticket.env_name, ticket.size)

    def _room(self, at: Standing, lead: float, coming: float) -> int:
        """Places up to the last batch that ``lead`` reaches, without those that ``coming``
        takes."""
        needed = self._places_for(at, lead)
        return ceil(needed - coming - TOLERANCE) if needed > 0 else 0

    def _places_for(self, at: Standing, lead: float) -> float:
        """Places up to the last batch that ``lead`` reaches."""
        needed = self._needed(at, lead) * self._factor
        if self.max_off_policy_steps > 1:
            # Requests of oversampling beyond the bound would only be dropped for their age.
            needed = min(needed, self._needed(at, self.max_off_policy_steps))
        return needed

    def _needed(self, at: Standing, lead: float) -> float:
        last_batch = min(at.version + 1 + lead, self._max_steps)
        batches = last_batch - at.step + 1
        return max(0.0, batches * self.batch_size - at.num_buffered) if batches > 0 else 0.0

    def _coming(self, members: Mapping[str, int]) -> float:
        return sum(self._places(env, number) for env, number in members.items())

    # -- which are handed on ----------------------------------------------------------------------

    def hand_on(self, at: Standing, now: float) -> list[Ticket]:
        """Complete groups that the batch gets now."""
        chosen, wait = self._handed_on(at)
        for ticket in chosen:
            self.tickets.hand_on(ticket)

        # Batch ``version + 1`` is the one that the trainer needs next.
        waits = at.step <= at.version + 1
        self.pace.look(wait if waits else Wait("training"), at.num_inflight, now)
        return chosen

    def _handed_on(self, at: Standing) -> tuple[list[Ticket], Wait]:
        """Also what the trainer waits for if the batch is not full yet."""
        if self.in_order:
            # Tickets that were handed on stay in the prefix until they are taken in.
            prefix = takewhile(
                lambda ticket: ticket.is_complete,
                (t for t in self.tickets.all.values() if t.opened_at is not None),
            )
            return [ticket for ticket in prefix if not ticket.handed_on], Wait("starved")

        if self.max_off_policy_steps == 1:
            return [*self._tickets_that_fit(at)], Wait("starved")
        if at.step > at.version + 2:
            return [], Wait("training")  # one complete batch beyond the one in training is enough

        # Groups that were handed on and are not buffered yet take places too.
        left = self.batch_size - at.num_buffered - self._coming(self.tickets.passed)
        if left <= 0:
            return [], Wait("starved")

        # Versions are sorted, because `_by_last_batch` adds up their places from the oldest on.
        reserved = {v: self._coming(c) for v, c in sorted(self.tickets.by_version.items())}
        chosen: list[Ticket] = []
        refused = {"held": 0.0, "starved": 0.0}
        older: Wait | None = None
        # A group as large as one that has to wait for an older group has to wait too.
        smallest_held = inf
        overtaken: Wait | None = None
        waiting = sorted(self.tickets.complete.values(), key=self._deadline)

        for ticket in waiting:
            if left <= 0:
                break

            places = self._places(ticket.env_name, ticket.size)
            if places < smallest_held:
                late = self._overtaken(ticket, reserved, left=left, places=places, at=at)
                if late is not None:
                    older = older or late
                    smallest_held = places

            if places >= smallest_held:
                refused["held"] += places
                continue

            # With nothing in flight, what an env waits for may only open in a later batch.
            env = None
            if at.num_inflight > 0 and not self._is_due(ticket, reserved, left=left, at=at):
                env = self._env_ahead(ticket, {each.number for each in chosen})
            if env is not None:
                refused["starved"] += places
                overtaken = overtaken or self._wait_for_env(env, at)
                continue

            chosen.append(ticket)
            left -= places
            # This group has its place now, so none has to be reserved for it.
            if ticket.ages and ticket.size:
                reserved[ticket.policy_version] -= places

        # The trainer waits for what keeps the complete groups back, if they would fill the batch.
        if older and refused["held"] >= left > 0:
            return chosen, older
        if overtaken and sum(refused.values()) >= left > 0:
            return chosen, overtaken

        return chosen, Wait("starved")

    def _wait_for_env(self, env: str, at: Standing) -> Wait:
        """Others would overtake ``env`` by too much. If no group of it could have been requested
        earlier, that is a tail; else its lead is too short."""
        if self.leads.lead(env) >= self.max_off_policy_steps:
            return Wait("held", env, version=at.version)
        return Wait("starved", env)

    def _tickets_that_fit(self, at: Standing) -> Iterator[Ticket]:
        """With ``max_off_policy_steps = 1``: oldest first, those that no later batch may train,
        while the batch has places; then others, unless they take the place of one of the former in
        flight. What does not fit waits in the buffer."""
        left = self.batch_size - at.num_buffered - self._coming(self.tickets.passed)
        due = []
        others = []

        for ticket in self.tickets.all.values():
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
        return (ticket.policy_version if ticket.ages else inf), ticket.number

    def _overtaken(
        self,
        ticket: Ticket,
        reserved: Mapping[int, float],
        left: float,
        places: float,
        at: Standing,
    ) -> Wait | None:
        """For an older group that would miss its last batch if ``ticket`` took a place."""
        for version, older, room in self._by_last_batch(reserved, left, at):
            # Only groups that are older than `ticket` come before it.
            if ticket.ages and version >= ticket.policy_version:
                break
            if reserved[version] > TOLERANCE and older + places > room + TOLERANCE:
                ((env, _),) = self.tickets.by_version[version].most_common(1)
                return Wait("held", env, version)

        return None

    def _is_due(
        self, ticket: Ticket, reserved: Mapping[int, float], left: float, at: Standing
    ) -> bool:
        """Whether younger groups have to wait until ``ticket`` and those as old as it have their
        places. It may then overtake other envs: they would wait for it, and it for them."""
        if not ticket.ages:
            return False
        unit = ticket.size * self._unit(ticket.env_name)
        return any(
            version >= ticket.policy_version and older + unit > room + TOLERANCE
            for version, older, room in self._by_last_batch(reserved, left, at)
        )

    def _by_last_batch(
        self, reserved: Mapping[int, float], left: float, at: Standing
    ) -> Iterator[tuple[int, float, float]]:
        """By version, oldest first: the places that groups up to it need, and those that there are
        up to the last batch that may train it."""
        older = 0.0
        for version, needed in reserved.items():
            older += needed
            # A version that is too old already is due in the batch that is being filled.
            last_batch = max(version + self.max_off_policy_steps + 1, at.step)
            yield version, older, left + (last_batch - at.step) * self.batch_size

    def _env_ahead(self, ticket: Ticket, chosen: set[int]) -> str | None:
        """The env that ``ticket``'s env would overtake by too much."""
        if self.max_off_policy_steps < 2 or len(self.tickets.members) < 2:
            return None

        ahead = 0.0
        first = None
        # Tickets that come first here were chosen before `ticket`.
        for other in self.tickets.all.values():
            if other.handed_on or other.number in chosen:
                continue
            if other.env_name == ticket.env_name:
                return None

            first = first or other.env_name
            ahead += self._places(other.env_name, other.size)
            # One group may always overtake, even if it is larger than that share of a batch.
            if ahead > max(AHEAD * self.batch_size, other.size * self._unit(other.env_name)):
                return first

        return None
