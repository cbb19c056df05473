"""The engines of the live policy: each serves only with the current version of its weights.

An engine that comes back, or is late, loads the current weights before it serves. If there are
newer ones by then, it loads the next ones together with the others. Colocated, all engines sleep
while the trainer has the GPU (``sleep``); new weights wake them. While no engine serves, requests
wait; after ``timeout`` seconds the run ends with the reason of each engine.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from prime_rl.errors import ConfigError, EngineError, EngineGone
from prime_rl.inference import timing
from prime_rl.inference.client import EngineClient, EngineRefused, EngineSilent, Health, OtherModel
from prime_rl.inference.engine import EngineState, Replica
from prime_rl.inference.pool import EnginePool, end
from prime_rl.inference.timing import RetryPolicy
from prime_rl.plugins.weight_transports import WeightDelivery
from prime_rl.weights.versions import Weights, only_in_memory, wait_for_files

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FleetOptions:
    """How a fleet treats its engines."""

    model: str | None = None
    """The name they serve the policy under; None: any."""
    own: bool = True
    """The run started them. Others get the first weights pushed, whatever version they report."""
    have_first: bool = True
    """Our own were started with the first weights, and not with earlier ones."""
    timeout: float = 600.0
    """Seconds that the run continues while no engine serves."""
    hang_timeout: float = math.inf
    """Seconds without any answer after which an engine counts as hung."""
    retry: RetryPolicy | None = None
    """How requests to the admin routes are retried."""
    poll: float = timing.POLL_SECONDS
    headers: tuple[tuple[str, str], ...] = ()
    """HTTP headers of every request."""


class Fleet(EnginePool):
    """Engines at the live policy's current version."""

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
        retry = options.retry or (RetryPolicy() if len(urls) == 1 else one_of_many)
        self._client = partial(
            EngineClient, key=admin_key, retry=retry, headers=dict(options.headers)
        )

        clients = [self._client(url) for url in urls]
        version = first.version if options.own and options.have_first else None
        engines = [Replica(number, client, version) for number, client in enumerate(clients)]
        poll = options.poll
        hang_timeout = options.hang_timeout
        super().__init__(engines, options.model, poll=poll, hang_timeout=hang_timeout)

        self._grace = timing.START_GRACE
        self.asleep = False
        self._own = options.own
        self._timeout = options.timeout
        self._target = first
        self._delivery = delivery
        self._stragglers: set[asyncio.Task[None]] = set()
        self._left: list[Replica] = []
        self.names: dict[str, str] = {}
        """Names of the engines' processes by URL, for reports."""

    async def close(self) -> None:
        await asyncio.gather(*map(end, self._stragglers))
        self.engines += self._left  # their clients may have been in use until now
        await super().close()

    def follow(self, urls: Sequence[str], names: Sequence[str] = ()) -> None:
        """Engines join and leave: these are the fleet's from now on. One that joins loads the
        current weights before it serves; what is in flight at one that leaves is asked again."""
        self.names = dict(zip(urls, names, strict=False))

        known = {engine.url: engine for engine in self.engines}
        for engine in (known[url] for url in known.keys() - set(urls)):
            self.engines.remove(engine)
            self._left.append(engine)
            if engine in self._watching:
                self._watching.pop(engine).cancel()
            self._lose(engine, EngineGone(f"engine {engine.url} has left the run"))

        numbers = itertools.count(1 + max((e.number for e in known.values()), default=-1))
        for client in (self._client(url) for url in urls):
            if client.url not in known:
                self.engines.append(Replica(next(numbers), client))
                log.info("engine %s joins the run", client.url)

        self._watch_all()
        self._notify()

    # -- start, and watch -------------------------------------------------------------------------

    async def run(self) -> None:
        """Until cancelled. Raises ``EngineError`` when no engine has served for too long."""
        self._watch_all()
        since = time.monotonic()
        while True:
            super()._check(EngineError)
            if any(engine.in_service for engine in self.engines):
                since = time.monotonic()
            elif time.monotonic() - since > self._timeout:
                raise self._none_serves(self._timeout)
            await asyncio.sleep(self._poll)

    def _check(self, kind: type[ConfigError | EngineError]) -> None:
        """An engine that we have not started serves another model; one cannot receive weights the
        way they come; none takes the run's key."""
        super()._check(kind)
        if kind is EngineError:  # after the start, engines come and go
            return

        for engine in self.engines:
            if isinstance(engine.problem, OtherModel) and not self._own:
                raise EngineError(
                    f"{engine.reason} (model.name). Name the model that it serves, start it with "
                    "that name (prime-rl serve --served-model-name), or fix inference.base_url."
                )

            if self._delivery is not None and engine.ready_at:
                self._delivery.check(engine)

        locked = [isinstance(e.problem, EngineRefused) and e.problem.locked for e in self.engines]
        if locked and all(locked):
            raise EngineError(
                f"{self.outage()}. New weights need the key that the engines were started with: "
                "export it under the name that inference.admin_key_var gives."
            )

    def _not_ready(self, timeout: float) -> None:
        if not self.serving:
            raise self._none_serves(timeout)
        for engine in self.engines:
            if not engine.serving:
                engine.down_since = time.monotonic()
                log.warning("continuing without engine %s: %s", engine.url, engine.reason)

    def _none_serves(self, seconds: float) -> EngineError:
        logs = "Its log is" if len(self.engines) == 1 else "Their logs are"
        hint = f"{logs} logs/latest/inference*.log of the run directory."
        if not self._own:
            hint = "Start them, or fix inference.base_url."
        waited = f"no engine serves after {seconds:.0f} s (inference.ready_timeout)"
        return EngineError(f"{waited}: {self.outage()}. {hint}")

    async def _join(self, engine: Replica, health: Health) -> None:
        """Load the current weights into an engine, and let it serve. While the others sleep, put it
        to sleep: the trainer has its memory."""
        sleeps = self.asleep and engine.state is EngineState.ASLEEP
        waits = engine.state is EngineState.WAITING
        # A trainer that shares its memory needs it now. Without an engine in service there are no
        # rollouts, so no newer version would come.
        hurries = waits and (self.asleep or not any(e.in_service for e in self.engines))
        not_before = engine.waits_until if waits else engine.join_at
        if sleeps or (time.monotonic() < not_before and not hurries):
            return

        if waits:
            engine.leave(EngineState.AWAY)  # an update would wait until we are done
        started = time.monotonic()
        try:
            if self.asleep:
                await engine.client.sleep()
                engine.rest()
                engine.version = health.version
                return self._notify()
            target = await self._bring_up_to_date(engine, health)
        except EngineError as error:
            engine.join_at = time.monotonic() + min(timing.REJOIN_SECONDS, 5 * self._poll)
            if engine.reason != str(error):
                log.warning("%s: it stays out", error)
            return self._lose(engine, error)

        if self.asleep:  # it is put to sleep at the next look
            return
        # Equal, not identical: while no engine serves, the watcher announces a version repeatedly.
        if target == self._target:
            return await super()._join(engine, health)

        # The others have loaded a newer version meanwhile. If a step takes less time than loading,
        # that happens each time, so the engine waits for the next version and loads it with them.
        now = time.monotonic()
        engine.wait(until=now + timing.WAIT_FACTOR * (now - started))
        self._notify()

    async def _bring_up_to_date(self, engine: Replica, health: Health) -> Weights:
        """The weights that it has now."""
        if self._delivery is not None:
            self._delivery.check(engine)
        target = self._target

        version = engine.version
        # An engine that does not say its version may have been restarted since it served.
        is_certain = health.version == version or (health.version is None and not engine.has_served)
        is_current = version == target.version and is_certain
        if engine.state is EngineState.ASLEEP or not is_current:
            # A transport sends each version once. An engine that joins later reads files.
            if self._delivery is not None:
                await wait_for_files(lambda: self._target, self._delivery.timeout)
                target = self._target
            log.info("bringing engine %s to version %d", engine.url, target.version)
            await self._update(engine, target)

        return target

    # -- weights, and sleep -----------------------------------------------------------------------

    async def update_weights(self, weight_dir: Path, version: int) -> float:
        """Have every engine that serves load published weights; the seconds it took.

        An engine that fails or is late is taken out. If all refuse, raises ``EngineError`` with the
        reason of the first, and they serve on as they were; if none answers, ``EngineGone``.
        """
        start = time.perf_counter()
        weights = Weights(weight_dir, version)
        before = self._target
        # Before the first await: an engine that joins from now on loads these.
        self._target = weights

        asked = [
            e for e in self.engines if e.takes_weights and (e.version != version or not e.serving)
        ]
        try:
            failures = await self._load(weights, asked)
        finally:
            self.asleep = False

        refusals = [error for error in failures.values() if not isinstance(error, EngineGone)]
        bug = next((error for error in refusals if not isinstance(error, EngineError)), None)
        if bug:
            raise bug
        if asked and len(refusals) == len(asked):
            self._target = before
            for engine in (each for each in asked if each.in_service):
                engine.version = before.version
            raise refusals[0]

        for engine, error in failures.items():
            if not (engine.serving and engine.version == version):  # it has not joined since
                self._lose(engine, error)

        for engine in asked:
            # One that was restarted meanwhile has been put to sleep again: ``_join`` wakes it.
            loaded = engine.takes_weights and engine.version == version
            if loaded and not engine.serving and not engine.client.asleep:
                self._let_serve(engine)

        self._notify()
        if not self.serving:
            raise EngineGone(self.outage())
        return time.perf_counter() - start

    def take_paused(self) -> float:
        """Seconds for which new weights kept an engine from sampling, since the last call: the mean
        of the engines."""
        seconds = [engine.client.take_paused() for engine in self.engines]
        return sum(seconds) / max(len(seconds), 1)

    async def _load(
        self, weights: Weights, asked: Sequence[Replica]
    ) -> dict[Replica, BaseException]:
        """Have engines load weights; how it failed, by engine. A straggler continues: it joins when
        it is done."""
        left = asked
        missed = dict[Replica, BaseException]()
        if self._delivery is not None and only_in_memory(weights.directory):
            left, missed = await self._delivery.deliver(weights, asked, self._update)

        # An engine that went away during the delivery may be joining already.
        here = [engine for engine in left if engine.takes_weights]
        tasks = {e: asyncio.create_task(self._update(e, weights)) for e in here}
        await all_but_stragglers(list(tasks.values()))

        for engine, task in tasks.items():
            if not task.done():
                self._stragglers.add(task)
                task.add_done_callback(self._straggler_done)
                text = f"engine {engine.url} is late with new weights that others have loaded"
                missed[engine] = EngineGone(text)
                continue

            error = task.exception()
            if error is not None:
                missed[engine] = error

        return missed

    def _straggler_done(self, task: asyncio.Task[None]) -> None:
        self._stragglers.discard(task)
        if not task.cancelled():
            task.exception()  # the next attempt to join reports it, should it fail as well

    async def _update(
        self, engine: Replica, weights: Weights, meeting: Mapping[str, Any] | None = None
    ) -> None:
        async with engine.loading:
            try:
                await engine.client.update(weights, meeting)
            except BaseException as error:
                engine.version = None  # it may be paused, and have either weights
                if isinstance(error, EngineSilent) and engine.state is not EngineState.STARTING:
                    self._lose(engine, error, EngineState.HUNG)
                raise
            engine.version = weights.version
            engine.mark_ready()

    async def sleep(self) -> None:
        """Have every engine give its memory back; requests in flight are kept, new ones wait.
        ``update_weights`` wakes them. Raises ``EngineError`` if one cannot."""
        # Before the first await: an engine that joins meanwhile must not serve.
        self.asleep = True
        asked = self.serving

        for engine in asked:
            # Marked at once, so that no request goes to an engine that is falling asleep.
            engine.state = EngineState.ASLEEP

        outcomes = await asyncio.gather(
            *(engine.client.sleep() for engine in asked), return_exceptions=True
        )

        for engine, error in zip(asked, outcomes, strict=True):
            if isinstance(error, EngineGone):
                self._lose(engine, error)
            elif isinstance(error, EngineError):
                raise EngineError(
                    f"{error}. deployment.colocated needs an engine that gives its memory back "
                    "(POST /sleep and /wake_up, docs/engines.md)."
                ) from error
            elif error is not None:
                raise error

        self._notify()


