"""The workers of one environment: started, watched, replaced.

One task per worker is its life: start it, ask its event loop for an answer again and again, wait
for its end, fail its episodes, start another one in its place.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
from pydantic import ValidationError

from prime_rl.errors import RunError
from prime_rl.rundir.launch import ENV_SERVER_KEY
from prime_rl.rundir.scratch import Scratch
from prime_rl_env_workers.client import BadResult, WorkerClient, WorkerLost
from prime_rl_env_workers.forks import WorkerFork, WorkerForks
from prime_rl_env_workers.placed import Find

if TYPE_CHECKING:
    from verifiers.v1 import ModelContext

log = logging.getLogger(__name__)

GIB = 2.0**30
LATE_SECONDS = 30.0
"""How long after its time-out an episode may give no result."""
STARTS = 3
"""Workers in a row that may end before they were ready, until the run ends."""
LONGEST_PAUSE = 30.0
"""Seconds between the end of a worker that did nothing, and the next in its place."""
FIND_SECONDS = 0.25
"""Between two looks for a server that a launcher starts."""
SOCKETS = "prime-rl-env-"
"""Beginning of the name of a folder with the workers' sockets."""
MOST_PATH = 100
"""Bytes of the path of a Unix socket."""


@dataclass(frozen=True)
class WorkerLimits:
    """When a worker is replaced, and an episode given up."""

    hang_timeout: float
    """Seconds."""
    max_memory: float
    """Bytes."""
    timeout: float | None
    """Seconds of an episode, which the worker watches too. None: no limit here."""
    start_timeout: float = 1800.0
    """Seconds."""
    max_episodes: int | None = None
    """Episodes at once on one worker. None: any number."""


@dataclass(eq=False)
class Worker:
    """One worker, of ours or of a server on another machine."""

    number: int
    """Its place among the env's workers."""
    name: str
    client: WorkerClient
    ended: asyncio.Future[str]
    """How it ended."""
    address: str
    fork: WorkerFork | None = None
    """None: it runs on another machine."""
    instance: str | None = None
    """The name that it reports. None: it has not answered yet."""
    cause: str | None = None
    """Why we end it."""
    silent: float = 0.0
    """Seconds since its event loop answered."""
    memory: int = 0
    """Bytes."""
    inflight: int = 0
    finished: int = 0

    @property
    def ready(self) -> bool:
        return self.instance is not None and self.cause is None and not self.ended.done()


@dataclass
class Tally:
    """What has happened since the start."""

    restarts: int = 0
    lost: int = 0
    """Rollouts that failed with their worker."""
    last: str = ""
    """Why the last worker was replaced."""


