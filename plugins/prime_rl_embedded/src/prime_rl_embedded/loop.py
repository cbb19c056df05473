"""The engine's thread. It alone uses the scheduler; other threads put calls in its inbox."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

from prime_rl_embedded.requests import Request
from prime_rl_embedded.scheduler import Scheduler
from prime_rl_engine_kit.errors import RequestError

T = TypeVar("T")


class EngineLoop:
    """Steps the scheduler while there is work. Its methods may be called from any thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        on_death: Callable[[BaseException], None],
        max_waiting: int = 16384,
    ) -> None:
        self.scheduler = scheduler
        self.max_waiting = max_waiting
        self.submitted = 0
        self.paused = False
        self.closed: str | None = None
        """Why the engine takes no more requests. None: it does."""
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._on_death = on_death
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def check_room(self, count: int) -> None:
        """Raise ``RequestError`` (429) if the queue has no room for ``count`` more requests."""
        waiting = self.submitted - self.scheduler.stats.ended - len(self.scheduler.active)
        if waiting + count > self.max_waiting:
            raise RequestError(
                f"{waiting} requests wait, and at most {self.max_waiting} may: try again later, or "
                "raise inference.embedded.max_waiting",
                429,
            )

    def submit(self, request: Request) -> None:
        """Queue a request; its ``on_finish`` is called exactly once."""
        self.submitted += 1
        self._inbox.put(lambda: self._submit(request))

    def abort(self, request: Request) -> None:
        """End a request whose client has disconnected."""
        self._inbox.put(lambda: self.scheduler.abort(request))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run ``function`` in the engine's thread, between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self._inbox.put(run)
        return future

    def pause(self) -> Future[None]:
        """Resolves when no step is running; none starts before ``resume``. Requests keep their
        place."""
        return self.call(lambda: setattr(self, "paused", True))

    def resume(self) -> Future[None]:
        return self.call(lambda: setattr(self, "paused", False))

    def sleep(self) -> Future[None]:
        """Pause and free the accelerator's memory."""

        def fall_asleep() -> None:
            self.paused = True
            self.scheduler.sleep()

        return self.call(fall_asleep)

    def wake(self) -> Future[None]:
        """Take the memory back. The engine stays paused."""
        return self.call(self.scheduler.wake)

    def close(self, reason: str) -> None:
        """Fail all requests, running and future ones."""
        self.closed = reason
        self._inbox.put(lambda: self.scheduler.fail_all(reason))

    def stop(self, timeout: float = 0.5) -> None:
        """End the thread after the current step; wait at most ``timeout`` seconds."""
        self._inbox.put(lambda: setattr(self, "_stopping", True))
        self._thread.join(timeout)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _submit(self, request: Request) -> None:
        self.scheduler.add(request)
        if self.closed is not None:
            self.scheduler.fail_all(self.closed)

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while not self._stopping:
                    self._take_inbox()
                    if not self.paused and self.scheduler.has_work:
                        self.scheduler.step()
        except BaseException as error:
            self.closed = f"the engine died: {type(error).__name__}: {error}"
            with contextlib.suppress(Exception):  # report the first error, not a later one
                self.scheduler.fail_all(self.closed)
            self._on_death(error)

    def _take_inbox(self) -> None:
        """Run all calls that have arrived. Blocks for the first one if there is no work."""
        idle = self.paused or not self.scheduler.has_work
        try:
            self._inbox.get(block=idle)()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            pass
