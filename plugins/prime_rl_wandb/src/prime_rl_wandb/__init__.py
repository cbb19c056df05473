"""Weights & Biases: ``[monitors.wandb]``. One run for trainer and orchestrator."""

from __future__ import annotations

from prime_rl import Monitor, hookimpl
from prime_rl_wandb.monitor import WandbConfig, WandbMonitor

__all__ = ["WandbConfig", "WandbMonitor", "register_observers"]


@hookimpl
def register_observers() -> list[type[Monitor]]:
    return [WandbMonitor]
