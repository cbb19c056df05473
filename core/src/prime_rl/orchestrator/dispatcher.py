"""Keeps rollouts in flight: whole groups, bounded, never further ahead of the weights than allowed.

Each dispatched rollout is accounted for exactly once: it arrives finished, it arrives failed, or
its group is cancelled. A group is handed on when all its members are accounted for; a stale group
is voided whole.

Pacing comes before dropping: a group is opened only for a batch that may still be sampled from the
present version. With version v, batches up to ``v + 1 + lag`` may be sampled, ``lag =
min(max_off_policy_steps, LEAD)``: while step n trains (v = n - 1), batch n + 1 is sampled.
``max_off_policy_steps = 0`` is the synchronous run: there groups are handed on in the order they
were opened in, and back-fill is asked for at fixed points, so that nothing depends on who was
faster.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Protocol

from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.errors import RunError
from prime_rl.rollout import Rollout

log = logging.getLogger(__name__)

CANCEL_SECONDS = 10.0
"""How long a cancelled rollout may take to end."""

LEAD = 1
"""How many batches beyond the one in training may be sampled."""


@dataclass(frozen=True, eq=False)
class Member:
    """What one dispatched rollout came to: a failure is data."""

    rollouts: tuple[Rollout, ...] = ()
    """One for each trainable agent of the episode; none if it failed."""
    error_type: str | None = None
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.error_type is None


@dataclass(eq=False)
class OpenGroup:
    """A group on its way: what was asked for, and what came back so far."""

    group_id: int
    env_index: int
    example_index: int
    size: int
    policy_version: int
    """The version when it was opened; its prefix cache is salted with it and its staleness counts
    from it."""
    members: dict[int, Member] = field(default_factory=dict)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    cancelled: bool = False

    @property
    def complete(self) -> bool:
        return len(self.members) == self.size

    @property
    def survivors(self) -> list[Rollout]:
        """The rollouts that finished, in the order of their members."""
        return [r for _, member in sorted(self.members.items()) for r in member.rollouts]


@dataclass(frozen=True)
class AskedGroup:
    """What a group asks for."""

    group_id: int
    env_index: int
    example_index: int
    size: int


@dataclass(frozen=True)
class Asked:
    """What a dispatcher has asked for so far."""

    num_opened: int
    """Groups opened: the next one's id."""
    groups: list[AskedGroup]
    """Opened, and not handed on to a batch."""
    yields: dict[int, float]
    """Rollouts that a member of each env, by index, was last seen to bring."""


@dataclass(frozen=True)
class Pace:
    """What the loop needs next, as the dispatcher asks for it."""

    version: int
    """The policy's now."""
    step: int
    """The batch being assembled."""
    max_steps: int
    batch_size: int
    buffered: int
    """Rollouts that wait for a batch."""
    is_closed: bool = False
    """The engines sleep: no group is opened."""


class Source(Protocol):
    """Where the dispatcher gets its groups, and what it may know of them."""

    def pace(self) -> Pace: ...

    def next_group(self) -> tuple[int, int, int]:
        """Env index, example index and group size of the next group."""
        ...

    async def run_rollout(self, group: OpenGroup, index: int) -> Member:
        """Sample member ``index`` of a group. Failures come back as data."""
        ...

    def ages(self, env_index: int) -> bool:
        """Whether the env's rollouts grow stale."""
        ...

    def expected_yield(self, env_index: int) -> float:
        """Rollouts that one member is expected to bring, until one has come back."""
        ...


