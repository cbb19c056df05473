"""The groups that were chosen and are not taken in, in the order of the batches they are for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(eq=False)
class Duration:
    """How long a group takes. It outlives the group, whose rollouts take memory."""

    opened_at: float | None = None
    """None: the group waits for its place to come near."""
    seconds: float = 0.0
    """From its opening until it was complete or cancelled."""
    is_complete: bool = False
    is_cancelled: bool = False

    def age(self, now: float) -> float:
        """Seconds for which the group has been in flight, or was until it was cancelled."""
        return self.seconds if self.is_cancelled else now - (self.opened_at or 0.0)

    def complete(self, now: float) -> None:
        self.seconds = self.age(now)
        self.is_complete = True

    def cancel(self, now: float) -> None:
        self.seconds = self.age(now)
        self.is_cancelled = True


@dataclass(eq=False)
class Ticket:
    """Rollouts that are handed on together and that no batch has taken yet: a group, or a part of
    one."""

    env_name: str
    size: int
    """Members that it may bring to a batch."""
    number: int = -1
    """Tickets are chosen in this order."""
    policy_version: int = 0
    """The version when it was opened; its staleness counts from it."""
    duration: Duration = field(default_factory=Duration)
    handed_on: bool = False

    @property
    def ages(self) -> bool:
        """False: no live policy samples it, so it never goes stale."""
        return True

    @property
    def opened_at(self) -> float | None:
        """None: it waits for its place to come near."""
        return self.duration.opened_at

    @property
    def seconds(self) -> float:
        """From its opening until it was complete or cancelled."""
        return self.duration.seconds

    @property
    def is_complete(self) -> bool:
        """All its members have come back."""
        return self.duration.is_complete


class Tickets:
    """The tickets by number, and counts of their members."""

    def __init__(self) -> None:
        self.all: dict[int, Ticket] = {}
        """In the order in which they were chosen."""
        self.unopened: dict[int, Ticket] = {}
        self.complete: dict[int, Ticket] = {}
        """Tickets that are not handed on yet."""
        self.members: Counter[str] = Counter()
        """Members of all, by env."""
        self.passed: Counter[str] = Counter()
        """By env, the members of tickets that are handed on and that no batch has taken."""
        self.by_version: dict[int, Counter[str]] = {}
        """By version and env, the members of open tickets that are not handed on and can become
        stale."""
        self._num_chosen = 0

    @property
    def num_open(self) -> int:
        """Rollouts of groups that are open and not taken in."""
        return self.members.total() - sum(ticket.size for ticket in self.unopened.values())

    def choose(self, ticket: Ticket) -> None:
        """Behind everything else."""
        self._enqueue(ticket)
        self.unopened[ticket.number] = ticket
        self.members[ticket.env_name] += ticket.size

    def _enqueue(self, ticket: Ticket) -> None:
        ticket.number = self._num_chosen
        self._num_chosen += 1
        self.all[ticket.number] = ticket

    def open(self, ticket: Ticket, version: int, now: float) -> None:
        """Its members are being sampled."""
        ticket.policy_version = version
        ticket.duration.opened_at = now
        del self.unopened[ticket.number]
        self._count_version(ticket, ticket.size)

    def end(self, ticket: Ticket, now: float) -> None:
        """All its members have come back."""
        ticket.duration.complete(now)
        self.complete[ticket.number] = ticket

    def split(self, ticket: Ticket, part: Ticket) -> None:
        """``part`` gets the place of ``ticket``, which goes behind everything else."""
        part.number = ticket.number
        part.policy_version = ticket.policy_version
        part.duration.opened_at = ticket.opened_at

        self.all[part.number] = part
        ticket.size -= part.size
        self._enqueue(ticket)

    def resize(self, ticket: Ticket, size: int) -> None:
        """An open ticket brings ``size`` members."""
        more = size - ticket.size
        ticket.size = size
        self.members[ticket.env_name] += more
        self._count_version(ticket, more)

    def hand_on(self, ticket: Ticket) -> None:
        """The batch gets it."""
        ticket.handed_on = True
        del self.complete[ticket.number]
        self._count_version(ticket, -ticket.size)
        self.passed[ticket.env_name] += ticket.size

    def remove(self, ticket: Ticket) -> None:
        """It is taken in, or cancelled."""
        del self.all[ticket.number]
        self.unopened.pop(ticket.number, None)
        self.complete.pop(ticket.number, None)
        self.members[ticket.env_name] -= ticket.size
        if ticket.handed_on:
            self.passed[ticket.env_name] -= ticket.size
        else:
            self._count_version(ticket, -ticket.size)

    def _count_version(self, ticket: Ticket, members: int) -> None:
        # Tickets without a version, and those that do not age, have no last batch.
        if not ticket.ages or ticket.opened_at is None:
            return

        by_env = self.by_version.setdefault(ticket.policy_version, Counter())
        by_env[ticket.env_name] += members
        if not by_env.total():
            del self.by_version[ticket.policy_version]
