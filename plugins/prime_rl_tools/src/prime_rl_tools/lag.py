"""The observer ``event_loop_lag``: the delay of the orchestrator's event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import numpy as np

from prime_rl import Observer, ObserverHost, PluginConfig

LAG_SECONDS = 0.05
"""Seconds between two samples: 20 wake-ups per second, about 40 us each."""


class EventLoopLag(Observer):
    """Measures how much later than requested a sleeping task wakes. Code that blocks the event loop
    delays every rollout."""

    name = "event_loop_lag"

    def __init__(self, config: PluginConfig, host: ObserverHost) -> None:
        super().__init__(config, host)
        self._lags: list[float] = []

    async def run(self) -> None:
        while True:
            due = time.perf_counter() + LAG_SECONDS
            await asyncio.sleep(LAG_SECONDS)
            self._lags.append(max(0.0, time.perf_counter() - due))

    def take_metrics(self) -> Mapping[str, float]:
        """``event_loop_lag/...`` in seconds since the last call; empty without samples."""
        lags = self._lags
        self._lags = []
        if not lags:
            return {}
        names = ("min", "median", "p90", "p99", "max")
        figures = dict(zip(names, np.percentile(lags, (0, 50, 90, 99, 100)), strict=True))
        figures |= {"mean": np.mean(lags), "n": len(lags)}
        return {f"event_loop_lag/{name}": float(value) for name, value in figures.items()}
