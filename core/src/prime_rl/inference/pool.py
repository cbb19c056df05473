"""Engines that serve one model: which of them gets a request, and what happens when they fail.

A group stays at one engine, for its prefix cache; a new group goes to the engine with the least in
flight. A request whose engine goes away is asked again elsewhere. A request that fails at an engine
that is there is tried again after a pause, at another engine if another one serves. While no engine
serves, requests wait, and the run shows the reason.

From the first request on, the pool looks at its engines: see ``engine.py`` for their states.
``FrozenPool`` has the engines of a frozen model, ``Fleet`` those of the live policy.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from prime_rl.config.contract import FrozenModel
from prime_rl.errors import ConfigError, EngineError, EngineGone
from prime_rl.inference import timing
from prime_rl.inference.client import EngineClient, EngineFailed, EngineRefused, Health
from prime_rl.inference.engine import EngineState, Replica
from prime_rl.inference.timing import RetryPolicy
from prime_rl.variables import all_headers, check_exported

log = logging.getLogger(__name__)

KEPT_HOMES = 16384
"""Groups whose engine is remembered."""

DOES = {
    EngineState.WAITING: "waits for the next weights",
    EngineState.AWAY: "loads weights",
}
"""What an engine does that does not serve and has no problem. In other states it is starting."""

T = TypeVar("T")


class GivenUp(EngineError):
    """A request has failed too often."""


class _Lost(Exception):
    """The engine went away under a request."""


class EnginePool:
    """Sends requests to engines that can take them."""

    def __init__(
        self,
        engines: Sequence[Replica],
        model: str | None,
        *,
        poll: float = timing.POLL_SECONDS,
        hang_timeout: float = math.inf,
    ) -> None:
        """``model``: the name that the engines serve it under; None: any. ``hang_timeout``: seconds
        of silence after which an engine is hung."""
        self.engines = list(engines)
        self._model = model

        self.on_waiting: Callable[[str | None], None] = lambda text: None
        """Called with the reason why requests wait, and with None when they no longer wait."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when the state of an engine has changed."""

        self._poll = poll
        self._hang_timeout = hang_timeout
        self._grace = math.inf
        self._pause = RetryPolicy(first_wait=poll)

        self._homes: dict[Hashable, Replica] = {}
        self._waiting = 0
        self._starting = False
        self._said: str | None = None
        self._changed = asyncio.Event()
        self._watching: dict[Replica, asyncio.Task[None]] = {}

    @property
    def serving(self) -> list[Replica]:
        """The engines that get requests."""
        return [engine for engine in self.engines if engine.serving]

    async def close(self) -> None:
        """Stop looking at the engines, and close the connections."""
        # The tasks end first, because they use the connections.
        await asyncio.gather(*map(end, self._watching.values()))
        await asyncio.gather(*(engine.client.close() for engine in self.engines))

    # -- requests ---------------------------------------------------------------------------------

    async def ask(
        self,
        key: Hashable,
        work: Callable[[Replica], Awaitable[T]],
        tries: int = timing.EPISODE_TRIES,
    ) -> T:
        """Do ``work`` at an engine: at the one that the key had before, if it serves.

        ``work`` raises ``EngineGone`` or ``EngineFailed`` to be tried again. Raises ``GivenUp``
        when ``LOST_TRIES`` engines have gone away under the request, or when it has failed more
        than ``tries`` times with status 500 at engines that are ready. An engine that is overloaded
        (429, 503) has time.
        """
        self._watch_all()

        # Three counters, because a request has three kinds of patience.
        attempts = 0  # the pause grows with each
        failures = 0  # the request itself may be at fault
        losses = 0  # engines that went away under it
        failed_at: Replica | None = None

        while True:
            engine = await self._choose(key, failed_at)
            try:
                answer = await self._do(engine, work)
            except (_Lost, EngineGone, EngineFailed) as error:
                if await self._has_gone(engine, error):
                    # That is not the request's fault: it moves at once.
                    engine.retried += 1
                    losses += 1
                    if losses >= timing.LOST_TRIES:
                        text = f"{losses} engines have gone away under a request"
                        last = f"the last was {engine.client.label}. See its log."
                        raise GivenUp(f"{text}; {last}") from error
                    continue

                # A 500 may be the fault of the request itself, which then fails everywhere. If the
                # engine does not answer our look either, the engine or the network is at fault.
                failed = isinstance(error, EngineFailed) and error.status == 500
                if failed and engine.is_ready:
                    failures += 1
                    if failures > tries:
                        text = f"a request failed {failures} times: {error}. See its log."
                        raise GivenUp(text) from error

                attempts += 1
                failed_at = engine

                # Many requests fail together: one of them logs it.
                if engine.problem is None:
                    log.warning("%s; trying again", error)
                engine.problem = error
                self._notify()

                with self._shown_waiting():
                    await asyncio.sleep(self._pause.wait_after(attempts))
            else:
                if engine.problem is not None and engine.serving:
                    log.warning("%s answers again", engine.client.label)
                    engine.problem = None
                    self._notify()
                return answer

    async def _has_gone(self, engine: Replica, error: Exception) -> bool:
        """Whether the engine has gone. Otherwise only this request has failed."""
        if isinstance(error, _Lost):
            return True
        await self._look(engine)
        return not engine.serving

    async def _choose(self, key: Hashable, failed_at: Replica | None) -> Replica:
        self._raise_bugs()

        if not self.serving:
            with self._shown_waiting():
                while not self.serving:
                    self._check(EngineError)
                    await self._changed.wait()

        home = self._homes.get(key)
        if home is None or not home.serving or home is failed_at:
            # The members of a group share a prompt, whose KV their engine keeps: so a key has a
            # home. `asked` lets idle engines take turns.
            others = [engine for engine in self.serving if engine is not failed_at]
            home = min(others or self.serving, key=lambda e: (e.running, e.asked, e.number))
            self._homes[key] = home
            if len(self._homes) > KEPT_HOMES:
                del self._homes[next(iter(self._homes))]  # the oldest

        return home

    async def _do(self, engine: Replica, work: Callable[[Replica], Awaitable[T]]) -> T:
        engine.running += 1
        engine.asked += 1

        task = asyncio.ensure_future(work(engine))
        # Ends this request as soon as any other finds the engine gone: a connection to a machine
        # that is off may stay silent for minutes.
        lost = asyncio.Future[None]()
        engine.flights.add(lost)

        try:
            await asyncio.wait((task, lost), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise _Lost
            return task.result()
        finally:
            engine.running -= 1
            engine.flights.discard(lost)
            if not task.done():
                await end(task)

    # -- engines ----------------------------------------------------------------------------------

    async def wait_ready(self, timeout: float) -> None:
        """Until all serve. In a fleet: or one does, and the others have had ``START_GRACE`` seconds
        more.

        Raises ``EngineError`` after ``timeout`` seconds, ``ConfigError`` or ``EngineError`` at once
        for what waiting does not change.
        """
        self._watch_all()

        deadline = time.monotonic() + timeout
        self._starting = True

        with self._shown_waiting():
            while len(self.serving) < len(self.engines):
                self._check(ConfigError)
                now = time.monotonic()
                # The run can begin with one engine. It does not wait long for the others.
                if self.serving:
                    deadline = min(deadline, now + self._grace)

                if now >= deadline:
                    self._not_ready(timeout)
                    break
                await asyncio.sleep(min(timing.WAIT_READY_SECONDS, self._poll))

            self._starting = False

    def _not_ready(self, timeout: float) -> None:
        """The time of ``wait_ready`` is over."""
        text = f"not ready after {timeout:g} s: {self.outage()}"
        raise EngineError(f"{text}. Start it, or fix the base_url.")

    def _check(self, kind: type[ConfigError | EngineError]) -> None:
        """Raises ``kind`` for a failure that waiting does not end."""
        self._raise_bugs()

    def _raise_bugs(self) -> None:
        """Raises the error that ended the watch of an engine: without it, the engine could leave or
        come back unnoticed."""
        for watching in self._watching.values():
            if watching.done():
                watching.result()

    def _watch_all(self) -> None:
        """Look at every engine until ``close``, and let it serve when it can."""
        for engine in self.engines:
            if engine not in self._watching:
                self._watching[engine] = asyncio.create_task(self._watch(engine))
                # A watch that fails wakes the waiting requests, which raise its error.
                self._watching[engine].add_done_callback(lambda task: self._notify())

    async def _watch(self, engine: Replica) -> None:
        while True:
            health = await self._look(engine)
            if health is not None and not engine.serving:
                await self._join(engine, health)
            pause = self._poll if engine.has_served else timing.START_POLL_SECONDS
            await self._until_next_look(engine, min(pause, self._poll))

    async def _until_next_look(self, engine: Replica, pause: float) -> None:
        await asyncio.sleep(pause)

    async def _join(self, engine: Replica, health: Health) -> None:
        """Let an engine that answers serve."""
        self._let_serve(engine)

    def _let_serve(self, engine: Replica) -> None:
        away = engine.serve()
        if away is not None:
            log.warning("%s serves again after %.1f s", engine.client.label, away)
        self._notify()

    async def _look(self, engine: Replica) -> Health | None:
        """What the engine says of itself; None if it is not ready, or if it has loaded weights
        meanwhile: what it said may be older."""
        asked = time.monotonic()
        # Requests that fail together ask an engine once.
        async with engine.looking:
            if engine.looked_at > asked:  # another request has just looked
                return None
            # Read before the look: both may change while the engine answers.
            version = engine.version
            was_loading = engine.loading.locked()

            try:
                health = await engine.client.look(self._model)
            except EngineError as problem:
                engine.looked_at = time.monotonic()

                others = [each for each in self.serving if each is not engine]
                state = engine.after(problem, self._hang_timeout, alone=not others)
                if state is not engine.state or not engine.takes_weights:
                    self._lose(engine, problem, state)
                return None

            engine.looked_at = time.monotonic()
            engine.mark_ready()
            if engine.state is EngineState.HUNG:
                engine.state = EngineState.STARTING
                self._notify()

            if was_loading or engine.loading.locked() or engine.version != version:
                return None
            # Another process at the same address: it has the weights that it was started with, and
            # nothing has put it to sleep.
            is_other = version is not None and health.version not in (None, version)
            if engine.takes_weights and is_other:
                text = f"has version {health.version}, expected {version}: it was restarted"
                engine.client.asleep = False
                self._lose(engine, EngineError(f"{engine.client.label} {text}"))

            return health

    def _lose(
        self, engine: Replica, problem: BaseException, state: EngineState | None = None
    ) -> None:
        """Note a problem of an engine, which does not serve now. ``state``: AWAY if it has served
        or waited until now, by default."""
        if state is None:
            state = EngineState.AWAY if engine.takes_weights else engine.state
        if state is engine.state and str(problem) == engine.reason:
            return
        if engine.in_service:
            log.warning("%s; %d in flight there are lost", problem, engine.running)
        if state is EngineState.HUNG and state is not engine.state:
            text = "%s hangs: it takes connections and answers nothing"
            log.warning(text, engine.client.label)

        engine.problem = problem
        engine.leave(state)
        self._notify()

    # -- messages ---------------------------------------------------------------------------------

    def _notify(self) -> None:
        """Something has changed: wake the requests that wait, and report."""
        changed = self._changed
        # A new event for each change: a waiter that comes after this one waits for the next.
        self._changed = asyncio.Event()
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
        works = any(engine.in_service and engine.problem is None for engine in self.engines)
        waits = self._waiting and (self._starting or not works)
        text = self.outage() if waits else None
        if text != self._said:
            self._said = text
            self.on_waiting(text)

    def outage(self) -> str:
        """What requests wait for, and why."""
        away = [engine for engine in self.engines if engine.problem or not engine.in_service]
        reasons = [e.reason or f"{e.client.label} {DOES.get(e.state, 'is starting')}" for e in away]
        return "; ".join(reasons) if self.engines else "all engines have left: one has to join"


async def end(task: asyncio.Future[Any]) -> None:
    """Cancel a task whose result is not needed any more."""
    task.cancel()
    await asyncio.wait([task], timeout=timing.CANCEL_SECONDS)
    if task.done():
        with suppress(asyncio.CancelledError):
            task.exception()  # retrieved, so that asyncio does not log it


class FrozenPool(EnginePool):
    """``where``: whose model it is, in messages: ``env 'a': teacher``."""

    def __init__(
        self,
        urls: Sequence[str],
        model: str,
        *,
        where: str,
        api_key: str | Sequence[str] | None = None,
        headers: Mapping[str, str] | None = None,
        on_waiting: Callable[[str | None], None] = lambda text: None,
        poll: float = timing.POLL_SECONDS,
    ) -> None:
        self.label = f"{where} {model!r}"
        label = f"{self.label} at"
        clients = [EngineClient(url, api_key, label=label, headers=headers) for url in urls]
        engines = [Replica(number, client) for number, client in enumerate(clients)]
        super().__init__(engines, model, poll=poll)
        self.on_waiting = on_waiting

    @classmethod
    def of(
        cls, model: FrozenModel, *, where: str, on_waiting: Callable[[str | None], None]
    ) -> FrozenPool:
        """The pool of a table of the TOML. Raises ``ConfigError`` if a key or header is not in the
        environment."""
        check_exported(model, f"{where} {model.name!r}")
        return cls(
            model.base_url,
            model.name,
            where=where,
            api_key=[os.environ[name] for name in model.key_vars],
            headers=all_headers(model.headers, model.headers_from_env),
            on_waiting=on_waiting,
        )

    @property
    def max_model_len(self) -> int | None:
        """Tokens that every engine takes, once ``wait_ready`` has returned; None: unknown."""
        limits = [engine.client.health.max_model_len for engine in self.engines]
        return min((limit for limit in limits if limit), default=None)

    async def _until_next_look(self, engine: Replica, pause: float) -> None:
        # A frozen model never changes, so one that answers is left alone until a request fails.
        if engine.serving and engine.lost is not None:
            await asyncio.wait([engine.lost])
        await asyncio.sleep(pause)

    async def _look(self, engine: Replica) -> Health | None:
        if engine.serving and engine.problem is None:
            # The last look may be hours ago; the patience with a silent engine begins here.
            engine.ready_at = time.monotonic()
        return await super()._look(engine)

    def _check(self, kind: type[ConfigError | EngineError]) -> None:
        super()._check(kind)
        for engine in self.engines:
            problem = engine.problem
            if isinstance(problem, EngineRefused):
                raise kind(f"{problem}. {problem.fix}")