class Pool:
    """Runs episodes on the workers of one environment, each on the least busy one."""

    def __init__(
        self,
        label: str,
        number: int,
        limits: WorkerLimits,
        request: Mapping[str, Any],
        forks: WorkerForks,
        servers: Sequence[Find] = (),
        serve_at: Sequence[str] = (),
        key: bytes | None = None,
    ) -> None:
        """``request``: what a worker serves. ``servers``: find the addresses of servers, in place
        of workers. ``serve_at``: where each worker listens; empty: at a socket of this user.
        ``key``: of the servers, or of the workers that listen for others."""
        self.label = label
        self.limits = limits
        self.tally = Tally()
        self._request = request
        self._forks = forks
        self._servers = servers
        self._serve_at = serve_at
        self._key = key
        if key is not None and serve_at:
            self._request = {**request, "key": key.hex()}
        self.workers: list[Worker | None] = [None] * (len(servers) or number)
        self.on_change: Callable[[], None] = lambda: None
        self._lives: list[asyncio.Task[None]] = []
        self._folder: Scratch | None = None
        self._came = asyncio.Event()
        self._failure: BaseException | None = None

    async def start(self) -> None:
        """Begin to start the workers. An episode waits for the first one."""
        if not self._servers:
            self._folder = Scratch(SOCKETS)
            if len(str(self._folder.path)) > MOST_PATH - 10:
                self._folder.remove()
                self._folder = Scratch(SOCKETS, "/tmp")
        self._lives = [asyncio.create_task(self._keep(n)) for n in range(len(self.workers))]
        for life in self._lives:
            life.add_done_callback(self._over)

    async def close(self) -> None:
        for life in self._lives:
            life.cancel()
        await asyncio.gather(*self._lives, return_exceptions=True)
        if self._folder is not None:
            self._folder.remove()

    async def run(
        self,
        context: ModelContext,
        data: dict[str, Any],
        held: AbstractAsyncContextManager[None] | None = None,
    ) -> Any:
        """One episode, as verifiers' ``WireEpisode``. ``held``: a limit from its beginning, if not
        ``WorkerLimits.timeout``. Raises ``WorkerLost`` if its worker ends, ``TimeoutError``, and
        ``BadResult`` with the reason of the worker."""
        # An episode that waits here has not begun: neither the worker nor we count its time.
        worker = await self._least_busy(self.limits.max_episodes)
        limit = None if self.limits.timeout is None else self.limits.timeout + LATE_SECONDS
        worker.inflight += 1
        try:
            async with held or nullcontext(), asyncio.timeout(limit):
                episode = await worker.client.run(
                    context.client, context.model, context.sampling, data
                )
            return episode
        except TimeoutError:
            if self.limits.timeout is None:  # that of `held`
                raise
            raise TimeoutError(
                f"{worker.name} gave no result {LATE_SECONDS:g} s after the env's timeout of "
                f"{self.limits.timeout:g} s: the rollout does not end when it is cancelled"
            ) from None
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
            where = ".".join(map(str, fault["loc"]))
            raise BadResult(f"{worker.name}: {where}: {fault['msg']}") from None
        except RuntimeError as error:  # what the worker answers if there is no episode
            text = str(error).removeprefix(f"{BadResult.__name__}: ")
            raise BadResult(f"{worker.name}: {text}") from None
        finally:
            worker.inflight -= 1
            worker.finished += worker.ready
            self._came.set()

    async def ready(self) -> None:
        """Until a worker is ready. Raises ``RunError``."""
        await self._least_busy()

    async def ended(self) -> None:
        """Until no worker can start any more. Raises ``RunError``."""
        await asyncio.gather(*self._lives)
        if self._failure is not None:
            raise self._failure

    async def _least_busy(self, max_episodes: int | None = None) -> Worker:
        """The worker with the fewest episodes. Waits until one is ready, and has fewer than
        ``max_episodes``. Raises ``RunError`` if no worker can start."""
        while True:
            if self._failure is not None:
                raise self._failure
            ready = [each for each in self.workers if each is not None and each.ready]
            worker = min(ready, key=lambda worker: worker.inflight, default=None)
            if worker is not None and (max_episodes is None or worker.inflight < max_episodes):
                return worker
            self._came.clear()
            await self._came.wait()

    def describe(self) -> str:
        """One line for the view."""
        ready = sum(worker is not None and worker.ready for worker in self.workers)
        text = f"{ready}/{len(self.workers)}"
        if self.tally.restarts:
            text += f", {self.tally.restarts} replaced, {self.tally.lost} rollouts lost"
            text += f", last: {self.tally.last}"
        return text

    def metrics(self) -> dict[str, float]:
        """Workers, and what has happened since the start."""
        here = [worker for worker in self.workers if worker is not None]
        return {
            "ready": float(sum(worker.ready for worker in here)),
            "inflight": float(sum(worker.inflight for worker in here)),
            "replaced": float(self.tally.restarts),
            "lost_rollouts": float(self.tally.lost),
            "memory_gib/max": max((worker.memory / GIB for worker in here), default=0.0),
        }

    # -- the life of a worker ---------------------------------------------------------------------

    async def _keep(self, number: int) -> None:
        """Have a worker in this place, for ever."""
        useless = failed = 0
        while True:
            worker = await self._begin(number)
            try:
                await self._watch(worker)
            finally:
                reason = self._reason(worker)
                lost = worker.inflight
                self.workers[number] = None
                worker.client.lose(WorkerLost(reason))
                await worker.client.close()

            self.tally = Tally(self.tally.restarts + 1, self.tally.lost + lost, reason)
            self.on_change()
            failed = failed + 1 if worker.instance is None else 0
            useless = 0 if worker.finished else useless + 1
            if failed == STARTS:
                self._failure = RunError(f"{reason}. It could not start {STARTS} times in a row")
                self._came.set()
                return

            log.warning("%s. %d rollouts failed with it. It is replaced", reason, lost)
            if useless:
                await asyncio.sleep(min(LONGEST_PAUSE, 0.25 * 2.0**useless))

    def _over(self, life: asyncio.Task[None]) -> None:
        """A place has no worker any more: a bug, unless the run ends."""
        if not life.cancelled() and (error := life.exception()) is not None:
            self._failure = error
            self._came.set()

    async def _begin(self, number: int) -> Worker:
        if self._folder is None:
            while (address := self._servers[number]()) is None:
                await asyncio.sleep(FIND_SECONDS)
            fork = None
            name = f"server {address}"
            ended = asyncio.get_running_loop().create_future()
        else:
            address = f"ipc://{self._folder.path}/{number}-{os.urandom(3).hex()}"
            if self._serve_at:
                address = self._serve_at[number]
            fork = await self._forks.start(f"{self.label} {number}", address, self._request)
            name = f"worker {number}"
            ended = fork.ended

        name = f"env {self.label!r}: {name}"
        worker = Worker(
            number,
            name,
            client=WorkerClient(address, self._key),
            ended=ended,
            address=address,
            fork=fork,
        )
        self.workers[number] = worker
        return worker

    async def _watch(self, worker: Worker) -> None:
        """Until it has ended. End it if it is blocked or too large."""
        tick = min(1.0, self.limits.hang_timeout / 5)
        asking: asyncio.Task[None] | None = None
        last = time.monotonic()
        try:
            while not worker.ended.done():
                if asking is not None and worker.fork is None and worker.silent > 2 * tick:
                    asking.cancel()  # lost with a server that has restarted
                if asking is None or asking.done() or asking.cancelling():
                    asking = asyncio.create_task(self._ask(worker))
                await asyncio.wait([worker.ended], timeout=tick)
                now = time.monotonic()
                worker.silent += min(now - last, 2 * tick)  # not the time in which we were blocked
                last = now
                self._judge(worker)
        finally:
            if asking is not None:
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)

    async def _ask(self, worker: Worker) -> None:
        answer = await worker.client.alive()
        worker.silent = 0.0
        if worker.instance is None:
            worker.instance = answer.instance
            self._came.set()
            self.on_change()
        elif worker.instance != answer.instance:  # of a server on another machine
            self._end(worker, "another process has taken its place")

    def _judge(self, worker: Worker) -> None:
        has_started = worker.instance is not None
        limit = self.limits.hang_timeout if has_started else self.limits.start_timeout
        if worker.silent > limit:
            reason = "its event loop was blocked for" if worker.fork else "it did not answer for"
            if not has_started:
                reason = "it was not ready after"
                if worker.fork is None:
                    reason = (
                        f"it did not answer (is {ENV_SERVER_KEY} the same on both machines?) for"
                    )
            key = "hang_timeout" if has_started else "start_timeout"
            self._end(worker, f"{reason} {limit:g} s (orchestrator.workers.{key})")

        if worker.fork is None:
            if self._servers[worker.number]() != worker.address:
                self._end(worker, "it has ended")
            return

        if worker.fork.pid is None:
            return
        with suppress(psutil.Error):
            worker.memory = psutil.Process(worker.fork.pid).memory_info().rss
        if worker.memory > (most := self.limits.max_memory):
            grown = f"{worker.memory / GIB:.2f} GiB; {most / GIB:.2f} are allowed"
            self._end(worker, f"it grew to {grown} (orchestrator.workers.max_memory)")

    def _end(self, worker: Worker, cause: str) -> None:
        """Its episodes fail as soon as it has ended."""
        if worker.cause is not None or worker.ended.done():
            return
        worker.cause = cause
        if worker.fork is None:
            worker.ended.set_result(cause)
        else:
            self._forks.kill(worker.fork)

    def _reason(self, worker: Worker) -> str:
        """Why it has ended, in one line that names it."""
        how = worker.ended.result() if worker.ended.done() else "the run ends"
        if worker.fork is None:
            return f"{worker.name}: {worker.cause or how}"
        return f"{worker.name} (process {worker.fork.pid}): " + (
            worker.cause or worker.fork.failure or how
        )
