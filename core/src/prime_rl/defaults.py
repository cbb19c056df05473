"""Core's own plugins, loaded by the same road as anyone's: the standard sampler, the file monitor
and the launchers of one machine and of machines that join by hand."""

from __future__ import annotations

from prime_rl.monitor.file import FileMonitor
from prime_rl.orchestrator.sampler import StandardSampler
from prime_rl.plugins.base import Monitor, Sampler
from prime_rl.plugins.hookspecs import hookimpl
from prime_rl.plugins.launchers import Launcher
from prime_rl.run.join import JoinLauncher
from prime_rl.run.local import LocalLauncher


@hookimpl
def register_samplers() -> list[type[Sampler]]:
    """Offer ``standard``."""
    return [StandardSampler]


@hookimpl
def register_monitors() -> list[type[Monitor]]:
    """Offer ``file``."""
    return [FileMonitor]


@hookimpl
def register_launchers() -> list[type[Launcher]]:
    """Offer ``local`` and ``join``."""
    return [LocalLauncher, JoinLauncher]
