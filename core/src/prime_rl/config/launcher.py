"""``[launcher]``: who starts the processes of a run, and where."""

from __future__ import annotations

from typing import Any

from prime_rl.config.base import Settings


class LauncherConfig(Settings):
    """``[launcher]``: who starts the processes of a run. Its other keys belong to the launcher."""

    model_config = Settings.model_config | {"extra": "allow"}

    type: str = "local"
    """Name of an installed launcher. ``prime-rl run --launcher NAME`` says the same."""

    @property
    def settings(self) -> dict[str, Any]:
        """The keys the launcher validates."""
        return dict(self.model_extra or {})
