"""Core's own plugin, loaded like any other: sampler ``standard``, monitor ``file``, launcher
``local``, view ``lines``."""

from __future__ import annotations

from prime_rl.monitor.file import FileMonitor
from prime_rl.orchestrator.sampler import StandardSampler
from prime_rl.plugins.hookspecs import hookimpl
from prime_rl.plugins.launchers import Launcher
from prime_rl.plugins.monitor import Monitor
from prime_rl.plugins.sampler import Sampler
from prime_rl.plugins.view import RunView
from prime_rl.run.children import LocalLauncher


@hookimpl
def register_samplers() -> list[type[Sampler]]:
    return [StandardSampler]


@hookimpl
def register_monitors() -> list[type[Monitor]]:
    return [FileMonitor]


@hookimpl
def register_launchers() -> list[type[Launcher]]:
    return [LocalLauncher]


@hookimpl
def register_views() -> list[type[RunView]]:
    return [RunView]
