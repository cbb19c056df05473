"""The engines that serve the live policy: who is there, and who gets which group and which weights.

    away --answers--> behind --current weights loaded--> serving --no answer, other weights--> away

A replica serves only with the current version. A group stays at one replica, for its prefix cache;
a new group goes to the one with the least in flight. What a replica that goes away had in flight is
asked again elsewhere. While nobody serves, who asks waits, and after ``timeout`` seconds the run
ends, naming every replica and its reason.

Colocated, all of them sleep while the trainer has the GPU (``sleep``); new weights wake them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from prime_rl.errors import EngineError, EngineGone
from prime_rl.inference.absence import check_start, nobody_serves, outage
from prime_rl.inference.client import (
    EngineAdmin,
    EngineLocked,
    EngineSilent,
    NotReady,
    OtherModel,
    RetryPolicy,
)
from prime_rl.inference.late import all_but_the_late
from prime_rl.inference.replica import Replica
from prime_rl.plugins.weight_transports import WeightDelivery
from prime_rl.weights.versions import Weights, only_in_memory, wait_for_files

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""Between two looks at a replica."""

PATIENCE_SECONDS = 30.0
"""How long a replica that takes connections may say nothing before it counts as away. One that
takes none is away at once."""

REJOIN_SECONDS = 5.0
"""Between two attempts to bring a replica up to date."""

START_GRACE = 30.0
"""At the start, seconds that the first replica to serve waits for the others."""

FAILED_TRIES = 4
"""Times a request is tried again at replicas that are there and fail it: over some 15 seconds."""

LOST_TRIES = 4
"""Times a request is begun at replicas that then go away."""

KEPT_HOMES = 16384
"""Groups whose replica is remembered."""

CANCEL_SECONDS = 5.0
"""How long what a lost replica had in flight may take to end."""

T = TypeVar("T")


class Unanswered(Exception):
    """A request failed in a way that may pass: no answer, too many requests, 5xx."""


class _Lost(Exception):
    """The replica went away under a request."""


@dataclass(frozen=True)
class FleetOptions:
    """How a fleet treats its replicas."""

    model: str | None = None
    """The name they serve the policy under; None: any."""
    own: bool = True
    """The run started them. Others get the first weights pushed, whatever version they report."""
    have_first: bool = True
    """Our own were started with the first weights, and not with earlier ones."""
    timeout: float = 600.0
    """Seconds that the run continues while no replica serves."""
    hang_timeout: float = math.inf
    """Seconds without any answer after which a replica counts as hung."""
    update_timeout: float = 720.0
    retry: RetryPolicy | None = None
    poll: float = POLL_SECONDS


