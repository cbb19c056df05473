"""Keeps rollouts in flight: whole groups, bounded, never further ahead of the weights than allowed.

Each dispatched rollout is accounted for exactly once: it arrives finished, it arrives failed, or
its group is cancelled. A group is handed on when all its members are accounted for; a stale group
is voided whole. There are three exceptions:

    alone            where nothing compares siblings, each rollout is handed on as it ends
    wanted           a plugin decides how many members a group has, by its first members: further
                     ones are requested, up to a limit whose places the group keeps, or siblings
                     are stopped
    partial_groups   a group is handed on once so many of its members have finished

Pacing comes before dropping: ``admission`` decides which groups open and which complete ones the
batch gets, such that nothing is requested that could not train in time.
``max_off_policy_steps = 0`` is the synchronous run: groups are handed on in the order they were
opened in, and back-fill is requested at fixed points, so that nothing depends on timing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from math import ceil, inf

import msgspec

from prime_rl.config.run import RunConfig
from prime_rl.errors import RunError
from prime_rl.orchestrator.admission.admission import Admission, Standing
from prime_rl.orchestrator.admission.inflight import InflightLimit, inflight_limit
from prime_rl.orchestrator.admission.rate import RateLimit
from prime_rl.orchestrator.admission.reach import KnownLead
from prime_rl.orchestrator.admission.tickets import Ticket
from prime_rl.orchestrator.batch_size import BatchSize
from prime_rl.orchestrator.buffer import Buffer
from prime_rl.orchestrator.context import Engines, GroupLimits, TrainEnv
from prime_rl.rollout import Rollout

log = logging.getLogger(__name__)

FAILED_IN_A_ROW = 64
"""Rollouts of an env that failed, and none that finished, after which the env counts as failing. Of
an env in which nine of ten fail, one row of 64 in a thousand does."""
CANCEL_SECONDS = 10.0
"""How long a cancelled rollout may take to end."""


@dataclass(eq=False, kw_only=True)
class OpenGroup(Ticket):
    """Members of a group that are handed on together: what was requested, and what has come back.

    These are all members, one where rollouts are handed on alone, or a part of a partial group.
    """

    env: TrainEnv
    group_id: int
    example_id: int
    requested: Sequence[int]
    """The numbers of its members in the group."""
    unstarted: list[int] = field(default_factory=list)
    """Those that wait until fewer rollouts are in flight."""
    num_judged: int = 0
    """Members, from the first, by which a plugin has decided on the size of the group."""
    members: dict[int, Sequence[Rollout] | None] = field(default_factory=dict)
    """The rollouts of each member, by its number: one rollout per trainable agent. None: it
    failed."""
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    """The tasks of the members in flight, by number."""
    asks: bool = False
    """Batches keep no places for it: its env was failing when it opened, or has failed since."""
    cancelled: bool = False
    num_cut_off: int = 0
    """Members without which it is handed on: cancelled, or left out after they had ended."""

    @property
    def ages(self) -> bool:
        return self.env.source.is_live

    @property
    def is_back(self) -> bool:
        """Whether all its members have come back."""
        return len(self.members) == len(self.requested)

    @property
    def num_inflight(self) -> int:
        return len(self.requested) - len(self.members) - len(self.unstarted)

    @property
    def num_failed(self) -> int:
        return sum(rollouts is None for rollouts in self.members.values())

    @property
    def num_finished(self) -> int:
        return len(self.members) - self.num_failed

    @property
    def survivors(self) -> list[Rollout]:
        """The rollouts that finished, in the order of their members."""
        return [r for _, rollouts in sorted(self.members.items()) for r in rollouts or ()]


class RequestedGroup(msgspec.Struct):
    """A group that no batch has got yet: a resumed run requests it again."""

    group_id: int
    env: str
    example: int
    members: list[int] | None = None
    """Their numbers. None: all of the group."""


class Requested(msgspec.Struct):
    """What a dispatcher has requested so far; part of ``progress.json``."""

    groups_opened: int
    """The next group's id."""
    waiting: list[RequestedGroup]
    yields: dict[str, float]
    """Rollouts that a member of each env brought when last seen."""
    lead: KnownLead | None = None
    """None: the file is of a version that did not save it."""
    tokens: dict[str, float] = {}
    """Tokens of a rollout by env, where a batch counts tokens."""


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
        alone: Collection[str] = (),
        size: BatchSize | None = None,
        wanted: Callable[[OpenGroup], int] | None = None,
    ) -> None:
        """``next_group``: the env and the example of the next group. ``run_rollout``: sample a
        member of a group, by its number; None: it failed. ``alone``: the envs in which nothing
        compares siblings. ``size``: the size of a batch; None: ``batch_size`` rollouts. ``wanted``:
        how many members a group shall have, for envs with ``limits``."""
        self._size = size or BatchSize(config.orchestrator.batch_size)
        self._engines = engines
        self._buffer = buffer
        self._envs = {env.name: env for env in envs}
        self._next_group = next_group
        self._run_rollout = run_rollout
        self._wanted = wanted
        self._config = config.orchestrator

        # In a synchronous run, the whole batch waits anyway, and groups keep their order.
        self.alone = frozenset(alone if self._config.max_off_policy_steps else ())
        """Envs whose rollouts are handed on alone."""
        self._yields: dict[str, float] = {}
        self._failed: Counter[str] = Counter()
        """Rollouts that failed since one of their env finished, of groups as new or newer."""
        self._finished: Counter[str] = Counter()
        """The number of the newest group of each env of which a rollout finished."""
        self.admission = Admission(
            batch_size=self._size.places,
            max_off_policy_steps=self._config.max_off_policy_steps,
            max_steps=config.max_steps,
            oversampling_factor=self._config.oversampling_factor,
            places=self._places,
            unit=self._size.expected,
        )

        self._rates = {
            env.label: RateLimit(env.tasks_per_minute)
            for env in self._config.train.env
            if env.tasks_per_minute is not None
        }
        self.rate_limited: str | None = None
        """The env whose ``tasks_per_minute`` keeps a group from opening now, if one does."""

        self._wake = asyncio.Event()
        self._chosen: dict[int, OpenGroup] = {}
        """Groups that are not open yet, by the number of the ticket."""
        self._open: dict[int, OpenGroup] = {}
        """Open groups that no batch has taken."""
        self._growing: dict[int, OpenGroup] = {}
        """Open groups with members that are not started."""
        self._ending: set[asyncio.Task[None]] = set()
        """Wait for members that were cut off."""
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
        return self.admission.tickets.num_open

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
        del self._open[group.number]
        self.admission.remove(group)

        self._note_failures(group)
        survivors = group.survivors
        self._size.came_back(group.env.name, survivors)
        if survivors:
            self._yields[group.env.name] = max(1.0, len(survivors) / group.num_finished)

        # A synchronous run requests back-fill here, at a fixed point: not when `run` wakes.
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
        by_number = self._open | self._chosen
        waiting: list[RequestedGroup] = []
        alone: dict[int, RequestedGroup] = {}
        # Groups are saved in the order of choice, so that a resumed run opens them in that order.
        for number in self.admission.tickets.all:
            group = by_number[number]
            request = RequestedGroup(group.group_id, group.env.name, group.example_id)
            if group.env.name in self.alone:
                request = alone.setdefault(group.group_id, request)

            # The parts of a group are one request, in the place of the first.
            if request.members is None:
                request.members = []
                waiting.append(request)
            request.members += group.requested

        for request in waiting:
            env = self._envs[request.env]
            # One that has grown begins again, and grows again by the same rollouts.
            if env.limits or len(request.members or ()) == env.group_size:
                request.members = None  # the file has no more than it needs

        return Requested(
            groups_opened=self._opened,
            waiting=waiting,
            yields=dict(self._yields),
            lead=self.admission.leads.known,
            tokens=dict(self._size.means),
        )

    def resume(self, requested: Requested) -> None:
        """Continue the count of groups, and request those in flight first. Before ``run``."""
        self._opened = requested.groups_opened
        waiting = [group for group in requested.waiting if group.env in self._envs]
        for group in waiting:
            env = self._envs[group.env]
            self._choose(group.group_id, env, group.example, members=group.members)

        num_gone = len(requested.waiting) - len(waiting)
        if num_gone:
            log.warning("%d groups that were in flight are of envs that are gone", num_gone)

        if requested.lead is not None:
            self.admission.leads.resume(requested.lead)

        self._size.resume({env: x for env, x in requested.tokens.items() if env in self._envs})
        self._yields = {env: x for env, x in requested.yields.items() if env in self._envs}

    # -- envs that fail ---------------------------------------------------------------------------

    def _note_failures(self, group: OpenGroup) -> None:
        env = group.env.name
        was_failing = self.is_failing(env)
        if group.num_finished:
            self._failed[env] = 0
            self._finished[env] = max(self._finished[env], group.number)
        elif group.number >= self._finished[env]:
            # Older ones say nothing new: time-outs come back last, in a row.
            self._failed[env] += group.num_failed

        if self.is_failing(env) and not was_failing:
            log.warning(
                "env %r: the last %d rollouts failed. One group at a time asks whether it works "
                "again, while other envs have something to give",
                env,
                self._failed[env],
            )
            # An env alone keeps its places: its batches have no other groups to wait for.
            if any(other != env and not self.is_failing(other) for other in self._envs):
                self._wait_no_more(env)
        elif was_failing and not self.is_failing(env):
            log.info("env %r works again", env)

    def _wait_no_more(self, env: str) -> None:
        """Batches keep no places for what was requested of the env, and nothing more opens."""
        for group in [*self._chosen.values()]:
            if group.env.name == env:
                del self._chosen[group.number]
                self.admission.remove(group)

        for group in self._open.values():
            if group.env.name == env and not group.is_back:
                self._ask(group)

    def _ask(self, group: OpenGroup) -> None:
        """An open group takes no places until it is back."""
        group.asks = True
        self.admission.wait_no_more(group)

    def is_failing(self, env: str) -> bool:
        """Whether all that came back of an env lately has failed. Never so in a synchronous run,
        whose groups do not depend on what comes back."""
        return self._failed[env] >= FAILED_IN_A_ROW and not self.admission.in_order

    def is_asked(self, env: str) -> bool:
        """Whether a group of the env is on its way."""
        groups = chain(self._open.values(), self._chosen.values())
        return any(group.env.name == env for group in groups)

    # -- opening groups ---------------------------------------------------------------------------

    async def run(self) -> None:
        """Open groups whenever there is room, until cancelled. Raises the error of a member: a bug,
        or a plugin's exception; failures of an environment are data."""
        while self._crash is None:
            # Nothing is awaited before `clear`, so no call of `wake` is lost.
            self._open_groups()
            self._wake.clear()

            # While nothing comes back, the groups in flight turn out to be the long ones.
            with suppress(TimeoutError):
                async with asyncio.timeout(self._look_again()):
                    await self._wake.wait()
        raise self._crash

    def _look_again(self) -> float | None:
        """Seconds until groups may open without anything else happening; None: never."""
        seconds = [self.admission.leads.look_again]
        if self.rate_limited is not None:
            seconds.append(self._rates[self.rate_limited].wait(self._clock()))
        return min((each for each in seconds if each is not None), default=None)

    @property
    def limit(self) -> InflightLimit:
        """Rollouts that may be sampled at once. At least a group fits."""
        is_synchronous = self.admission.in_order
        serving = self._engines.fleet.serving
        return inflight_limit(
            self._config.max_inflight_rollouts,
            [engine.client.health.capacity for engine in serving],
            synchronous=self._config.max_inflight if is_synchronous else None,
            batch_size=ceil(self.admission.leads.rollouts_per_batch),
            demands=self.admission.leads.demands,
        )

    @property
    def max_inflight(self) -> int:
        """The number of ``limit``."""
        return self.limit.number

    def room(self) -> int:
        """A group is opened while this is positive: places that are left, or rollouts that may
        still be sampled at once."""
        if self._engines.fleet.asleep:
            return 0
        return min(self.admission.room(self._standing), self.max_inflight - self.num_inflight)

    @property
    def next_step(self) -> int:
        """The batch that a group chosen now is for, by its place in the sequence of batches."""
        return self.admission.next_step(self._standing)

    @property
    def _standing(self) -> Standing:
        version = self._engines.policy.version
        return Standing(
            version=version,
            step=self._buffer.batch.step,
            num_buffered=self._buffer.num_buffered,
            num_inflight=self.num_inflight,
        )

    def rollouts_per_group(self, env: str) -> float:
        """What a group of the env brings, as last seen."""
        limits = self._envs[env].limits
        members = limits.trained if limits else self._envs[env].group_size
        return self._rollouts(env, members)

    def _rollouts(self, env: str, members: int) -> float:
        """Rollouts that members of groups will bring: at first one per agent of their env."""
        return members * self._yields.get(env, len(self._envs[env].host.agents))

    def _places(self, env: str, members: int) -> float:
        """Places in batches that these take."""
        return self._rollouts(env, members) * self._size.expected(env)

    def _open_groups(self) -> None:
        # Engines sleep only where the trainer takes their GPUs in turn.
        if self._engines.fleet.asleep:
            self.admission.leads.in_turn = True
            return

        self.rate_limited = None
        # `measure` comes first, because the limit depends on its results.
        self.admission.measure(self._engines.policy.version, self._clock())

        limit = self.limit
        max_inflight = limit.number

        # A limit that comes from the lead must not bound the lead: neither would grow.
        self.admission.most_inflight = inf if limit.follows_lead else max_inflight

        # First the members that open groups lack: their siblings wait for them.
        self._start_more(max_inflight)
        for ticket in self.admission.to_open(self._standing):
            if self.num_inflight >= max_inflight:
                return

            self._open_in_time(self._chosen[ticket.number])

        # `room` reckons with the longest lead. An env with short episodes opens its groups later.
        while self.room() > 0:
            env, example_id = self._next_group()
            parts = self._choose(self._opened, env, example_id)
            # `_opened` is also the id of the next group.
            self._opened += 1

            for part in parts:
                if self.admission.is_near(part, self._standing):
                    self._open_in_time(part)

    @staticmethod
    def _clock() -> float:
        """The event loop's clock, so that a test can simulate a run."""
        return asyncio.get_running_loop().time()

    def _choose(
        self, group_id: int, env: TrainEnv, example_id: int, members: Sequence[int] | None = None
    ) -> list[OpenGroup]:
        """The tickets of a group, in one part or in several. ``members``: those that are requested
        again. None: the whole group."""
        numbers = range(env.group_size) if members is None else members
        # Where rollouts are handed on alone, each member is a ticket of its own.
        shares = [[number] for number in numbers] if env.name in self.alone else [numbers]
        parts = []

        for share in shares:
            part = OpenGroup(
                env_name=env.name,
                size=env.limits.trained if env.limits else len(share),
                env=env,
                group_id=group_id,
                example_id=example_id,
                requested=share,
            )
            self.admission.choose(part)
            self._chosen[part.number] = part
            parts.append(part)

        return parts

    def _open_in_time(self, group: OpenGroup) -> None:
        """Open it, unless its env has opened enough in the last minute: it keeps its place, and
        opens later. In a synchronous run those behind it wait too, since groups keep their
        order."""
        if self.admission.in_order and self.rate_limited is not None:
            return

        rate = self._rates.get(group.env.name)
        if rate is None:
            self._open_group(group)
            return

        wait = rate.wait(self._clock())
        if not wait:
            # A member that is handed on alone counts as its share of a group.
            rate.open(self._clock(), len(group.requested) / group.env.group_size)
            self._open_group(group)
        # Of several such envs the one that may open first: `run` looks again then.
        elif self.rate_limited is None or wait < self._rates[self.rate_limited].wait(self._clock()):
            self.rate_limited = group.env.name

    def _open_group(self, group: OpenGroup) -> None:
        self._open[group.number] = self._chosen.pop(group.number)
        self.admission.open(group, self._engines.policy.version, self._clock())
        if self.is_failing(group.env.name) and not self._another_asks(group):
            self._ask(group)
        for index in group.requested:
            self._start(group, index)

    def _another_asks(self, group: OpenGroup) -> bool:
        """Whether another group of its env takes no places already. Then this one, which opens only
        because no other env has anything to give, takes its own, and the bound holds."""
        return any(
            other.asks and other.env is group.env and other.group_id != group.group_id
            for other in self._open.values()
        )

    def _start(self, group: OpenGroup, index: int) -> None:
        self._inflight += 1
        self.counts["dispatched"] += 1
        group.tasks[index] = asyncio.create_task(self._member(group, index))

    async def _member(self, group: OpenGroup, index: int) -> None:
        try:
            rollouts = await self._run_rollout(group, index)
        except Exception as error:
            self._fail(error)
            return
        except asyncio.CancelledError:
            if not self._is_stopped(group, index):  # without this, it would never complete
                reason = "was cancelled from inside its environment"
                self._fail(RunError(f"a rollout of group {group.group_id} {reason}"))
            raise

        is_stopped = self._is_stopped(group, index)

        # A stopped member was subtracted when it was stopped.
        if not is_stopped:
            self._inflight -= 1
        # A stopped member counts too: it ended before its cancellation took effect.
        self.counts["failed" if rollouts is None else "finished"] += 1
        self.admission.pace.count(self._inflight, self._clock())
        if is_stopped:
            return

        group.members[index] = rollouts
        del group.tasks[index]

        if group.env.limits:
            try:
                self._judge(group, group.env.limits)
            except Exception as error:
                self._fail(error)
                return

        if group.is_back:
            # It kept places for as many members as could train: the rest is free for others.
            size = None
            if group.asks:
                size = group.num_finished
            elif group.env.limits:
                size = min(group.size, group.num_finished)
            self.admission.complete(group, self._clock(), size)
            self._hand_on()
        elif self._is_enough(group):
            self._split(group)
            self._hand_on()

        self._wake.set()

    @staticmethod
    def _is_stopped(group: OpenGroup, index: int) -> bool:
        """Whether the rollout of the current task is not waited for any more."""
        return group.cancelled or group.tasks.get(index) is not asyncio.current_task()

    # -- groups whose size a plugin decides -------------------------------------------------------

    def _judge(self, group: OpenGroup, limits: GroupLimits) -> None:
        """Ask how many members the group shall have, after each member in the order of the numbers:
        what came back first does not decide."""
        assert self._wanted is not None
        while group.num_judged < len(group.requested) and group.num_judged in group.members:
            group.num_judged += 1
            wanted = self._wanted(group)
            # Members that were judged stay, because the plugin's decision rests on them.
            self._resize(group, min(max(wanted, group.num_judged), limits.size))

    def _resize(self, group: OpenGroup, size: int) -> None:
        """Request further members of an open group, or stop those from number ``size`` on."""
        before = len(group.requested)
        group.requested = range(size)
        group.unstarted = [number for number in group.unstarted if number < size]
        group.unstarted += range(before, size)
        if group.unstarted:
            self._growing[group.number] = group
        if size >= before:
            return

        # By number, not by what has ended: how long a reply takes must not choose the members.
        ended = [number for number in group.members if number >= size]
        for number in ended:
            del group.members[number]

        # `_member` recognizes a stopped member by its absence from `tasks`.
        stopped = [number for number in group.tasks if number >= size]
        tasks = {group.tasks.pop(number): group.env.name for number in stopped}
        for task in tasks:
            task.cancel()

        group.num_cut_off += len(ended) + len(tasks)
        self._inflight -= len(tasks)  # their places are free now, not when they end
        self._end_later(tasks)

    def _start_more(self, most_inflight: int) -> None:
        """Start members that open groups have asked for, the oldest group's first, until so many
        rollouts are in flight."""
        for number, group in sorted(self._growing.items()):
            while group.unstarted and self._inflight < most_inflight:
                self._start(group, group.unstarted.pop(0))
            if not group.unstarted:
                del self._growing[number]

    # -- partial groups ---------------------------------------------------------------------------

    def _is_enough(self, group: OpenGroup) -> bool:
        """Whether what has finished is handed on as a group."""
        partial = self._config.partial_groups
        if partial is None or group.asks or group.num_finished < partial.at_least:
            return False

        # A group is split once.
        return len(group.requested) == group.env.group_size and group.ages

    def _split(self, group: OpenGroup) -> None:
        """The rollouts that have come back become a complete group of their own. The rest goes on
        as another one, or is cancelled."""
        partial = self._config.partial_groups
        assert partial is not None
        part = OpenGroup(
            env_name=group.env_name,
            size=len(group.members),
            env=group.env,
            group_id=group.group_id,
            example_id=group.example_id,
            requested=[*group.members],
            members=group.members,
        )
        self.admission.split(group, part, self._clock())

        # The rest stays in the object that the tasks in flight hold.
        group.requested = [number for number in group.requested if number not in part.members]
        group.members = {}

        # Since `admission.split` the part has the group's number, and the group has a new one.
        self._open[part.number] = part
        self._open[group.number] = group

        self.counts["partial_groups"] += 1
        if partial.rest == "cancel":
            # The rest has that size since `admission.split`.
            part.num_cut_off = group.size
            self._end_later(self._void([group]))

    def _fail(self, error: BaseException) -> None:
        self._crash = error
        self._wake.set()

    def _hand_on(self) -> None:
        """Give complete groups to the loop."""
        for ticket in self.admission.hand_on(self._standing, self._clock()):
            self.arrivals.put_nowait(self._open[ticket.number])

    # -- cancelling groups ------------------------------------------------------------------------

    async def drop_stale(self, version: int) -> Counter[str]:
        """Void the groups in flight that would be too old for any batch trained on ``version``.
        Returns the number of their rollouts by env."""
        # The next batch is version + 1, and trains rollouts version - policy_version steps old.
        oldest = version - self._config.max_off_policy_steps
        # A group that is back is the buffer's to judge: its batch counts it as stale.
        stale = [
            group
            for group in self._open.values()
            if not group.is_back
            and not group.asks  # however long it takes: it may say that its env works again
            and group.policy_version < oldest
            and group.ages
        ]
        await self._cancel(stale)
        self.wake()

        lost = Counter[str]()
        # Members that had come back are lost with their group.
        for group in stale:
            lost[group.env.name] += len(group.requested)
        return lost

    async def close(self) -> None:
        """Cancel everything in flight and wait until it is gone."""
        # A group that was handed on has no task in flight.
        await self._cancel([group for group in self._open.values() if not group.handed_on])
        await asyncio.gather(*self._ending)

    async def _cancel(self, groups: Sequence[OpenGroup]) -> None:
        await self._end(self._void(groups))

    def _void(self, groups: Sequence[OpenGroup]) -> dict[asyncio.Task[None], str]:
        """Cancel groups, all before anything is awaited: none of them can complete meanwhile.
        Returns the tasks that have to end, with their env."""
        for group in groups:
            # From here on `_member` counts none of its tasks as in flight.
            group.cancelled = True
            del self._open[group.number]
            self._growing.pop(group.number, None)
            self.admission.cancel(group, self._clock())
            self._inflight -= group.num_inflight

        pending = {task: group.env.name for group in groups for task in group.tasks.values()}
        for task in pending:
            task.cancel()
        return pending

    def _end_later(self, pending: Mapping[asyncio.Task[None], str]) -> None:
        """Count cancelled tasks once they have ended."""
        # asyncio keeps only a weak reference to a task. `close` waits for it too.
        ending = asyncio.create_task(self._end(pending))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def _end(self, pending: Mapping[asyncio.Task[None], str]) -> None:
        """Until cancelled tasks have ended, and count them."""
        if not pending:
            return

        done, stuck = await asyncio.wait(pending, timeout=CANCEL_SECONDS)
        if stuck:
            log.warning("%d cancelled rollouts do not end; going on without them", len(stuck))

        # `_member` has counted those that ended by themselves, as finished or failed.
        gone = [*(task for task in done if task.cancelled()), *stuck]
        self.counts["cancelled"] += len(gone)
        self.cancelled.update(pending[task] for task in gone)
