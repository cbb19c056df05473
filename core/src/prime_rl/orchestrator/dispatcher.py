"""Keeps rollouts in flight: whole groups, bounded, never further ahead of the weights than allowed.

Each dispatched rollout is accounted for exactly once: it arrives finished, it arrives failed, or
its group is cancelled. A group is handed on when all its members are accounted for; a stale group
is voided whole.

Pacing comes before dropping: a group is opened only for a batch that may still be sampled from the
present version. With version v, batches up to ``v + 1 + lag`` may be sampled, ``lag =
min(max_off_policy_steps, LEAD)``: while step n trains (v = n - 1), batch n + 1 is sampled.
A batch keeps places for the groups that would be too old for the next one, and waits for them: what
trains would else be shorter than what was requested, because long rollouts age the most.
``max_off_policy_steps = 0`` is the synchronous run: groups are handed on in the order they were
opened in, and back-fill is requested at fixed points, so that nothing depends on timing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from math import ceil

import msgspec

from prime_rl.config.run import RunConfig
from prime_rl.errors import RunError
from prime_rl.orchestrator.buffer import Buffer
from prime_rl.orchestrator.context import Engines, TrainEnv
from prime_rl.rollout import Rollout

log = logging.getLogger(__name__)

CANCEL_SECONDS = 10.0
"""How long a cancelled rollout may take to end."""

LEAD = 1
"""How many batches beyond the one in training may be sampled."""


@dataclass(eq=False)
class OpenGroup:
    """A group in flight: what was requested, and what has come back."""

    group_id: int
    env: TrainEnv
    example_id: int
    policy_version: int
    """The version when it was opened; its prefix cache is salted with it and its staleness counts
    from it."""
    members: dict[int, Sequence[Rollout] | None] = field(default_factory=dict)
    """What each member gave, by its number: one rollout per trainable agent. None: it failed."""
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    handed_on: bool = False
    cancelled: bool = False

    @property
    def size(self) -> int:
        return self.env.group_size

    @property
    def num_inflight(self) -> int:
        return self.size - len(self.members)

    @property
    def num_failed(self) -> int:
        return sum(rollouts is None for rollouts in self.members.values())

    @property
    def survivors(self) -> list[Rollout]:
        """The rollouts that finished, in the order of their members."""
        return [r for _, rollouts in sorted(self.members.items()) for r in rollouts or ()]


class RequestedGroup(msgspec.Struct, frozen=True):
    """A group that no batch has got yet: a resumed run requests it again."""

    group_id: int
    env: str
    example: int


class Requested(msgspec.Struct):
    """What a dispatcher has requested so far; part of ``progress.json``."""

    groups_opened: int
    """The next group's id."""
    waiting: list[RequestedGroup]
    yields: dict[str, float]
    """Rollouts that a member of each env brought when last seen."""


