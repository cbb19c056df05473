"""What the orchestrator reports: metrics of a step to the monitors, hooks that observe a run."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from prime_rl.monitor.background import Failures
from prime_rl.orchestrator.buffer import Batch
from prime_rl.plugins.manager import Hooks
from prime_rl.plugins.metrics import logged_metrics, take_logged, weighted_means
from prime_rl.plugins.monitor import Monitor
from prime_rl.plugins.observer import Observer


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

    def step_trained(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the trainer's metrics, its ``time/...`` as ``time/trainer/...``."""
        renamed = {re.sub("^time/", "time/trainer/", k): value for k, value in metrics.items()}
        if "time/wait_for_batch" in metrics:
            renamed["wait/trainer/orchestrator"] = metrics["time/wait_for_batch"]
        with logged_metrics(plugin="") as logged:
            self._hooks.step_finished(step, metrics)
        self.log(step, renamed | logged)

    def version_served(self, version: int) -> None:
        self._hooks.weights_published(version)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass metrics to every monitor. A failing monitor is reported once; the run goes on."""
        for monitor in self._monitors:
            call = partial(monitor.log, step, metrics)
            self._failures.guard(monitor.name, f"step {step}", call)


def _log_rollouts(monitor: Monitor, batch: Batch) -> None:
    if monitor.wants_rollouts(batch.step):
        dropped = [batch.dropped.get(id(rollout)) for rollout in batch.seen]
        monitor.log_rollouts(batch.step, batch.seen, dropped)
