"""What the application offers by the hooks: the launcher ``local``, the view ``lines`` and the
observer that saves rollouts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prime_rl.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    from prime_rl.plugins.launchers import Launcher
    from prime_rl.plugins.observer import Observer
    from prime_rl.plugins.view import RunView


@hookimpl
def register_launchers() -> list[type[Launcher]]:
    """Offer ``local``."""
    from prime_rl_app.children import LocalLauncher

    return [LocalLauncher]


@hookimpl
def register_observers() -> list[type[Observer]]:
    """Offer ``save_rollouts``."""
    from prime_rl_app.saved_rollouts import SaveRollouts

    return [SaveRollouts]


@hookimpl
def register_views() -> list[type[RunView]]:
    """Offer ``lines``."""
    from prime_rl_app.lines import LinesView

    return [LinesView]