class Dispatcher:
    """Opens groups, runs their rollouts, hands complete groups to ``arrivals``."""

    def __init__(
        self,
        config: RunConfig,
        engines: Engines,
        buffer: Buffer,
        envs: Sequence[TrainEnv],
        next_group: Callable[[], tuple[TrainEnv, int]],
        run_rollout: Callable[[OpenGroup, int], Awaitable[Sequence[Rollout] | None]],
    ) -> None:
        """``next_group``: the env and the example of the next group. ``run_rollout``: sample a
        member of a group, by its number; None: it failed."""
        self._engines, self._buffer = engines, buffer
        self._envs = {env.name: env for env in envs}
        self._next_group, self._run_rollout = next_group, run_rollout
        self._config, self._max_steps = config.orchestrator, config.max_steps
        self._lag = min(self._config.max_off_policy_steps, LEAD)
        self._in_order = self._config.max_off_policy_steps == 0
        self._yields: dict[str, float] = {}
        self._wake = asyncio.Event()
        self._open: dict[int, OpenGroup] = {}
        """Every group that is not taken in yet, in the order of their ids."""
        self._waiting: Counter[str] = Counter()
        """Their rollouts, by env."""
        self._inflight = 0
        self._opened = 0
        self._reopen: deque[RequestedGroup] = deque()
        self._crash: BaseException | None = None
        self.arrivals: asyncio.Queue[OpenGroup] = asyncio.Queue()
        self.counts: Counter[str] = Counter()
        """Rollouts: dispatched = finished + failed + cancelled + in flight."""
        self.cancelled: Counter[str] = Counter()
        """Rollouts that were cancelled, by env."""

    @property
    def num_inflight(self) -> int:
        """Rollouts being sampled now."""
        return self._inflight

    @property
    def num_waiting(self) -> int:
        """Rollouts of groups that are not taken in yet."""
        return self._waiting.total()

    @property
    def versions_behind(self) -> list[int]:
        """Versions since its group was opened, of each rollout in flight that grows stale."""
        version = self._engines.policy.version
        aging = [group for group in self._open.values() if group.env.source.is_live]
        return [version - g.policy_version for g in aging for _ in range(g.num_inflight)]

    def wake(self) -> None:
        """Look again which groups fit and whether others may open: at a new version, a sent batch,
        a group that is gone."""
        self._hand_on()
        self._wake.set()

    def taken(self, group: OpenGroup) -> None:
        """An arrived group is buffered or dropped now."""
        del self._open[group.group_id]
        self._waiting[group.env.name] -= group.size
        if survivors := group.survivors:
            num_finished = group.size - group.num_failed
            self._yields[group.env.name] = max(1.0, len(survivors) / num_finished)
        if self._in_order:
            self._open_groups()
        self.wake()

    # -- resuming from a checkpoint ---------------------------------------------------------------

    @property
    def requested(self) -> Requested:
        """What a resumed run needs to request the same groups, each once."""
        groups = self._open.values()
        waiting = [RequestedGroup(g.group_id, g.env.name, g.example_id) for g in groups]
        return Requested(self._opened, [*waiting, *self._reopen], dict(self._yields))

    def resume(self, requested: Requested) -> None:
        """Continue the count of groups, and request those in flight first. Before ``run``."""
        self._opened = requested.groups_opened
        self._reopen.extend(group for group in requested.waiting if group.env in self._envs)
        if gone := len(requested.waiting) - len(self._reopen):
            log.warning("%d groups that were in flight are of envs that are gone", gone)
        self._yields = {env: x for env, x in requested.yields.items() if env in self._envs}

    # -- opening groups ---------------------------------------------------------------------------

    async def run(self) -> None:
        """Open groups whenever there is room, until cancelled. Raises the error of a member: a bug,
        or a plugin's exception; failures of an environment are data."""
        while self._crash is None:
            self._open_groups()
            self._wake.clear()
            await self._wake.wait()
        raise self._crash

    def room(self) -> int:
        """How many more rollouts may be dispatched now. A group is opened while this is
        positive."""
        last_batch = min(self._engines.policy.version + 1 + self._lag, self._max_steps)
        batches = last_batch - self._buffer.batch.step + 1
        if batches <= 0 or self._engines.fleet.asleep:
            return 0
        # A group counts whole until it is taken in: members that came back early still belong to
        # its batch.
        coming = sum(self._places(self._envs[env], n) for env, n in self._waiting.items())
        needed = max(0, batches * self._config.batch_size - self._buffer.num_buffered)
        wanted = ceil(needed * self._config.oversampling_factor - coming)
        return min(wanted, self._config.max_inflight - self.num_inflight)

    def _places(self, env: TrainEnv, members: int) -> float:
        """Rollouts that members of groups will bring: at first one per agent of their env."""
        return members * self._yields.get(env.name, len(env.host.agents))

    def _open_groups(self) -> None:
        while self.room() > 0:
            if self._reopen:
                again = self._reopen.popleft()
                group_id, env, example_id = again.group_id, self._envs[again.env], again.example
            else:
                env, example_id = self._next_group()
                group_id, self._opened = self._opened, self._opened + 1
            group = OpenGroup(group_id, env, example_id, self._engines.policy.version)
            self._open[group_id] = group
            self._waiting[env.name] += group.size
            self._inflight += group.size
            self.counts["dispatched"] += group.size
            for index in range(group.size):
                task = asyncio.create_task(self._member(group, index))
                group.tasks.add(task)
                task.add_done_callback(group.tasks.discard)

    async def _member(self, group: OpenGroup, index: int) -> None:
        try:
            rollouts = await self._run_rollout(group, index)
        except Exception as error:
            self._fail(error)
            return
        except asyncio.CancelledError:
            if not group.cancelled:  # without this, the group would never complete
                reason = "was cancelled from inside its environment"
                self._fail(RunError(f"a rollout of group {group.group_id} {reason}"))
            raise
        group.members[index] = rollouts
        self._inflight -= not group.cancelled
        self.counts["failed" if rollouts is None else "finished"] += 1
        if not group.num_inflight:
            self._hand_on()
        self._wake.set()

    def _fail(self, error: BaseException) -> None:
        self._crash = error
        self._wake.set()

    def _hand_on(self) -> None:
        """Give complete groups to the loop, once all before them are complete or as they fit."""
        prefix = takewhile(lambda group: not group.num_inflight, self._open.values())
        for group in [*(prefix if self._in_order else self._fitting())]:
            if not group.handed_on:
                group.handed_on = True
                self.arrivals.put_nowait(group)

    def _fitting(self) -> Iterator[OpenGroup]:
        """Complete groups, oldest first: those that no later batch may train, while the batch has
        places; then others, unless they take the place of one of the former in flight."""
        oldest = self._buffer.batch.step - self._config.max_off_policy_steps  # for the next batch
        left: float = self._config.batch_size - self._buffer.num_buffered
        due, others = [], []
        for group in self._open.values():
            if group.handed_on:
                left -= self._places(group.env, group.size)
            elif group.policy_version < oldest and group.env.source.is_live:
                due.append(group)
            elif not group.num_inflight:
                others.append(group)
        for group in due:
            if left > 0 and not group.num_inflight:
                yield group
            left -= self._places(group.env, group.size)
        expects_due = any(group.num_inflight for group in due)
        for group in others:
            if left >= self._places(group.env, group.size) or not expects_due:
                yield group
                left -= self._places(group.env, group.size)

    # -- cancelling groups ------------------------------------------------------------------------

    async def drop_stale(self, version: int) -> Counter[str]:
        """Void the groups in flight that would be too old for any batch trained on ``version``.
        Returns the number of their rollouts by env."""
        oldest = version - self._config.max_off_policy_steps
        stale = [
            group
            for group in self._open.values()
            if group.num_inflight and group.policy_version < oldest and group.env.source.is_live
        ]
        await self._cancel(stale)
        self.wake()
        return sum((Counter({group.env.name: group.size}) for group in stale), Counter[str]())

    async def close(self) -> None:
        """Cancel everything in flight and wait until it is gone."""
        await self._cancel([group for group in self._open.values() if not group.handed_on])

    async def _cancel(self, groups: Sequence[OpenGroup]) -> None:
        """Void groups, all before anything is awaited: none of them can complete meanwhile."""
        for group in groups:
            group.cancelled = True
            del self._open[group.group_id]
            self._waiting[group.env.name] -= group.size
            self._inflight -= group.num_inflight
        pending = {task: group.env.name for group in groups for task in group.tasks}
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
