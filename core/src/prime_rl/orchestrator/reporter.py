"""What the orchestrator reports: metrics of a step to the monitors, hooks that observe a run.

A monitor has its own thread (``BACKGROUND``): if it is slow, the loop does not wait. If it is
broken, the loop does not fail."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from prime_rl.errors import PluginError
from prime_rl.orchestrator.background import Background, Failures
from prime_rl.plugins.observer import Monitor, Observer
from prime_rl.registry.calls import (
    ReadOnly,
    checked_metrics,
    logged_metrics,
    take_logged,
    weighted_means,
)
from prime_rl.registry.guards import is_number
from prime_rl.registry.manager import Hooks
from prime_rl.rollout import Batch


class Reporter(Observer):
    """Collects the metrics of each step for the monitors, and calls the hooks of each step."""

    def __init__(self, hooks: Hooks, monitors: Sequence[Monitor]) -> None:
        self.sources: list[Callable[[], Mapping[str, float]]] = []
        """Functions that return what other pieces measured since the last step."""
        self.measured: Callable[[int, Mapping[str, float]], None] = lambda step, metrics: None
        """Called with the metrics of each batch, before it is sent."""
        self._hooks = hooks
        self._monitors = monitors
        self._started = time.perf_counter()
        self._last = self._started
        self._failures = Failures()

    async def before_training(self) -> None:
        """Start the clock: no engine is waited for any more."""
        self._started = time.perf_counter()
        self._last = self._started

    def batch_sent(self, batch: Batch, frames: Sequence[bytes] = ()) -> None:
        """Log the metrics of a batch."""
        self.measured(batch.step, self._log_batch(batch, frames))

    def batch_lost(self, batch: Batch) -> None:
        self._log_batch(batch, frames=())

    def _log_batch(self, batch: Batch, frames: Sequence[bytes]) -> Mapping[str, float]:
        now = time.perf_counter()
        metrics = {
            "progress/seconds": now - self._started,
            "time/step": now - self._last,
            "wire/bytes": float(sum(map(len, frames))),
            **weighted_means(take_logged()),
        }

        for source in self.sources:
            owner = getattr(source, "__self__", source)
            metrics |= checked_metrics(source(), owner, "take_metrics")

        self.log(batch.step, metrics)
        for monitor in self._monitors:
            call = partial(_log_rollouts, monitor, batch)
            self._failures.guard(monitor.name, f"rollouts of step {batch.step}", call)

        # The clock restarts here, so a step does not include the monitors' time.
        self._last = time.perf_counter()
        return metrics

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
        """Pass metrics to every monitor. A failing monitor is reported once; the run goes on.
        Raises ``PluginError`` for a metric that is no number."""
        for name, value in metrics.items():
            if not is_number(value):
                raise PluginError(
                    f"step {step}: the metric {name!r} is {value!r}, expected a number. Log text "
                    "by a logger."
                )

        for monitor in self._monitors:
            call = partial(monitor.log, step, ReadOnly(metrics))
            self._failures.guard(monitor.name, f"step {step}", call)


def _log_rollouts(monitor: Monitor, batch: Batch) -> None:
    if monitor.wants_rollouts(batch.step):
        dropped = [batch.dropped.get(id(rollout)) for rollout in batch.seen]
        monitor.log_rollouts(batch.step, batch.seen, dropped)


def in_background(monitor: Monitor) -> Monitor:
    """Put a monitor behind a queue, unless it opts out (``Monitor.in_background``)."""
    return Background(monitor) if monitor.in_background else monitor
