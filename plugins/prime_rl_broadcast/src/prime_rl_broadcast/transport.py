"""The transports ``gloo`` and ``nccl``. Importing this brings in no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from prime_rl import ConfigError, WeightDelivery, WeightSender, WeightTransport
from prime_rl_broadcast.meeting import Backend

if TYPE_CHECKING:
    import torch


class GlooTransport(WeightTransport):
    """Through the memory of the hosts: works everywhere, and needs no GPU."""

    name = "gloo"
    backend: ClassVar[Backend] = "gloo"

    def delivery(self, broadcasts: Path, timeout: float) -> WeightDelivery:
        from prime_rl_broadcast.meetings import Meetings

        return Meetings(broadcasts, self.backend, timeout)

    def sender(self, device: torch.device) -> WeightSender:
        from prime_rl_broadcast.sender import MeetingSender

        return MeetingSender(None)


class NcclTransport(GlooTransport):
    """Between GPUs."""

    name = "nccl"
    backend = "nccl"

    def check(self, device: str) -> None:
        if device == "cpu":
            raise ConfigError(
                "weight_broadcast.type is 'nccl', which does not go with trainer.device: NCCL "
                "needs GPUs. Set it to 'filesystem', or change the other."
            )

    def sender(self, device: torch.device) -> WeightSender:
        from prime_rl_broadcast.sender import MeetingSender

        if device.type != "cuda":
            raise ConfigError(
                f"weight_broadcast.type is 'nccl', and the trainer runs on {device.type}: NCCL "
                "moves what lies on GPUs. Set it to 'gloo' or 'filesystem'."
            )
        return MeetingSender(device)
