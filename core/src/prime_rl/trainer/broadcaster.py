"""Weights to the engines by a weight transport, and as files where files are needed.

    after step n:  files, if due -> metrics -> version n announced -> wait for the engines
                                                     engines come: send; files wanted: write them
    waiting for a batch:  files wanted: write them

The trainer goes on when the engines have the version, or can read it. Rank 0 waits for the engines
and sends; the ranks gather the tensors together, one at a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from prime_rl.errors import RunError, WeightsError
from prime_rl.plugins.weight_transports import Header, WeightSender
from prime_rl.rundir.status import Status
from prime_rl.trainer import parallel
from prime_rl.trainer.disk import PUBLISH_WAITS, persist
from prime_rl.trainer.weights import Publisher, published_dtypes, published_tensors
from prime_rl.weights.tensors import header_of, num_bytes
from prime_rl.weights.versions import FILES_WANTED, MEMORY

logger = logging.getLogger(__name__)


class Broadcaster:
    """Brings each version to the engines: by ``sender``, or as files without one."""

    def __init__(
        self,
        model: PreTrainedModel,
        publisher: Publisher,
        sender: WeightSender | None,
        status: Status,
    ) -> None:
        self._model, self._publisher, self._status = model, publisher, status
        self._sender = sender
        self._version, self._waits = -1, False

    def prepare(self, version: int, *, exact: bool, last: bool) -> None:
        """Before a version is announced. ``exact``: a checkpoint will keep its files, unrounded.
        ``last``: no engine will take it. A version that is written is not sent."""
        files_only = exact or last or self._sender is None
        as_files = files_only or _from_main(self._wanted.exists())
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
        start, version, sender = time.perf_counter(), self._version, self._sender
        if not self._waits or sender is None:
            return 0.0
        text = f"engines (to take weights version {version})"
        self._status.report("waiting", waiting_for=text, step=version)
        directory, main = self._publisher.path(version), parallel.rank() == 0
        order = _from_main(sender.wait(directory, self._wanted.exists) if main else None)
        if order is None or not self._send(sender, order, version):
            self._write_files(version)
        return time.perf_counter() - start

    def settle(self, *, exact: bool) -> Path:
        """The version announced last stays the last: the folder with its files, which are written
        unless they are there. ``exact``: unrounded."""
        if self._waits or (exact and self._publisher.dtype is not None):
            self._write_files(self._version, exact)
        return self._publisher.path(self._version)

    def all_have(self, something: bool) -> bool:
        """While ranks wait for a batch: whether all have theirs. Until then files are written if
        they are wanted, for which all ranks are needed."""
        if self._sender is None or self._version < 0:
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
        """Every rank calls this."""
        write = partial(self._publisher.write, self._model, version, exact)
        persist(write, f"publish weights version {version}", PUBLISH_WAITS, self._status)
        if parallel.rank() == 0:
            self._wanted.unlink(missing_ok=True)

    def _header(self) -> Header:
        tensors = published_tensors(self._model)
        return header_of(tensors, published_dtypes(self._model, tensors, self._publisher.dtype))

    def _send(self, sender: WeightSender, order: object, version: int) -> bool:
        """Whether the engines have the version now."""
        tensors = published_tensors(self._model)
        _check_finite(tensors, version)
        send = partial(sender.send, order, self._header())
        self._status.report("broadcasting weights", step=version)
        try:
            parallel.stream_to_main(tensors, send, device=sender.device)
        except (OSError, WeightsError) as error:
            logger.warning("version %d was not broadcast, its files follow: %s", version, error)
            return False
        return True


def _from_main(value: object) -> Any:
    """Rank 0's value, on every rank."""
    return parallel.gather(value if parallel.rank() == 0 else None)[0]


def _check_finite(tensors: Mapping[str, Tensor], version: int) -> None:
    """Engines check before they load; those that take tensors one by one cannot."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors.values()]
    flags = [t.isfinite().all() for t in local if t.is_floating_point()]
    if not all(parallel.gather(bool(torch.stack(flags).all()))):
        raise RunError(f"weights version {version} hold values that are not finite")
