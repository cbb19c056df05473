"""A monitor in a thread of its own, so that a slow one delays nothing."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from prime_rl import Monitor, Rollout

log = logging.getLogger(__name__)

MAX_WAITING = 1000
"""Queued lines of metrics per monitor; a line has a few kilobytes."""

MAX_WAITING_ROLLOUTS = 4
"""Queued batches of rollouts: each keeps a whole batch in memory."""

CLOSE_SECONDS = 15.0
"""Seconds for a monitor to process its queue at the end; shorter than the orchestrator's limit for
closing everything."""


class Background(Monitor):
    """Wraps a monitor: queues its calls, which one thread runs in order."""

    in_background = False

    def __init__(self, monitor: Monitor, max_waiting: int = MAX_WAITING) -> None:
        super().__init__(monitor.config, monitor.run_dir)
        self.name = monitor.name  # type: ignore[misc]  # the wrapped monitor's name
        self._monitor = monitor
        self._max_waiting = max_waiting
        self._calls: queue.SimpleQueue[tuple[str, Callable[[], None]] | None] = queue.SimpleQueue()

        # Batches of rollouts are large, so few of them may wait; lines of metrics are small.
        self._room = threading.Semaphore(MAX_WAITING_ROLLOUTS)
        self._lost = 0
        self._failures = Failures()
        self._thread = threading.Thread(target=self._work, name=f"monitor-{self.name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._calls.qsize() < self._max_waiting:
            self._calls.put((f"step {step}", partial(self._monitor.log, step, metrics)))
            return

        self._lost += 1
        if self._lost == 1:
            log.warning(
                "monitor %r is slower than the run: %d lines wait for it; from step %d on lines "
                "are left out of it. metrics.jsonl has them all.",
                self.name, self._max_waiting, step,
            )  # fmt: skip

    def wants_rollouts(self, step: int) -> bool:
        """The monitor's own answer."""
        return self._monitor.wants_rollouts(step)

    def log_rollouts(
        self, step: int, rollouts: Sequence[Rollout], dropped: Sequence[str | None]
    ) -> None:
        """Queue a batch of rollouts; a busy monitor skips batches."""
        if not self._room.acquire(blocking=False):
            log.info("monitor %r is busy: it misses the rollouts of step %d", self.name, step)
            return

        def call() -> None:
            try:
                self._monitor.log_rollouts(step, rollouts, dropped)
            finally:
                self._room.release()

        self._calls.put((f"rollouts of step {step}", call))

    def close(self) -> None:
        """Process the queue and close the monitor, within ``CLOSE_SECONDS``."""
        self._calls.put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            log.warning(
                "monitor %r is not done %.0f s after the end of the run: %d lines are lost",
                self.name, CLOSE_SECONDS, self._calls.qsize(),
            )  # fmt: skip

        if self._lost:
            log.warning("monitor %r was too slow: %d lines are missing", self.name, self._lost)

    def _work(self) -> None:
        while True:
            item = self._calls.get()
            if item is None:  # `close` has queued it, behind all calls
                break

            when, call = item
            self._failures.guard(self.name, when, call)

        self._failures.guard(self.name, "the end of the run", self._monitor.close)
        for name, count in self._failures.counts.items():
            if count > 1:
                log.warning("monitor %r failed %d times in all", name, count)


class Failures:
    """Failures of monitors: logs the first of each with its traceback, and counts the others."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def guard(self, name: str, when: str, call: Callable[[], None]) -> None:
        """Call; a failure is recorded, never raised."""
        try:
            call()
        except Exception as error:
            self.counts[name] = self.counts.get(name, 0) + 1
            if self.counts[name] == 1:
                cause = f"{type(error).__name__}: {error}"
                log.exception("monitor %r failed at %s; the run goes on: %s", name, when, cause)
