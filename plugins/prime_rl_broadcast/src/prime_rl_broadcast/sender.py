"""The trainer's part: rank 0 waits for an invitation, and sends where the engines meet."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from prime_rl import Header, WeightSender
from prime_rl_broadcast.group import Attendance
from prime_rl_broadcast.meeting import Meeting, decline, invitation

POLL_SECONDS = 0.005


class MeetingSender(WeightSender):
    """Attends one meeting per version, over connections that outlive it."""

    def __init__(self, device: torch.device | None) -> None:
        """``device``: the GPU, for NCCL."""
        self.device = device
        self._attendance = Attendance()

    def wait(self, directory: Path, files_wanted: Callable[[], bool]) -> object | None:
        while (meeting := invitation(directory)) is None:
            if files_wanted() and decline(directory):
                return None
            time.sleep(POLL_SECONDS)
        return dict(msgspec.to_builtins(meeting))

    def send(self, order: object, header: Header, tensors: Iterator[Tensor]) -> None:
        meeting = msgspec.convert(order, Meeting)
        with self._attendance.at(meeting, self.device or torch.device("cpu")) as group:
            group.send(header, tensors)
