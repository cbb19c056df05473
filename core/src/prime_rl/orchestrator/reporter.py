"""What the orchestrator reports: metrics of a step to the monitors, hooks that observe a run.

A monitor has its own thread: if it is slow or broken, the loop neither waits nor fails."""

from __future__ import annotations

import logging
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from prime_rl.orchestrator.buffer import Batch
from prime_rl.plugins.calls import ReadOnly, logged_metrics, take_logged, weighted_means
from prime_rl.plugins.manager import Hooks
from prime_rl.plugins.observer import Monitor, Observer
from prime_rl.rollout import Rollout


class Reporter(Observer):
    """Collects the metrics of each step for the monitors, and calls the hooks of each step."""

    def __init__(self, hooks: Hooks, monitors: Sequence[Monitor]) -> None:
        self.sources: list[Callable[[], Mapping[str, float]]] = []
        """Functions that return what other pieces measured since the last step."""
        self._hooks, self._monitors = hooks, monitors
        self._started = self._last = time.perf_counter()
        self._failures = Failures()

    async def before_training(self) -> None:
        """Start the clock: no engine is waited for any more."""
        self._started = self._last = time.perf_counter()

    def batch_sent(self, batch: Batch, frames: Sequence[bytes] = ()) -> None:
        """Log the metrics of a batch."""
        now = time.perf_counter()
        metrics = {
            "progress/seconds": now - self._started,
            "time/step": now - self._last,
            "wire/bytes": float(sum(map(len, frames))),
            **weighted_means(take_logged()),
        }
        for source in self.sources:
            metrics |= source()
        self.log(batch.step, metrics)
        for monitor in self._monitors:
            call = partial(_log_rollouts, monitor, batch)
            self._failures.guard(monitor.name, f"rollouts of step {batch.step}", call)
        self._last = time.perf_counter()

    def batch_lost(self, batch: Batch) -> None:
        self.batch_sent(batch)

    def step_trained(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the trainer's metrics, its ``time/...`` as ``time/trainer/...``."""
        renamed = {re.sub("^time/", "time/trainer/", k): value for k, value in metrics.items()}
        if "time/wait_for_batch" in metrics:
            renamed["wait/trainer/orchestrator"] = metrics["time/wait_for_batch"]
        with logged_metrics(plugin="") as logged:
            self._hooks.step_finished(step, ReadOnly(metrics))
        self.log(step, renamed | logged)

    def version_served(self, version: int) -> None:
        self._hooks.weights_published(version)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass metrics to every monitor. A failing monitor is reported once; the run goes on."""
        for monitor in self._monitors:
            call = partial(monitor.log, step, ReadOnly(metrics))
            self._failures.guard(monitor.name, f"step {step}", call)


def _log_rollouts(monitor: Monitor, batch: Batch) -> None:
    if monitor.wants_rollouts(batch.step):
        dropped = [batch.dropped.get(id(rollout)) for rollout in batch.seen]
        monitor.log_rollouts(batch.step, batch.seen, dropped)


log = logging.getLogger(__name__)

MAX_WAITING = 1000
"""Queued lines of metrics per monitor; a line has a few kilobytes."""

MAX_WAITING_ROLLOUTS = 4
"""Queued batches of rollouts: each keeps a whole batch in memory."""

CLOSE_SECONDS = 15.0
"""Seconds for a monitor to process its queue at the end; shorter than the orchestrator's limit for
closing everything."""


def in_background(monitor: Monitor) -> Monitor:
    """Put a monitor behind a queue, unless it opts out (``Monitor.in_background``)."""
    return Background(monitor) if monitor.in_background else monitor


class Background(Monitor):
    """Wraps a monitor: queues its calls, which one thread runs in order."""

    in_background = False

    def __init__(self, monitor: Monitor, max_waiting: int = MAX_WAITING) -> None:
        super().__init__(monitor.config, monitor.run_dir)
        self.name = monitor.name  # type: ignore[misc]  # the wrapped monitor's name
        self._monitor = monitor
        self._max_waiting = max_waiting
        self._calls: queue.SimpleQueue[tuple[str, Callable[[], None]] | None] = queue.SimpleQueue()
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
        while (item := self._calls.get()) is not None:
            self._failures.guard(self.name, *item)
        self._failures.guard(self.name, "the end of the run", self._monitor.close)
        self._failures.summarize()


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
                found = f"{type(error).__name__}: {error}"
                log.exception("monitor %r failed at %s; the run goes on: %s", name, when, found)

    def summarize(self) -> None:
        """Log how often each monitor failed, if more than once."""
        for name, count in self.counts.items():
            if count > 1:
                log.warning("monitor %r failed %d times in all", name, count)