class NoFleet(Fleet):
    """The fleet of a run without engines: new weights count as served as soon as they are
    announced."""

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def update_weights(self, weight_dir: Path, version: int) -> float:
        self._target = Weights(weight_dir, version)
        return 0.0

    async def sleep(self) -> None:
        """Nothing holds memory."""

    async def _choose(self, key: Hashable, failed_at: Replica | None) -> Replica:
        raise ConfigError(
            "a plugin asks the policy for tokens or logprobs, and the run has no engine "
            "(inference.replicas is 0). Set inference.replicas to 1."
        )


async def all_but_stragglers(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Return when all are done, or when some have succeeded and the rest are stragglers: they take
    much longer than the others, and continue. A failure sets no pace: while no task has succeeded,
    only their own timeouts apply. Cancelling this cancels the tasks."""
    started = time.monotonic()

    pace = None
    pending = set(tasks)
    try:
        while pending:
            left = None
            if pace is not None:
                limit = max(timing.STRAGGLER_SECONDS, timing.STRAGGLER_FACTOR * pace)
                left = started + limit - time.monotonic()
                if left <= 0:
                    return

            done, pending = await asyncio.wait(
                pending, timeout=left, return_when=asyncio.FIRST_COMPLETED
            )
            if any(not task.cancelled() and task.exception() is None for task in done):
                pace = time.monotonic() - started
    except BaseException:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        raise
