"""The orchestrator's own log: one line a step, for people and for grep."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

log = logging.getLogger(__name__)


class Console:
    """Writes ``Step 3/180 | 0.71s | Reward 0.6120 | ...`` to the log."""

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One finished batch."""
        name = "train/agg/all"
        log.info(
            "Step %d/%d | %.2fs | Reward %.4f | Turns %.1f | Max Off-Policy %.0f | Dropped %.1f%% "
            "| Truncation %.1f%%",
            step,
            self._max_steps,
            metrics.get("time/step", 0.0),
            metrics.get(f"{name}/reward/mean", math.nan),
            metrics.get(f"{name}/num_turns/mean", 0.0),
            metrics.get("off_policy/max", 0.0),
            100 * metrics.get("filters/post_batch_filters/dropped", 0.0),
            100 * metrics.get(f"{name}/is_truncated/mean", 0.0),
        )
