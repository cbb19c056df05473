"""Weights as files, written while the trainer takes its next step.

    trainer   copy: this rank's parts, rounded, into host memory (pinned, for a GPU) -> next step
    thread    parts -> one file of all ranks -> rename -> announce

A version is announced when the file has all bytes, and each rank has closed it. While one version
is written, the next is copied into a second set of buffers; the one after waits for the first. An
error of the disk is raised by the next call, and at the end of the run at the latest.

Adapters are small, and tensors that ranks have to gather need their main threads: the trainer
writes both itself.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from prime_rl.trainer import parallel
from prime_rl.trainer.published import (
    WEIGHTS,
    Publisher,
    published_dtypes,
    published_pieces,
    published_tensors,
    retry,
    tuning_of,
)
from prime_rl.trainer.tensor_file import (
    FileLayout,
    TensorPart,
    begin_file,
    lay_out,
    own_part,
    write_parts,
)

Buffers = dict[str, Tensor]
"""[elements] of this rank's part of each tensor, in the published type, on the host."""


@dataclass(frozen=True)
class Copy:
    """This rank's parts of a version."""

    layout: FileLayout
    parts: Mapping[str, TensorPart]
    buffers: Buffers
    copied: torch.cuda.Event | None
    """The device has copied them; None: they are copied."""

    def write(self, folder: Path, group: parallel.RankGroup) -> None:
        """Every rank calls this. Raises ``OSError`` or ``WeightsError``."""
        path = folder / WEIGHTS
        parallel.on_main(partial(begin_file, path, self.layout), group)
        parallel.on_all(lambda: write_parts(path, self.layout, parts=self.parts, flush=True), group)


class FileWriter:
    """Writes the versions of a run in their order, one at a time."""

    def __init__(
        self, model: PreTrainedModel, publisher: Publisher, announced: Callable[[int], None]
    ) -> None:
        """``announced`` is called on rank 0, in this object's thread."""
        self._model = model
        self._publisher = publisher
        self._announced = announced
        self._group = parallel.host_group()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._jobs: deque[tuple[Future[None], Buffers]] = deque()
        self._spare: list[Buffers] = []
        """With those of ``_jobs`` two sets at most."""
        self._next: Copy | None = None
        self._one_disk: bool | None = None

    @torch.no_grad()
    def copy(self) -> bool:
        """Copy the weights; False if they cannot be written this way. Waits while two versions are
        being written. Raises the error of the first."""
        if tuning_of(self._model) is not None or not self._is_one_disk():
            return False

        tensors = published_tensors(self._model)
        parts_or_none = {name: own_part(tensor) for name, tensor in tensors.items()}
        parts = {name: part for name, part in parts_or_none.items() if part is not None}
        if len(parts) < len(parts_or_none):
            return False

        dtypes = published_dtypes(self._model, tensors, self._publisher.dtype)
        layout = lay_out(tensors, dtypes, pieces=published_pieces(self._model, tensors))
        buffers = self._free_buffers()
        event = None

        for name, part in parts.items():
            values = part.values
            dtype = layout.slots[name][0]
            on_gpu = values.is_cuda

            if name not in buffers:
                buffers[name] = torch.empty_like(
                    values, dtype=dtype, device="cpu", pin_memory=on_gpu
                )

            rounded = values.to(dtype) if on_gpu else values  # on the GPU: half the bytes to copy
            buffers[name].copy_(rounded, non_blocking=True)
            if on_gpu and event is None:
                # One event is enough: it is recorded after the last copy.
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]

        if event is not None:
            event.record()  # the thread waits for it; the next step is queued behind the copies
        copies = {name: TensorPart(buffers[name], part.start) for name, part in parts.items()}
        self._next = Copy(layout, copies, buffers=buffers, copied=event)
        return True

    def submit(self, version: int) -> None:
        """Write and announce what was copied last."""
        copy = self._next
        self._next = None
        assert copy is not None
        self._jobs.append((self._thread.submit(self._publish, version, copy), copy.buffers))

    def wait(self) -> None:
        """Until all versions are written. Raises the error of one that could not be."""
        while self._jobs:
            job, buffers = self._jobs.popleft()
            job.result()
            self._spare.append(buffers)

    def check(self) -> None:
        """Raises the error of a version that could not be written."""
        for job, _ in self._jobs:
            if job.done():
                job.result()

    def _free_buffers(self) -> Buffers:
        self.check()
        # Two sets of buffers at most. A job that is done gives its set back without waiting.
        while self._jobs and (len(self._jobs) == 2 or self._jobs[0][0].done()):
            job, buffers = self._jobs.popleft()
            job.result()
            self._spare.append(buffers)
        return self._spare.pop() if self._spare else {}

    def _publish(self, version: int, copy: Copy) -> None:
        # Only this thread waits for the copies. The next step trains meanwhile.
        if copy.copied is not None:
            copy.copied.synchronize()
        write = partial(copy.write, group=self._group)
        publish = partial(self._publisher.fill, version, write, group=self._group)
        retry(publish, f"publish weights version {version}")

        if parallel.rank() == 0:
            announce = partial(self._publisher.announce, version)
            retry(announce, f"announce weights version {version}")
            self._announced(version)

    def _is_one_disk(self) -> bool:
        """Whether every rank sees rank 0's disk: it finds a file of a new random name."""
        if self._one_disk is None:
            mark = self._publisher.directory / f".{parallel.gather(secrets.token_hex(8))[0]}"
            mark.parent.mkdir(parents=True, exist_ok=True)
            parallel.on_main(mark.touch)
            self._one_disk = all(parallel.gather(mark.exists()))
            parallel.on_main(mark.unlink)
        return self._one_disk
