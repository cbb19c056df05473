"""Core's own plugins, loaded by the same road as anyone's: the standard sampler and the file
monitor."""

from __future__ import annotations

from prime_rl.monitor.file import FileMonitor
from prime_rl.orchestrator.sampler import StandardSampler
from prime_rl.plugins.base import Monitor, Sampler
from prime_rl.plugins.hookspecs import hookimpl


@hookimpl
def register_samplers() -> list[type[Sampler]]:
    """Offer ``standard``."""
    return [StandardSampler]


@hookimpl
def register_monitors() -> list[type[Monitor]]:
    """Offer ``file``."""
    return [FileMonitor]
