"""``[weight_broadcast]``: how new weights come from the trainer to the engines."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat

from prime_rl.config.base import Settings


class WeightBroadcastConfig(Settings):
    """``[weight_broadcast]``: how new weights reach the engines."""

    type: Literal["filesystem", "gloo", "nccl"] = "filesystem"
    """``filesystem``: as files in the run directory. ``nccl``, ``gloo``: from memory to memory, by
    NCCL between GPUs, by gloo through the hosts. Files are then written for checkpoints, after the
    last step, and for an engine that comes back."""
    timeout: PositiveFloat = 120.0
    """gloo, nccl: seconds for all engines to come to a broadcast, and for each message of it."""

    @property
    def backend(self) -> Literal["gloo", "nccl"] | None:
        """Of the process group; None where there is none."""
        return None if self.type == "filesystem" else self.type
