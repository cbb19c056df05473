"""The transports ``gloo``, ``nccl`` and ``ipc``. Importing this imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from prime_rl import ConfigError, PluginConfig, WeightDelivery, WeightSender, WeightTransport
from prime_rl_broadcast.group import Backend

if TYPE_CHECKING:
    import torch


class BroadcastConfig(PluginConfig):
    """Keys of ``[weight_broadcast]`` for ``gloo`` and ``nccl``."""

    overlap: bool | Literal["auto"] = "auto"
    """Send a copy of the weights while the trainer takes its next step. It takes memory for all
    weights in ``trainer.publish_dtype``: on rank 0's GPU with ``nccl``, else on its host. ``auto``:
    if as much is free after the first step."""


class GlooTransport(WeightTransport):
    """Through the memory of the hosts. Needs no GPU."""

    name = "gloo"
    config_class = BroadcastConfig
    config: BroadcastConfig
    backend: ClassVar[Backend] = "gloo"

    def delivery(self, broadcasts: Path, timeout: float) -> WeightDelivery:
        from prime_rl_broadcast.delivery import BroadcastDelivery

        return BroadcastDelivery(broadcasts, self.backend, timeout)

    def sender(self, device: torch.device) -> WeightSender:
        from prime_rl_broadcast.sender import BroadcastSender

        return BroadcastSender(None, self.config.overlap)


class NcclTransport(GlooTransport):
    """Between GPUs."""

    name = "nccl"
    backend = "nccl"

    def check(self, device: str) -> None:
        if device == "cpu":
            raise ConfigError(
                "weight_broadcast.type is 'nccl', which does not go with trainer.device: NCCL "
                "needs GPUs. Set weight_broadcast.type to 'gloo' or 'filesystem', or change "
                "trainer.device."
            )

    def compare(self, trainer: Mapping[str, str], engines: Mapping[str, str]) -> str:
        """NCCL connects members of one version, patch level included."""
        ours = trainer.get("NCCL")
        theirs = engines.get("NCCL")
        if ours is None or theirs is None:
            side = "trainer" if ours is None else "engines"
            return (
                f"the NCCL of the {side} is not known here (torch "
                f"{(trainer if ours is None else engines).get('torch', 'is not installed')}). "
                "Where it differs from the other side's, every version goes through files."
            )

        if ours == theirs:
            return f"NCCL {ours} on both sides (torch {trainer['torch']} and {engines['torch']})"
        return (
            f"NCCL cannot connect: it is {ours} in the trainer (torch {trainer['torch']}) and "
            f"{theirs} in the engines (torch {engines['torch']}). Every version will go through "
            "files. Install one torch in both environments, or set type = 'filesystem'."
        )

    def sender(self, device: torch.device) -> WeightSender:
        from prime_rl_broadcast.sender import BroadcastSender

        if device.type != "cuda":
            raise ConfigError(
                f"weight_broadcast.type is 'nccl', and the trainer runs on {device.type}: NCCL "
                "needs GPUs. Set weight_broadcast.type to 'gloo' or 'filesystem'."
            )
        return BroadcastSender(device, self.config.overlap)


class IpcTransport(WeightTransport):
    """Through memory that trainer and engines share on one machine: of the GPU (CUDA IPC), or of
    the host where one of them computes on it. Needs Linux."""

    name = "ipc"
    shares_gpus = True

    def check(self, device: str) -> None:
        if sys.platform != "linux":
            raise ConfigError(
                f"weight_broadcast.type is 'ipc', which needs Linux; this is {sys.platform}. Set "
                "it to 'filesystem' or 'gloo'."
            )

    def delivery(self, broadcasts: Path, timeout: float) -> WeightDelivery:
        from prime_rl_broadcast.delivery import BroadcastDelivery

        return BroadcastDelivery(broadcasts, "ipc", timeout)

    def sender(self, device: torch.device) -> WeightSender:
        from prime_rl_broadcast.sender import IpcSender

        return IpcSender(device)
