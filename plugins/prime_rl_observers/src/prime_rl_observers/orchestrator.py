"""The observers of the orchestrator."""

from __future__ import annotations

from prime_rl import Observer, hookimpl
from prime_rl_observers.batches import BatchMetrics
from prime_rl_observers.checkpoints import CheckpointMetrics
from prime_rl_observers.heartbeat import Heartbeat
from prime_rl_observers.hooks import HookWatch
from prime_rl_observers.watchdog import Watchdog


@hookimpl
def register_observers() -> list[type[Observer]]:
    """Offer them."""
    return [BatchMetrics, CheckpointMetrics, Heartbeat, HookWatch, Watchdog]
