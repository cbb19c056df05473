"""Weights to the engines from memory (``[weight_broadcast]``), and as files where they are needed.

    after step n:  files, if due -> metrics -> version n announced -> wait for the engines
                                                    invited: broadcast; files wanted: write them
    waiting for a batch:  files wanted: write them

The trainer goes on when the engines have the version, or can read it: they have asked for one or
the other, and rank 0 hears of it. Ranks gather the tensors together, one at a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from prime_rl.broadcast.group import Attendance, header_of, num_bytes
from prime_rl.broadcast.meeting import (
    FILES_WANTED,
    MEMORY,
    Header,
    Meeting,
    decline,
    invitation,
)
from prime_rl.config.broadcast import WeightBroadcastConfig
from prime_rl.plugins.errors import ConfigError, RunError, WeightsError
from prime_rl.run.status import Status
from prime_rl.trainer import parallel
from prime_rl.trainer.disk import PUBLISH_WAITS, persist
from prime_rl.trainer.weights import Publisher, published_dtypes, published_tensors

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.005
DISK_SECONDS = 1.0
"""Between two attempts at a disk that refuses."""


class Broadcaster:
    """Passes versions on. Where they go by files alone, it has those written and is done."""

    def __init__(
        self,
        model: PreTrainedModel,
        publisher: Publisher,
        config: WeightBroadcastConfig,
        device: torch.device,
        status: Status,
    ) -> None:
        """Raises ``ConfigError`` for NCCL without a GPU."""
        if config.type == "nccl" and device.type != "cuda":
            raise ConfigError(
                f"weight_broadcast.type is 'nccl', and the trainer runs on {device.type}: NCCL "
                "moves what lies on GPUs. Set it to 'gloo' or 'filesystem'."
            )
        self.from_memory = config.backend is not None
        self._model, self._publisher, self._status = model, publisher, status
        self._device = device if config.type == "nccl" else None
        self._attendance = Attendance()
        self._version, self._waits = -1, False

    def prepare(self, version: int, *, exact: bool, last: bool) -> None:
        """Before a version is announced. ``exact``: a checkpoint will keep its files, unrounded.
        ``last``: nobody will broadcast it. What is written is not broadcast besides."""
        as_files = exact or last or not self.from_memory or _told(self._wanted.exists())
        if as_files:
            self._write_files(version, exact)
        else:
            mark = partial(parallel.on_main, partial(self._mark, version))
            persist(mark, f"publish weights version {version}", PUBLISH_WAITS, self._status)
        self._version, self._waits = version, not as_files

    def size(self, version: int) -> float:
        """What one engine has to read or receive of it, in MiB; 0 where this rank does not know."""
        if not self._waits:
            return self._publisher.size(version)
        return sum(num_bytes(info) for info in self._header()) / 2**20

    def pass_on(self) -> float:
        """After the announcement: until the engines have the version, or can read it. How long it
        took, in seconds."""
        start, version = time.perf_counter(), self._version
        if not self._waits:
            return 0.0
        text = f"engines (to take weights version {version})"
        self._status.report("waiting", waiting_for=text, step=version)
        order = _told(self._wait_for_invitation(version) if parallel.rank() == 0 else None)
        if order is None or not self._broadcast(msgspec.convert(order, Meeting), version):
            self._write_files(version)
        return time.perf_counter() - start

    def all_have(self, something: bool) -> bool:
        """While ranks wait for a batch: whether all have theirs. Until then files are written if
        they are wanted, for which all ranks are needed."""
        if not self.from_memory or self._version < 0:
            return something
        wanted = parallel.rank() == 0 and self._wanted.exists()
        answers = parallel.gather([something, wanted])
        if answers[0][1]:
            self._write_files(self._version)
        return all(has for has, _ in answers)

    @property
    def _wanted(self) -> Path:
        return self._publisher.directory / FILES_WANTED

    def _mark(self, version: int) -> None:
        directory = self._publisher.path(version)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / MEMORY).touch()

    def _write_files(self, version: int, exact: bool = False) -> None:
        """Every rank does."""
        write = partial(self._publisher.write, self._model, version, exact)
        persist(write, f"publish weights version {version}", PUBLISH_WAITS, self._status)
        if parallel.rank() == 0:
            self._wanted.unlink(missing_ok=True)

    def _wait_for_invitation(self, version: int) -> dict[str, object] | None:
        """Rank 0 does. None: files are wanted instead."""
        directory = self._publisher.path(version)
        while (meeting := invitation(directory)) is None:
            try:
                if self._wanted.exists() and decline(directory):
                    return None
                time.sleep(POLL_SECONDS)
            except OSError as error:  # a full disk
                logger.error("cannot decline a broadcast of version %d: %s", version, error)
                time.sleep(DISK_SECONDS)
        return dict(msgspec.to_builtins(meeting))

    def _header(self) -> Header:
        tensors = published_tensors(self._model)
        return header_of(tensors, published_dtypes(self._model, tensors, self._publisher.dtype))

    def _broadcast(self, meeting: Meeting, version: int) -> bool:
        """Whether the engines have the version now."""
        tensors = published_tensors(self._model)
        _check_finite(tensors, version)
        header = self._header()
        self._status.report("broadcasting weights", step=version)

        def send(stream: Iterator[Tensor]) -> None:
            with self._attendance.at(meeting, self._device or torch.device("cpu")) as group:
                group.send(header, stream)

        try:
            parallel.stream_to_main(tensors, send, device=self._device)
        except (OSError, WeightsError) as error:
            logger.warning("version %d was not broadcast, its files follow: %s", version, error)
            return False
        return True


def _told(value: object) -> Any:
    """What rank 0 says, on every rank."""
    return parallel.gather(value if parallel.rank() == 0 else None)[0]


def _check_finite(tensors: Mapping[str, Tensor], version: int) -> None:
    """Engines check before they load; those that take tensors one by one cannot."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors.values()]
    flags = [t.isfinite().all() for t in local if t.is_floating_point()]
    if not all(parallel.gather(bool(torch.stack(flags).all()))):
        raise RunError(f"weights version {version} hold values that are not finite")