class Fleet:
    """Replicas of one engine, each at the live policy's current version while it serves."""

    def __init__(
        self,
        urls: Sequence[str],
        admin_key: str,
        first: Weights,
        options: FleetOptions | None = None,
        delivery: WeightDelivery | None = None,
    ) -> None:
        """``first``: the weights they sample from at the start. ``delivery``: how new weights
        arrive, if not as files."""
        options = options or FleetOptions()
        one_of_many = RetryPolicy(attempts=3, first_wait=0.5)  # the others wait for it meanwhile
        policy = options.retry or (RetryPolicy() if len(urls) == 1 else one_of_many)
        admins = [EngineAdmin(url, admin_key, options.update_timeout, policy) for url in urls]
        self.replicas = [Replica(number, admin) for number, admin in enumerate(admins)]
        self.on_waiting: Callable[[str | None], None] = lambda text: None
        """Told whom requests wait for when nobody serves, and None when that is over."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when a replica comes or goes."""
        self.asleep = False
        self._first = self._target = first
        self._model, self._own = options.model, options.own
        self._have_first = options.own and options.have_first
        self._timeout, self._hang_timeout = options.timeout, options.hang_timeout
        self._poll = options.poll
        self._homes: OrderedDict[Hashable, Replica] = OrderedDict()
        self._delivery = delivery
        self._late: set[asyncio.Task[None]] = set()
        self._serves = asyncio.Event()
        self._since = time.monotonic()

    @property
    def urls(self) -> list[str]:
        """Base URLs, without ``/v1``."""
        return [replica.url for replica in self.replicas]

    @property
    def serving(self) -> list[Replica]:
        """Those that have the current weights and answer."""
        return [replica for replica in self.replicas if replica.serving]

    async def close(self) -> None:
        """Drop the connections."""
        await asyncio.gather(*map(_end, self._late))
        await asyncio.gather(*(replica.admin.close() for replica in self.replicas))

    # -- who is there -----------------------------------------------------------------------------

    async def wait_ready(self, timeout: float) -> None:
        """Until all serve; or one does, and the others have had ``START_GRACE`` seconds to come.

        Raises ``EngineError`` if nobody serves after ``timeout`` seconds, or takes the run's key;
        at once if one that we have not started serves another model, or if one cannot take weights
        the way they come.
        """
        keeping = asyncio.ensure_future(self._keep_all())
        try:
            async with asyncio.timeout(timeout):
                while not self._serves.is_set():
                    self._check_start()
                    await asyncio.sleep(min(0.05, self._poll))
                grace = time.monotonic() + START_GRACE
                while len(self.serving) < len(self.replicas) and time.monotonic() < grace:
                    self._check_start()
                    await asyncio.sleep(min(0.05, self._poll))
        except TimeoutError:
            if not self.serving:
                raise nobody_serves(self.replicas, timeout, self._own) from None
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
        for replica in self.replicas:
            if not replica.serving:
                replica.down_since = time.monotonic()
                log.warning("going on without engine %s: %s", replica.url, replica.reason)

    def _check_start(self) -> None:
        check_start(self.replicas, self._own)
        for replica in self.replicas:
            if self._delivery is not None and replica.answers:
                self._delivery.check(replica)

    async def run(self) -> None:
        """Look after the replicas until cancelled. Raises ``EngineError`` when nobody has served
        for too long."""
        keeping = asyncio.ensure_future(self._keep_all())
        try:
            while True:
                await asyncio.wait([keeping], timeout=self._poll)
                if keeping.done():
                    keeping.result()
                if self.serving:
                    self._since = time.monotonic()
                elif time.monotonic() - self._since > self._timeout:
                    raise nobody_serves(self.replicas, self._timeout, self._own)
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    async def _keep_all(self) -> None:
        await asyncio.gather(*(self._keep(replica) for replica in self.replicas))

    async def _keep(self, replica: Replica) -> None:
        while True:
            version = await self._look(replica)
            if replica.answers and not replica.serving and not replica.busy:
                await (self._rest(replica) if self.asleep else self._join(replica, version))
            # What starts is looked at more often than what has been away for long.
            await asyncio.sleep(self._poll if replica.known else min(0.1, self._poll))

    async def _look(self, replica: Replica) -> int | None:
        """The version a replica says it has; notes whether it is there at all."""
        asked = time.monotonic()
        async with replica.looking:
            if replica.looked_at > asked:  # somebody else has just looked
                return replica.version
            expected, busy = replica.version, replica.busy
            try:
                version = await replica.admin.look(self._model)
            except NotReady as error:
                self._not_ready(replica, error)
                return None
            if replica.heard():
                self._note_hang(replica)
            replica.looked_at = replica.heard_at = time.monotonic()
            replica.answers, replica.listening, replica.mistaken = True, True, False
            moved = busy or replica.busy or replica.version != expected
            if replica.serving and not moved and version not in (None, expected):
                self._lose(replica, f"it has version {version}, expected {expected}: started anew")
            return version

    def _not_ready(self, replica: Replica, error: NotReady) -> None:
        replica.looked_at, replica.answers = time.monotonic(), False
        replica.listening, replica.mistaken = error.listening, isinstance(error, OtherModel)
        if error.silent:
            news = replica.silent(self._hang_timeout)
        else:
            news = replica.heard() if error.listening else replica.gone()
        if news:
            self._note_hang(replica)
        # One that is loading weights may be too busy to answer: its own timeouts are running.
        quiet = time.monotonic() - replica.heard_at > PATIENCE_SECONDS
        if not error.listening or (not replica.busy and (quiet or not replica.serving)):
            self._lose(replica, str(error))

    def _note_hang(self, replica: Replica) -> None:
        if replica.hung:
            log.warning("engine %s hangs: it takes connections and answers nothing", replica.url)
        self.on_change()

    async def _rest(self, replica: Replica) -> None:
        """Have one that comes while the others sleep do so too: the trainer has its memory."""
        if replica.asleep:
            return
        try:
            await replica.admin.sleep()
            replica.asleep = True
        except EngineError as error:  # tried again at the next look
            replica.reason = str(error)

    async def _join(self, replica: Replica, version: int | None) -> None:
        """Bring a replica up to date, and let it serve."""
        if time.monotonic() < replica.join_at:
            return
        target = self._target
        try:
            if self._delivery is not None:
                self._delivery.check(replica)
            if not self._is_current(replica, version):
                if self._delivery is not None:
                    await wait_for_files(lambda: self._target, self._delivery.timeout)
                    target = self._target
                log.info("bringing engine %s to version %d", replica.url, target.version)
                await self._update(replica, target)
        except EngineError as error:
            replica.join_at = time.monotonic() + min(REJOIN_SECONDS, 5 * self._poll)
            replica.locked = isinstance(error, EngineLocked)
            if replica.reason != str(error):
                log.warning("engine %s stays out: %s", replica.url, error)
                replica.reason = str(error)
                self.on_change()
            return
        if target is not self._target or self.asleep:
            return  # a newer version came meanwhile: at the next look
        away = replica.rejoin(target.version)
        if away is not None:
            log.warning("engine %s serves again after %.1f s", replica.url, away)
        self._serves.set()
        self.on_waiting(None)
        self.on_change()

    def _is_current(self, replica: Replica, version: int | None) -> bool:
        """Whether it has the current weights, by what it says; one that we have not started and
        never talked to may have any weights under that number."""
        if replica.in_doubt or replica.asleep:
            return False
        if version is None:  # it does not tell: of its own it has what it was started with
            return self._have_first and not replica.known and self._target is self._first
        return version == self._target.version and (self._own or replica.known)

    def _lose(self, replica: Replica, reason: str) -> None:
        news = replica.reason != reason
        replica.reason = reason
        if news and not replica.serving:
            self.on_change()
        if replica.serving:
            log.warning(
                "engine %s is away: %s; %d in flight there",
                *(replica.url, reason, replica.running),
            )
            replica.leave()
            self.on_change()
        if not self.serving:
            self._serves.clear()
            self.on_waiting(outage(self.replicas))

    # -- requests ---------------------------------------------------------------------------------

    async def ask(self, key: Hashable, work: Callable[[Replica], Awaitable[T]]) -> T:
        """Have ``work`` done at a replica, the key's own if that serves; waits while nobody does.

        Where the replica goes away meanwhile, it is done anew elsewhere. Raises ``Unanswered`` when
        that has happened ``LOST_TRIES`` times, or when ``work`` has raised it ``FAILED_TRIES``
        times more at replicas that are there.
        """
        failures = losses = 0
        while True:
            replica = await self._choose(key)
            try:
                return await self._at(replica, work)
            except (_Lost, Unanswered) as error:
                await self._look(replica)
                if not replica.serving or isinstance(error, _Lost):
                    replica.retried += 1
                    losses += 1
                    if losses >= LOST_TRIES:  # it may be what kills them
                        raise Unanswered(f"{losses} engines have gone away under it") from error
                elif failures < FAILED_TRIES:
                    await asyncio.sleep(min(10.0, self._poll * 2.0**failures))
                    failures += 1
                else:
                    raise

    async def _choose(self, key: Hashable) -> Replica:
        while (replica := self._pick(key)) is None:
            await self._serves.wait()
        return replica

    def _pick(self, key: Hashable) -> Replica | None:
        """The key's replica, or the one with the least in flight; None while nobody serves."""
        if self.asleep or not self.serving:
            return None
        home = self._homes.get(key)
        if home is None or not home.serving:
            home = min(self.serving, key=lambda r: (r.running, r.asked, r.number))
            self._homes[key] = home
            if len(self._homes) > KEPT_HOMES:
                self._homes.popitem(last=False)
        return home

    async def _at(self, replica: Replica, work: Callable[[Replica], Awaitable[T]]) -> T:
        replica.running += 1
        replica.asked += 1
        task, lost = asyncio.ensure_future(work(replica)), replica.lost
        assert lost is not None  # it serves
        either: list[asyncio.Future[Any]] = [task, lost]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise _Lost
            return task.result()
        finally:
            replica.running -= 1
            if not task.done():
                await _end(task)

    # -- weights, and sleep -----------------------------------------------------------------------

    async def update_weights(self, weight_dir: Path, version: int) -> float:
        """Have every replica that serves load published weights; the seconds it took.

        One that fails or is late is taken out, and the others go on. If all refuse, raises
        ``EngineError`` with the reason of the first, and they serve on as they were; if none
        answers, ``EngineGone``.
        """
        start, weights, before = time.perf_counter(), Weights(weight_dir, version), self._target
        self._target = weights
        asked = [r for r in self.serving if r.version != version or r.asleep]
        left: Sequence[Replica] = asked
        missed: dict[Replica, BaseException] = {}
        try:
            if self._delivery is not None and only_in_memory(weight_dir):
                left, missed = await self._delivery.deliver(weights, asked, self._update)
            # One that went away during the delivery: ``_join`` may be at it already.
            here = [replica for replica in left if replica.serving]
            tasks = {r: asyncio.create_task(self._update(r, weights)) for r in here}
            await all_but_the_late(list(tasks.values()))
        finally:
            self._wake()
        ends = {r: self._failure(r, task) for r, task in tasks.items()}
        failed = [(r, e) for r, e in (*missed.items(), *ends.items()) if e is not None]
        refusals = [e for _, e in failed if not isinstance(e, EngineGone)]
        if stranger := next((e for e in refusals if not isinstance(e, EngineError)), None):
            raise stranger
        if asked and len(refusals) == len(asked):
            self._target = before
            raise refusals[0]
        for replica, error in failed:
            self._lose(replica, str(error))
        if not self.serving:
            raise EngineGone(outage(self.replicas))
        self.on_change()
        return time.perf_counter() - start

    def _failure(self, replica: Replica, task: asyncio.Task[None]) -> BaseException | None:
        """How an update went. One that is late goes on: once it is through, the replica joins."""
        if task.done():
            return task.exception()
        self._late.add(task)
        task.add_done_callback(self._late_is_done)
        return EngineGone(f"engine {replica.url} is late with new weights that others have loaded")

    def _late_is_done(self, task: asyncio.Task[None]) -> None:
        self._late.discard(task)
        if not task.cancelled():
            task.exception()  # the next attempt to join tells, should it fail as well

    async def _update(
        self, replica: Replica, weights: Weights, meeting: Mapping[str, Any] | None = None
    ) -> None:
        replica.busy, replica.in_doubt = True, True
        try:
            await replica.admin.update(weights, asleep=replica.asleep, meeting=meeting)
            replica.heard()
            replica.version, replica.heard_at = weights.version, time.monotonic()
            replica.asleep = replica.in_doubt = False
        except EngineSilent:
            if replica.hang():
                self._note_hang(replica)
            raise
        finally:
            replica.busy = False

    async def sleep(self) -> None:
        """Have every replica give its memory back; requests in flight are kept, new ones wait.
        ``update_weights`` wakes them. Raises ``EngineError`` if one cannot."""
        self.asleep = True
        self._serves.clear()
        asked = self.serving
        outcomes = await asyncio.gather(
            *(replica.admin.sleep() for replica in asked), return_exceptions=True
        )
        self.on_change()
        for replica, error in zip(asked, outcomes, strict=True):
            replica.asleep = error is None
            if isinstance(error, EngineGone):
                self._lose(replica, str(error))
            elif isinstance(error, EngineError):
                raise EngineError(
                    f"{error}. deployment.colocated needs an engine that gives its memory back "
                    "(POST /sleep and /wake_up, docs/engines.md)."
                ) from error
            elif error is not None:
                raise error

    def _wake(self) -> None:
        self.asleep = False
        if self.serving:
            self._serves.set()

    # -- metrics ----------------------------------------------------------------------------------

    async def pages(self) -> list[str]:
        """The Prometheus page of every replica that answers at once."""
        found = await asyncio.gather(*(r.admin.metrics() for r in self.replicas if r.answers))
        return [page for page in found if page is not None]

    def take_metrics(self) -> dict[str, float]:
        """Of each replica, under its number; what is counted is counted since the last call."""
        metrics = {"inference/replicas_serving": float(len(self.serving))}
        for replica in self.replicas:
            for name, value in replica.take_metrics().items():
                metrics[f"inference/{replica.number}/{name}"] = value
        return metrics


async def _end(task: asyncio.Future[T]) -> None:
    """Cancel what nobody waits for any more."""
    task.cancel()
    await asyncio.wait([task], timeout=CANCEL_SECONDS)
    if task.done():
        with suppress(asyncio.CancelledError):
            task.exception()  # whatever it is, nobody asks
