"""Prometheus: ``[monitors.prometheus]`` serves the run's metrics."""

from __future__ import annotations

from prime_rl import Monitor, hookimpl
from prime_rl_prometheus.monitor import PrometheusConfig, PrometheusMonitor

__all__ = ["PrometheusConfig", "PrometheusMonitor", "register_observers"]


@hookimpl
def register_observers() -> list[type[Monitor]]:
    return [PrometheusMonitor]