class Dispatcher:
    """Opens groups, runs their rollouts, hands complete groups to ``arrivals``."""

    def __init__(self, source: Source, config: OrchestratorConfig) -> None:
        """Whatever lets ``source.pace`` allow more groups calls ``wake``."""
        self._source = source
        self._lag = min(config.max_off_policy_steps, LEAD)
        self._max_off_policy = config.max_off_policy_steps
        self._in_order = config.max_off_policy_steps == 0
        self._oversampling = config.oversampling_factor
        self._max_inflight = config.max_inflight
        self._yields: dict[int, float] = {}
        self._wake = asyncio.Event()
        self._open: dict[int, OpenGroup] = {}
        self._opened = 0
        self._reopen: deque[AskedGroup] = deque()
        self._held: dict[int, OpenGroup] = {}
        """Complete, but one opened earlier is not."""
        self._handed_on: dict[int, OpenGroup] = {}
        self._crash: BaseException | None = None
        self.arrivals: asyncio.Queue[OpenGroup] = asyncio.Queue()
        self.counts: Counter[str] = Counter()
        """Rollouts: dispatched = finished + failed + cancelled + in flight."""
        self.cancelled: Counter[int] = Counter()
        """Of these, those that were cancelled, by their env's index."""

    @property
    def num_inflight(self) -> int:
        """Rollouts being sampled now."""
        return sum(len(group.tasks) for group in self._open.values())

    @property
    def versions_behind(self) -> list[int]:
        """Of each rollout being sampled now that grows stale: versions since its group was
        opened."""
        aging = [group for group in self._open.values() if self._source.ages(group.env_index)]
        version = self._source.pace().version
        return [version - g.policy_version for g in aging for _ in g.tasks]

    def wake(self) -> None:
        """Something changed that may let more groups open: a version, a batch shipped, a rollout
        dropped."""
        self._wake.set()

    def taken(self, group: OpenGroup) -> None:
        """An arrived group is buffered or dropped now: from here on the pace counts it."""
        del self._handed_on[group.group_id]
        finished = sum(member.ok for member in group.members.values())
        if finished and group.survivors:
            self._yields[group.env_index] = max(1.0, len(group.survivors) / finished)
        if self._in_order:
            self._open_groups()
        self._wake.set()

    # -- going on from a checkpoint -----------------------------------------------------------

    @property
    def asked(self) -> Asked:
        """What a resumed run needs to ask for the same groups, each once."""
        groups = [*self._open.values(), *self._handed_on.values()]
        waiting = [AskedGroup(g.group_id, g.env_index, g.example_index, g.size) for g in groups]
        waiting += self._reopen
        return Asked(self._opened, sorted(waiting, key=lambda g: g.group_id), dict(self._yields))

    def resume(self, asked: Asked) -> None:
        """Count groups from where another dispatcher stopped, and first ask again for those it had
        not handed on. Before ``run``."""
        self._opened, self._reopen = asked.num_opened, deque(asked.groups)
        self._yields = dict(asked.yields)

    async def run(self) -> None:
        """Open groups whenever the pace allows it, until cancelled. Raises what a member raised: a
        bug, or a plugin's exception; failures of an environment are data and raise nothing."""
        while self._crash is None:
            self._open_groups()
            self._wake.clear()
            await self._wake.wait()
        raise self._crash

    def room(self) -> int:
        """How many more rollouts may be dispatched now (a group is opened while this is
        positive)."""
        pace = self._source.pace()
        last_batch = min(pace.version + 1 + self._lag, pace.max_steps)
        batches = last_batch - pace.step + 1
        if batches <= 0 or pace.is_closed:
            return 0
        # A group counts whole until it is taken in: members that came back early still belong to
        # its batch.
        coming = sum(map(self._rollouts_of, (*self._open.values(), *self._handed_on.values())))
        needed = max(0, batches * pace.batch_size - pace.buffered)
        wanted = ceil(needed * self._oversampling - coming)
        return min(wanted, self._max_inflight - self.num_inflight)

    def _rollouts_of(self, group: OpenGroup) -> float:
        """How many rollouts a group is expected to bring."""
        known = self._yields.get(group.env_index)
        return group.size * (
            self._source.expected_yield(group.env_index) if known is None else known
        )

    def _open_groups(self) -> None:
        while self.room() > 0:
            self._open_group()

    def _open_group(self) -> None:
        asked = self._reopen.popleft() if self._reopen else self._ask()
        version = self._source.pace().version
        group = OpenGroup(asked.group_id, asked.env_index, asked.example_index, asked.size, version)
        self._open[group.group_id] = group
        self.counts["dispatched"] += group.size
        for index in range(group.size):
            task = asyncio.create_task(self._member(group, index))
            group.tasks.add(task)
            task.add_done_callback(group.tasks.discard)

    def _ask(self) -> AskedGroup:
        group = AskedGroup(self._opened, *self._source.next_group())
        self._opened += 1
        return group

    async def _member(self, group: OpenGroup, index: int) -> None:
        try:
            member = await self._source.run_rollout(group, index)
        except Exception as error:
            self._crash = error
            self._wake.set()
            return
        except asyncio.CancelledError:
            if not group.cancelled:  # nobody here asked for it: the group would never complete
                self._crash = RunError(
                    f"a rollout of group {group.group_id} was cancelled from inside its environment"
                )
                self._wake.set()
            raise
        group.members[index] = member
        self.counts["finished" if member.ok else "failed"] += 1
        if group.complete and not group.cancelled:
            del self._open[group.group_id]
            self._handed_on[group.group_id] = group
            self._held[group.group_id] = group
            self._hand_on()
        self._wake.set()

    def _hand_on(self) -> None:
        """Give complete groups to the loop: at once, or when all before them are complete."""
        for group_id in sorted(self._held):
            if not self._in_order or group_id < min(self._open, default=group_id + 1):
                self.arrivals.put_nowait(self._held.pop(group_id))

    async def drop_stale(self, version: int) -> Counter[int]:
        """Void the groups in flight that would be too old for any batch trained on ``version``;
        returns how many rollouts, by their env's index."""
        oldest = version - self._max_off_policy
        stale = [
            group
            for group in self._open.values()
            if group.policy_version < oldest and self._source.ages(group.env_index)
        ]
        await self._cancel(stale)
        self._hand_on()
        self._wake.set()
        dropped: Counter[int] = Counter()
        for group in stale:
            dropped[group.env_index] += group.size
        return dropped

    async def close(self) -> None:
        """Cancel everything in flight and wait until it is gone."""
        await self._cancel(list(self._open.values()))
        for group_id in self._held:
            del self._handed_on[group_id]
        self._held.clear()

    async def _cancel(self, groups: Sequence[OpenGroup]) -> None:
        """Void groups, all before anything is awaited: none of them can complete meanwhile."""
        for group in groups:
            group.cancelled = True
            self._open.pop(group.group_id, None)
        pending = {task: group.env_index for group in groups for task in group.tasks}
        for task in pending:
            task.cancel()
        if not pending:
            return
        done, stuck = await asyncio.wait(pending, timeout=CANCEL_SECONDS)
        if stuck:
            log.warning("%d cancelled rollouts do not end; going on without them", len(stuck))
        gone = [*(task for task in done if task.cancelled()), *stuck]
        self.counts["cancelled"] += len(gone)
        self.cancelled.update(pending[task] for task in gone)
