"""Core's own plugin: launcher ``local``, view ``lines``."""

from __future__ import annotations

from prime_rl.plugins.hookspecs import hookimpl
from prime_rl.plugins.launchers import Launcher
from prime_rl.plugins.view import RunView
from prime_rl_app.children import LocalLauncher


@hookimpl
def register_launchers() -> list[type[Launcher]]:
    return [LocalLauncher]


@hookimpl
def register_views() -> list[type[RunView]]:
    return [RunView]
