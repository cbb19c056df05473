"""Slow steps: a warning that says where the time went."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping
from statistics import median

from prime_rl import PluginConfig, TrainerObserver

logger = logging.getLogger("prime_rl.trainer.diagnostics")

SLOW_FACTOR = 10.0
"""A step is slow from this multiple of the median on."""
WINDOW = 50
"""Steps of the median."""
MIN_STEPS = 5
"""Without as many steps there is no median."""

PARTS = {
    "time/wait_for_batch": "waiting for the orchestrator's batch",
    "time/forward_backward": "forward and backward",
    "time/broadcast_weights": "publishing the weights",
    "time/save_ckpt": "handing over a checkpoint",
}
"""Parts of a step's time. A checkpoint waits for the one before it."""


class SlowSteps(TrainerObserver):
    """Warns of steps that take ten times as long as the median of the last 50."""

    name = "slow_steps"

    def __init__(self, config: PluginConfig) -> None:
        super().__init__(config)
        self._seconds: deque[float] = deque(maxlen=WINDOW)
        self._warned = 0

    def waiting(self, step: int, seconds: float) -> None:
        """Warn once of each batch, as the wait may never end."""
        if seconds < SLOW_FACTOR * self._usual or self._warned == step:
            return
        self._warned = step
        logger.warning(
            "step %d: waiting for the orchestrator's batch for %.1f s, and a step takes %.1f s "
            "(median). Its status and log say what it waits for.",
            step,
            seconds,
            self._usual,
        )

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warn of a slow step; the checkpoint at its end counts."""
        seconds = metrics["time/step"] + metrics["time/save_ckpt"]
        usual = self._usual
        self._seconds.append(seconds)
        if seconds < SLOW_FACTOR * usual:
            return
        parts = ((metrics.get(name, 0.0), text) for name, text in PARTS.items())
        spent = ", ".join(f"{took:.1f} s {text}" for took, text in sorted(parts, reverse=True))
        logger.warning("step %d took %.1f s, the median is %.1f s: %s", step, seconds, usual, spent)

    @property
    def _usual(self) -> float:
        return median(self._seconds) if len(self._seconds) >= MIN_STEPS else math.inf
