"""The trainer's part: rank 0 waits until the orchestrator opens a group, and sends to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from prime_rl import Header, WeightSender
from prime_rl_broadcast.connection import Member
from prime_rl_broadcast.group import BroadcastGroup, decline, opened

POLL_SECONDS = 0.005


class BroadcastSender(WeightSender):
    """Sends one broadcast per version, over connections that outlive it."""

    def __init__(self, device: torch.device | None) -> None:
        """``device``: the GPU, for NCCL."""
        self.device = device
        self._member = Member()

    def wait(self, directory: Path, files_wanted: Callable[[], bool]) -> object | None:
        while (group := opened(directory)) is None:
            if files_wanted() and decline(directory):
                return None
            time.sleep(POLL_SECONDS)
        return dict(msgspec.to_builtins(group))

    def send(self, order: object, header: Header, tensors: Iterator[Tensor]) -> None:
        group = msgspec.convert(order, BroadcastGroup)
        with self._member.join(group, self.device or torch.device("cpu")) as connection:
            connection.send(header, tensors)
