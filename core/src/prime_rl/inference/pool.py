"""Engines that serve one model: which of them gets a request, and what happens when they fail.

A group stays at one engine, for its prefix cache; a new group goes to the engine with the least in
flight. A request whose engine goes away is asked again elsewhere. A request that fails at an engine
that is there is tried again after a pause. While no engine serves, requests wait, and the run says
what for.

``FrozenPool`` has the engines of a frozen model, ``Fleet`` those of the live policy.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from prime_rl.inference import timing
from prime_rl.inference.client import Health, NotListening, NotReady, Silent
from prime_rl.inference.engine import Engine, EngineState
from prime_rl.inference.timing import RetryPolicy

log = logging.getLogger(__name__)

KEPT_HOMES = 16384
"""Groups whose engine is remembered."""

T = TypeVar("T")


class Unanswered(Exception):
    """A request failed in a way that may pass. ``counts``: the engine has met the request and
    failed, and does so only so many times."""

    def __init__(self, reason: str = "", counts: bool = True) -> None:
        super().__init__(reason)
        self.counts = counts


class _Lost(Exception):
    """The engine went away under a request."""


class EnginePool:
    """Sends requests to engines. While ``watch`` runs, it also looks at them."""

    def __init__(
        self,
        engines: Sequence[Engine],
        name: str,
        model: str | None,
        *,
        poll: float = timing.POLL_SECONDS,
        hang_timeout: float = math.inf,
    ) -> None:
        """``name``: begins the message of what requests wait for. ``model``: the name that the
        engines serve it under; None: any. ``hang_timeout``: seconds of silence after which an
        engine is hung."""
        self.engines, self.name, self._model = list(engines), name, model
        self.on_waiting: Callable[[str | None], None] = lambda text: None
        """Called with what requests wait for, and with None when that is over."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when the state of an engine has changed."""
        self._poll, self._hang_timeout = poll, hang_timeout
        self._pause = RetryPolicy(first_wait=poll)
        self._homes: OrderedDict[Hashable, Engine] = OrderedDict()
        self._waiting = 0
        self._said: str | None = None
        self._changed = asyncio.Event()

    @property
    def urls(self) -> list[str]:
        """Base URLs, without ``/v1``."""
        return [engine.url for engine in self.engines]

    @property
    def serving(self) -> list[Engine]:
        """The engines that get requests."""
        return [engine for engine in self.engines if engine.serving]

    async def close(self) -> None:
        """Close the connections."""
        await asyncio.gather(*(engine.client.close() for engine in self.engines))

    # -- requests ---------------------------------------------------------------------------------

    async def ask(
        self,
        key: Hashable,
        work: Callable[[Engine], Awaitable[T]],
        tries: int = timing.EPISODE_TRIES,
    ) -> T:
        """Do ``work`` at an engine: at the one that the key had before, if it serves.

        ``work`` raises ``Unanswered`` to be tried again. Raises the last one when ``LOST_TRIES``
        engines have gone away under the request, or when ``tries`` repetitions have failed.
        """
        attempt = failures = losses = 0
        while True:
            engine = await self._choose(key)
            try:
                answer = await self._do(engine, work)
            except (_Lost, Unanswered) as error:
                if isinstance(error, Unanswered):
                    await self._look(engine)
                    if engine.serving:
                        failures += error.counts
                        if failures > tries:
                            text = f"{engine.label} fails again and again: {error}"
                            raise Unanswered(text) from error
                        attempt += 1
                        self._note_failure(engine, error)
                        with self._shown_waiting():
                            await asyncio.sleep(self._pause.wait_after(attempt))
                        continue
                engine.retried += 1
                losses += 1
                if losses >= timing.LOST_TRIES:
                    raise Unanswered(f"{losses} engines have gone away under it") from error
            else:
                if engine.problem is not None and engine.serving:
                    log.warning("%s answers again", engine.label)
                    engine.problem = None
                    self._notify()
                return answer

    async def _choose(self, key: Hashable) -> Engine:
        if not self.serving:
            with self._shown_waiting():
                while not self.serving:
                    self._check_waiting()
                    await self._changed.wait()
        home = self._homes.get(key)
        if home is None or not home.serving:
            home = min(self.serving, key=lambda e: (e.running, e.asked, e.number))
            self._homes[key] = home
            if len(self._homes) > KEPT_HOMES:
                self._homes.popitem(last=False)
        return home

    def _check_waiting(self) -> None:
        """Raises ``EngineError`` where it is no use to wait for an engine."""

    async def _do(self, engine: Engine, work: Callable[[Engine], Awaitable[T]]) -> T:
        engine.running += 1
        engine.asked += 1
        task, lost = asyncio.ensure_future(work(engine)), engine.lost
        assert lost is not None  # it serves
        either: list[asyncio.Future[Any]] = [task, lost]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise _Lost
            return task.result()
        finally:
            engine.running -= 1
            if not task.done():
                await end(task)

    def _note_failure(self, engine: Engine, error: Unanswered) -> None:
        if engine.problem is None:
            log.warning("%s fails: %s; trying again", engine.label, error)
        engine.problem = error
        self._notify()

    # -- engines ----------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Look at every engine until cancelled, and let it serve when it can."""
        await asyncio.gather(*map(self._watch, self.engines))

    async def _watch(self, engine: Engine) -> None:
        while True:
            health = await self._look(engine)
            if health is not None and not engine.serving:
                await self._join(engine, health)
            pause = self._poll if engine.has_served else timing.START_POLL_SECONDS
            await self._until_next_look(engine, min(pause, self._poll))

    async def _until_next_look(self, engine: Engine, pause: float) -> None:
        await asyncio.sleep(pause)

    async def _join(self, engine: Engine, health: Health) -> None:
        """Let an engine that answers serve."""
        away = engine.serve()
        if away is not None:
            log.warning("%s serves again after %.1f s", engine.label, away)
        self._notify()

    async def _look(self, engine: Engine) -> Health | None:
        """What the engine says of itself; None if it is not ready, or if it has loaded weights
        meanwhile: what it said may be older."""
        asked = time.monotonic()
        async with engine.looking:
            if engine.looked_at > asked:  # another request has just looked
                return None
            version, was_loading = engine.version, engine.loading.locked()
            try:
                health = await engine.client.look(self._model)
            except NotReady as error:
                self._not_ready(engine, error)
                return None
            engine.looked_at = engine.heard_at = engine.ready_at = time.monotonic()
            if engine.state is EngineState.HUNG:
                engine.state = EngineState.STARTING
                self._notify()
            if was_loading or engine.loading.locked() or engine.version != version:
                return None
            if engine.in_service and version is not None and health.version not in (None, version):
                text = f"it has version {health.version}, expected {version}: it was restarted"
                engine.client.asleep = False
                self._lose(engine, NotReady(text))
            return health

    def _not_ready(self, engine: Engine, problem: NotReady) -> None:
        now = engine.looked_at = time.monotonic()
        state, silence = engine.state, now - engine.heard_at
        if isinstance(problem, NotListening):
            engine.client.asleep = False
            return self._lose(engine, problem, EngineState.STARTING)
        if not isinstance(problem, Silent):
            engine.heard_at = now
        if state is EngineState.HUNG and not isinstance(problem, Silent):
            self._lose(engine, problem, EngineState.STARTING)
        elif (
            isinstance(problem, Silent)
            and silence > self._hang_timeout
            and state in (EngineState.SERVING, EngineState.AWAY)
        ):
            self._lose(engine, problem, EngineState.HUNG)
        elif state is EngineState.SERVING:
            # An engine that loads weights may be too busy to answer; the update has its own limits.
            patience = math.inf if engine.loading.locked() else timing.PATIENCE_SECONDS
            if now - engine.ready_at > patience:
                self._lose(engine, problem)
        elif state is not EngineState.ASLEEP:
            self._lose(engine, problem)

    def _lose(
        self, engine: Engine, problem: BaseException, state: EngineState | None = None
    ) -> None:
        """Note a problem of an engine, which does not serve now. ``state``: AWAY if it has served
        until now, by default."""
        if state is None:
            state = EngineState.AWAY if engine.in_service else engine.state
        if state is engine.state and str(problem) == engine.reason:
            return
        if engine.in_service:
            text = "%s is away: %s; %d in flight there"
            log.warning(text, engine.label, problem, engine.running)
        if state is EngineState.HUNG and state is not engine.state:
            log.warning("%s hangs: it takes connections and answers nothing", engine.label)
        engine.problem = problem
        engine.leave(state)
        self._notify()

    # -- messages ---------------------------------------------------------------------------------

    def _notify(self) -> None:
        """Something has changed: wake the requests that wait, and report."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        self._say()
        self.on_change()

    @contextmanager
    def _shown_waiting(self) -> Iterator[None]:
        self._waiting += 1
        self._say()
        try:
            yield
        finally:
            self._waiting -= 1
            self._say()

    def _say(self) -> None:
        works = any(e.serving and e.problem is None for e in self.engines)
        sleeps = any(e.state is EngineState.ASLEEP for e in self.engines)
        text = self.outage() if self._waiting and not works and not sleeps else None
        if text != self._said:
            self._said = text
            self.on_waiting(text)

    def outage(self) -> str:
        """What requests wait for, and why."""
        away = ", ".join(f"{e.url} ({e.reason or 'starting'})" for e in self.engines)
        return f"{self.name} {away}"


async def end(task: asyncio.Future[Any]) -> None:
    """Cancel a task whose result is not needed any more."""
    task.cancel()
    await asyncio.wait([task], timeout=timing.CANCEL_SECONDS)
    if task.done():
        with suppress(asyncio.CancelledError):
            task.exception()  # retrieved, so that asyncio does not log it
