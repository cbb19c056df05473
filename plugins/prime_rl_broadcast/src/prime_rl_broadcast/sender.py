"""The trainer's part: rank 0 waits until the orchestrator opens a group, and sends to it.

    trainer   copy all tensors, in the published type -> next step, which changes the weights
    thread    engines ready -> the copy ==> engines;  if that fails: the copy -> files

The copy takes memory for a second set of weights, on the GPU with NCCL. Without that memory the
trainer waits until the engines have the weights. With several ranks, rank 0 has the whole copy:
ranks gather tensors in their main threads only, where collectives have one order.

The next version waits until this one is sent, and raises the error of the thread.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec
import torch
from torch import Tensor

from prime_rl import ConfigError, Header, WeightSender, WeightsError
from prime_rl.rundir.attempts import check_current
from prime_rl_broadcast.connection import (
    Member,
    buckets,
    filled,
    new_buffer,
    num_bytes,
)
from prime_rl_broadcast.group import BroadcastGroup, decline, opened

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.005
WEIGHTS = "model.safetensors"
KEPT_FREE = (2 * 2**30, 0.05)
"""Bytes, and share, of a device's memory that the copy leaves free: rows differ in length."""


class BroadcastSender(WeightSender):
    """Sends one broadcast per version, over connections that outlive it."""

    def __init__(
        self, device: torch.device | None, overlap: bool | Literal["auto"] = "auto"
    ) -> None:
        """``device``: the GPU, for NCCL. ``overlap``: send from a copy while the trainer goes on;
        ``auto``: if there is memory for it."""
        self.device = device
        self._overlap = overlap
        self._member = Member()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._sent: Future[None] | None = None
        self._directory = Path()
        self._buffers: list[Tensor] = []
        """The copy: a buffer for each bucket. They stay for the next version."""

    def wait(self, directory: Path, files_wanted: Callable[[], bool]) -> object | None:
        """Raises the error of the version before, if it was neither sent nor written."""
        self.finish()
        self._directory = directory
        while (group := opened(directory)) is None:
            if files_wanted() and decline(directory):
                return None
            time.sleep(POLL_SECONDS)
        return dict(msgspec.to_builtins(group))

    def send(self, order: object, header: Header, tensors: Iterator[Tensor]) -> None:
        """Returns before the engines have the tensors, if there is memory for a copy."""
        group = msgspec.convert(order, BroadcastGroup)
        if not self._has_copy(header):
            with self._member.join(group, self.device or torch.device("cpu")) as connection:
                connection.send(header, tensors)
            return

        for _ in filled(header, tensors, self._buffers):
            pass
        copied = None
        if self.device is not None and self.device.type == "cuda":
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()

        self._sent = self._thread.submit(self._send_copy, group, header, self._directory, copied)

    def finish(self) -> None:
        """Wait until the last version is sent, or written. Raises the error if it is neither."""
        sent = self._sent
        self._sent = None
        try:
            if sent is not None:
                sent.result()
        except OSError as error:
            where = f"the weights of {self._directory}"
            raise WeightsError(f"{where} were neither sent nor written: {error}") from error

    def _send_copy(
        self,
        group: BroadcastGroup,
        header: Header,
        directory: Path,
        copied: torch.cuda.Event | None,
    ) -> None:
        with self._after(copied):
            try:
                with self._member.join(group, self.device or torch.device("cpu")) as connection:
                    connection.send_buckets(header, self._buffers)
            except (OSError, WeightsError) as error:
                name = directory.name
                logger.warning("%s was not broadcast, its files follow: %s", name, error)
                write_copy(directory, header, self._buffers)

    @contextmanager
    def _after(self, copied: torch.cuda.Event | None) -> Iterator[None]:
        """On a stream of its own: the default stream has the next step's kernels."""
        if copied is None:
            yield
            return
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            stream.wait_event(copied)
            yield
            stream.synchronize()

    def _has_copy(self, header: Header) -> bool:
        """Whether there are buffers for a copy; decided at the first version, when the first step
        has shown what the trainer itself needs."""
        size = sum(bucket.num_bytes for bucket in buckets(header))
        if self._buffers or not self._overlap:
            return bool(self._overlap)
        always = self._overlap is True
        free = math.inf if always else free_memory(self.device)
        try:
            if size <= free:
                self._buffers = [new_buffer(each, self.device) for each in buckets(header)]
        except RuntimeError as error:  # out of memory
            if always:
                raise ConfigError(
                    "weight_broadcast.overlap is true, and a copy of the weights takes "
                    f"{size / 2**30:.2f} GiB: {error}. Set it to 'auto' or false."
                ) from error

        if not self._buffers:
            self._overlap = False
            logger.info(
                "the trainer waits while weights are sent: a copy takes %.2f GiB, and %.2f are "
                "free for it (weight_broadcast.overlap)",
                size / 2**30,
                free / 2**30,
            )

        return bool(self._buffers)


class IpcSender(BroadcastSender):
    """Sends through memory that the engines see too, at the speed of a copy: the trainer waits."""

    def __init__(self, device: torch.device) -> None:
        """``device``: where memory is shared, if the engines are there too."""
        # Tensors come from where they are gathered: whole ones of a colocated trainer lie on the
        # host, and the GPU, which the engine has by now, gets a piece at a time.
        super().__init__(None, overlap=False)
        self._shared_on = device

    def send(self, order: object, header: Header, tensors: Iterator[Tensor]) -> None:
        group = msgspec.convert(order, BroadcastGroup)
        with self._member.join(group, self._shared_on) as connection:
            connection.send(header, tensors)


def free_memory(device: torch.device | None) -> float:
    """Bytes that a copy of the weights may take, on the GPU or (None) the host."""
    if device is not None and device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return free - max(KEPT_FREE[0], KEPT_FREE[1] * total)

    try:
        lines = Path("/proc/meminfo").read_text("utf-8").splitlines()
    except OSError:  # not Linux
        return math.inf

    available = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    return available * 2**10 / 2


def write_copy(directory: Path, header: Header, buffers: Sequence[Tensor]) -> None:
    """Write a version that was announced to be in memory as safetensors. Raises ``OSError``."""
    if not directory.exists():  # it became too old to keep
        return
    entries = {}
    end = 0
    for info in header:
        start, end = end, end + num_bytes(info)
        entries[info.name] = {
            "dtype": info.dtype, "shape": info.shape, "data_offsets": [start, end]
        }  # fmt: skip

    head = msgspec.json.encode(entries)
    head += b" " * (-len(head) % 8)
    unfinished = directory / f".{WEIGHTS}.copy"
    with unfinished.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for bucket, buffer in zip(buckets(header), buffers, strict=True):
            data = buffer.cpu().numpy()
            for place, info in bucket.places:
                file.write(data[place : place + num_bytes(info)].data)

    check_current()
    unfinished.replace(directory / WEIGHTS)
