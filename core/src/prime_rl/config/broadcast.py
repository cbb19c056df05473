"""``[weight_broadcast]``: how new weights come from the trainer to the engines."""

from __future__ import annotations

from typing import Any

from pydantic import PositiveFloat, model_validator

from prime_rl.config.base import Settings

FILES = "filesystem"


class WeightBroadcastConfig(Settings):
    """``[weight_broadcast]``: how new weights reach the engines. Its other keys belong to the
    weight transport."""

    model_config = Settings.model_config | {"extra": "allow"}

    type: str = FILES
    """``filesystem``: as files in the run directory. Otherwise the name of an installed weight
    transport, such as ``nccl`` or ``gloo``: from memory to memory. Files are then written for
    checkpoints, after the last step, and for an engine that comes back."""
    timeout: PositiveFloat = 120.0
    """With a weight transport: seconds for all engines to come, and for each message."""

    @property
    def as_files(self) -> bool:
        """Whether no weight transport takes part."""
        return self.type == FILES

    @property
    def settings(self) -> dict[str, Any]:
        """The keys the weight transport validates."""
        return dict(self.model_extra or {})

    @model_validator(mode="after")
    def _no_settings_of_files(self) -> WeightBroadcastConfig:
        if self.as_files and self.settings:
            found = ", ".join(sorted(self.settings))
            raise ValueError(f"unknown key {found}; type 'filesystem' takes no other settings")
        return self
