"""Keeps rollouts in flight: whole groups, bounded, never further ahead of the weights than allowed.

Each dispatched rollout is accounted for exactly once: it arrives finished, it arrives failed, or
its group is cancelled. A group is handed on when all its members are accounted for; a stale group
is voided whole.

Pacing comes before dropping: ``admission`` decides which groups open and which complete ones the
batch gets, such that nothing is requested that could not train in time.
``max_off_policy_steps = 0`` is the synchronous run: groups are handed on in the order they were
opened in, and back-fill is requested at fixed points, so that nothing depends on timing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf

import msgspec

from prime_rl.config.run import RunConfig
from prime_rl.errors import RunError
from prime_rl.orchestrator.admission import (
    Admission,
    InflightLimit,
    Standing,
    Ticket,
    inflight_limit,
)
from prime_rl.orchestrator.buffer import Buffer
from prime_rl.orchestrator.context import Engines, TrainEnv
from prime_rl.rollout import Rollout

log = logging.getLogger(__name__)

CANCEL_SECONDS = 10.0
"""How long a cancelled rollout may take to end."""


@dataclass(eq=False, kw_only=True)
class OpenGroup(Ticket):
    """A group in flight: what was requested, and what has come back."""

    env: TrainEnv
    example_id: int
    members: dict[int, Sequence[Rollout] | None] = field(default_factory=dict)
    """What each member gave, by its number: one rollout per trainable agent. None: it failed."""
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    cancelled: bool = False

    @property
    def ages(self) -> bool:
        return self.env.source.is_live

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
        self._engines = engines
        self._buffer = buffer
        self._envs = {env.name: env for env in envs}
        self._next_group = next_group
        self._run_rollout = run_rollout
        self._config = config.orchestrator
        self._yields: dict[str, float] = {}
        self.admission = Admission(
            batch_size=self._config.batch_size,
            max_off_policy_steps=self._config.max_off_policy_steps,
            max_steps=config.max_steps,
            oversampling_factor=self._config.oversampling_factor,
            places=self._places,
        )
        self._wake = asyncio.Event()
        self._chosen: dict[int, OpenGroup] = {}
        """Groups that are not open yet."""
        self._open: dict[int, OpenGroup] = {}
        """Groups that are open and not taken in."""
        self._inflight = 0
        self._opened = 0
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
        return self.admission.num_open

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
        self.admission.remove(group)
        survivors = group.survivors
        if survivors:
            num_finished = group.size - group.num_failed
            self._yields[group.env.name] = max(1.0, len(survivors) / num_finished)

        if self.admission.in_order:
            self._open_groups()
        self.wake()

    def batch_sent(self, step: int) -> None:
        """The trainer can have the batch of ``step``."""
        self.admission.pace.batch_sent(step, self._clock())

    def version_served(self, version: int) -> None:
        """The engines sample from ``version``."""
        self.admission.version_served(version, self._clock())
        self.wake()

    # -- resuming from a checkpoint ---------------------------------------------------------------

    @property
    def requested(self) -> Requested:
        """What a resumed run needs to request the same groups, each once."""
        groups = [(self._open | self._chosen)[number] for number in self.admission.tickets]
        waiting = [RequestedGroup(g.group_id, g.env.name, g.example_id) for g in groups]
        return Requested(self._opened, waiting, dict(self._yields))

    def resume(self, requested: Requested) -> None:
        """Continue the count of groups, and request those in flight first. Before ``run``."""
        self._opened = requested.groups_opened
        for group in requested.waiting:
            if group.env in self._envs:
                self._choose(group.group_id, self._envs[group.env], group.example)
        gone = len(requested.waiting) - len(self._chosen)
        if gone:
            log.warning("%d groups that were in flight are of envs that are gone", gone)
        self._yields = {env: x for env, x in requested.yields.items() if env in self._envs}

    # -- opening groups ---------------------------------------------------------------------------

    async def run(self) -> None:
        """Open groups whenever there is room, until cancelled. Raises the error of a member: a bug,
        or a plugin's exception; failures of an environment are data."""
        while self._crash is None:
            self._open_groups()
            self._wake.clear()
            # While nothing comes back, the groups in flight turn out to be the long ones.
            with suppress(TimeoutError):
                async with asyncio.timeout(self.admission.look_again):
                    await self._wake.wait()
        raise self._crash

    @property
    def limit(self) -> InflightLimit:
        """Rollouts that may be sampled at once. At least a group fits."""
        is_synchronous = self.admission.in_order
        serving = getattr(self._engines.fleet, "serving", ())
        return inflight_limit(
            self._config.max_inflight_rollouts,
            [engine.client.health.capacity for engine in serving],
            synchronous=self._config.max_inflight if is_synchronous else None,
            batch_size=self._config.batch_size,
            longest_lead=self.admission.longest_lead,
        )

    @property
    def max_inflight(self) -> int:
        """The number of ``limit``."""
        return self.limit.number

    def room(self) -> int:
        """How many more rollouts may be dispatched now. A group is opened while this is
        positive."""
        if self._engines.fleet.asleep:
            return 0
        return min(self.admission.room(self._standing), self.max_inflight - self.num_inflight)

    @property
    def _standing(self) -> Standing:
        version = self._engines.policy.version
        return Standing(
            version=version,
            step=self._buffer.batch.step,
            num_buffered=self._buffer.num_buffered,
            num_inflight=self.num_inflight,
        )

    def _places(self, env: str, members: int) -> float:
        """Rollouts that members of groups will bring: at first one per agent of their env."""
        return members * self._yields.get(env, len(self._envs[env].host.agents))

    def _open_groups(self) -> None:
        if self._engines.fleet.asleep:
            self.admission.in_turn = True
            return

        self.admission.measure(self._engines.policy.version, self._clock())
        limit = self.limit
        most = limit.number
        self.admission.most_inflight = inf if limit.follows_lead else most
        for ticket in self.admission.to_open(self._standing):
            if self.num_inflight >= most:
                return
            self._open_group(self._chosen[ticket.group_id])

        while self.room() > 0:
            env, example_id = self._next_group()
            group = self._choose(self._opened, env, example_id)
            self._opened += 1
            if self.admission.is_near(group, self._standing):
                self._open_group(group)

    @staticmethod
    def _clock() -> float:
        """The event loop's, so that a test can simulate a run."""
        return asyncio.get_running_loop().time()

    def _choose(self, group_id: int, env: TrainEnv, example_id: int) -> OpenGroup:
        group = OpenGroup(
            group_id=group_id,
            env_name=env.name,
            size=env.group_size,
            env=env,
            example_id=example_id,
        )
        self._chosen[group_id] = group
        self.admission.choose(group)
        return group

    def _open_group(self, group: OpenGroup) -> None:
        self._open[group.group_id] = self._chosen.pop(group.group_id)
        self.admission.open(group, self._engines.policy.version, self._clock())
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
        self.admission.pace.count(self._inflight, self._clock())
        if not (group.num_inflight or group.cancelled):
            self.admission.complete(group, self._clock())
            self._hand_on()

        self._wake.set()

    def _fail(self, error: BaseException) -> None:
        self._crash = error
        self._wake.set()

    def _hand_on(self) -> None:
        """Give complete groups to the loop."""
        for ticket in self.admission.hand_on(self._standing, self._clock()):
            self.arrivals.put_nowait(self._open[ticket.group_id])

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
            self.admission.cancel(group, self._clock())
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
