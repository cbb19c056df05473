"""Seconds spent waiting, and the delay of the event loop."""

from __future__ import annotations

import asyncio
import time

import numpy as np

from prime_rl.monitor.metrics import Reduced

LAG_SECONDS = 0.05
"""Seconds between two samples: 20 wake-ups per second, about 40 us each."""


class Stopwatch:
    """Seconds by name since the last ``take``."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def add(self, name: str, started: float) -> None:
        """Add the time since ``started`` (``time.perf_counter``)."""
        elapsed = time.perf_counter() - started
        self._seconds[name] = self._seconds.get(name, 0.0) + elapsed

    def take(self) -> dict[str, float]:
        """Return the seconds of every name and reset them to 0."""
        taken, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return taken


class EventLoopLag:
    """How much later than requested a sleeping task wakes. Code that blocks the event loop delays
    every rollout."""

    def __init__(self) -> None:
        self._lags: list[float] = []

    async def run(self) -> None:
        while True:
            due = time.perf_counter() + LAG_SECONDS
            await asyncio.sleep(LAG_SECONDS)
            self._lags.append(max(0.0, time.perf_counter() - due))

    def take(self) -> Reduced:
        """``event_loop_lag/...`` in seconds since the last call; empty without samples."""
        lags, self._lags = self._lags, []
        if not lags:
            return {}
        names = ("min", "median", "p90", "p99", "max")
        found = dict(zip(names, np.percentile(lags, (0, 50, 90, 99, 100)), strict=True))
        found |= {"mean": np.mean(lags), "n": len(lags)}
        return {f"event_loop_lag/{name}": float(value) for name, value in found.items()}
