"""Where the time goes: seconds spent waiting, and how late the event loop is."""

from __future__ import annotations

import asyncio
import time

import numpy as np

from prime_rl.monitor.metrics import Reduced

LAG_SECONDS = 0.05
"""Between two looks at the event loop: 20 wake-ups a second, some 40 us each."""


class Stopwatch:
    """Seconds by name since they were last taken."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def add(self, name: str, started: float) -> None:
        """Note that something has gone on since ``started`` (``time.perf_counter``)."""
        elapsed = time.perf_counter() - started
        self._seconds[name] = self._seconds.get(name, 0.0) + elapsed

    def take(self) -> dict[str, float]:
        """Every name's seconds; counting starts anew, and a name once seen stays, at 0."""
        taken, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return taken


class EventLoopLag:
    """How much later than asked a sleeping task wakes: what blocks the loop delays every
    rollout."""

    def __init__(self) -> None:
        self._lags: list[float] = []

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            due = time.perf_counter() + LAG_SECONDS
            await asyncio.sleep(LAG_SECONDS)
            self._lags.append(max(0.0, time.perf_counter() - due))

    def take(self) -> Reduced:
        """``event_loop_lag/...`` in seconds, since the last call; nothing if there was no look."""
        lags, self._lags = self._lags, []
        if not lags:
            return {}
        values = np.asarray(lags)
        median, p90, p99 = np.percentile(values, (50, 90, 99))
        found = {
            "min": values.min(),
            "mean": values.mean(),
            "median": median,
            "p90": p90,
            "p99": p99,
            "max": values.max(),
            "n": len(lags),
        }
        return {f"event_loop_lag/{name}": float(value) for name, value in found.items()}
