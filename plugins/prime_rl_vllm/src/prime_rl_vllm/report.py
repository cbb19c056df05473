"""The server's status file, and our metrics on vLLM's metrics page."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from typing import Any

from prime_rl_vllm.state import State

log = logging.getLogger(__name__)
STATUS_SECONDS = 1.0


async def report_forever(state: State) -> None:
    """Report once a second, until cancelled. A failed report is logged."""
    before = 0
    then = time.monotonic()
    while True:
        now = time.monotonic()
        rate = (state.generated_tokens - before) / max(now - then, 1e-9)
        before = state.generated_tokens
        then = now
        try:
            report_activity(state, rate)
        except Exception:  # a full disk, for example, is no reason to stop serving
            log.exception("could not report the server's state")
        await asyncio.sleep(STATUS_SECONDS)


def report_activity(state: State, tokens_per_second: float) -> None:
    numbers: dict[str, Any] = {
        "running": float(state.running),
        "sampled/s": round(tokens_per_second, 1),
        "policy_version": float(state.version),
    }
    if state.asleep:
        state.status.report("asleep", waiting_for="the trainer to be done", **numbers)
    elif state.paused:
        state.status.report("paused", waiting_for="a weight update to end", **numbers)
    elif state.running:
        state.status.report("generating", **numbers)
    else:
        state.status.report("idle", waiting_for="requests", **numbers)


class Metrics:
    """A collector, so that each page has the values at the time of the request."""

    def __init__(self, state: State) -> None:
        self._state = state

    def collect(self) -> Iterator[Any]:
        """Called by prometheus_client for each page."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        state = self._state
        gauges = {
            "policy_version": (state.version, "Version of the current weights"),
            "paused": (state.paused, "Whether requests wait for a weight update"),
            "asleep": (state.asleep, "Whether the engine has freed its memory"),
            "weight_update_seconds": (
                state.weight_update_seconds,
                "Time of the last weight update",
            ),
        }
        for name, (value, text) in gauges.items():
            yield GaugeMetricFamily(f"prime_rl:{name}", text, float(value))
        text = "Weight updates since the start"
        yield CounterMetricFamily("prime_rl:weight_updates", text, state.weight_updates)
        if state.prefill:
            text = "Prompts that a prefill engine has failed to compute"
            yield CounterMetricFamily("prime_rl:prefill_failures", text, state.prefill_failures)
