"""Brings each version of the weights to the engines, as files or by a weight transport; and, after
the last step, exports the trained policy as a model folder that ``from_pretrained`` loads.

    after step n:  files, if due -> metrics -> version n announced -> wait for the engines
                                                     engines join: send; files wanted: write them
    waiting for a batch:  files wanted: write them

The trainer goes on when it has copied the weights, and a thread writes and announces them
(``file_writer.py``); with a transport, when the engines have the version. For a transport all ranks
gather one tensor at a time, and rank 0 sends it.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel

from prime_rl.errors import RunError, WeightsError
from prime_rl.plugins.status import Facts
from prime_rl.plugins.weight_transports import Header, WeightSender
from prime_rl.rundir.attempts import check_current
from prime_rl.rundir.chat_template import put_chat_template
from prime_rl.rundir.status import Status, names_seen
from prime_rl.trainer import parallel
from prime_rl.trainer.file_writer import FileWriter
from prime_rl.trainer.published import (
    Publisher,
    clear,
    disk_errors,
    published_dtypes,
    published_pieces,
    published_tensors,
    retry,
    save,
    tuning_of,
)
from prime_rl.weights.tensors import header_of, num_bytes
from prime_rl.weights.versions import FILES_WANTED, MEMORY

logger = logging.getLogger(__name__)

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".index.json", ".gguf")

BEAT_SECONDS = 1.0
"""Between two signs of life while a sender waits for the engines."""

Held = Literal["files", "copies", "memory"]
"""Where the newest version is. ``files``: written. ``copies``: copies of the weights, which a
thread writes. ``memory``: in the trainer's, until the engines have it by the transport."""


class Broadcaster:
    """Brings each version to the engines: by ``sender``, or as files without one."""

    def __init__(
        self,
        model: PreTrainedModel,
        publisher: Publisher,
        sender: WeightSender | None,
        status: Status,
        announced: Callable[[int], None] = lambda version: None,
        *,
        is_read: bool = True,
    ) -> None:
        """``announced`` is called on rank 0, perhaps in another thread. ``is_read``: an engine
        loads the versions; else files are written for checkpoints, at the end, and on request."""
        self._model = model
        self._publisher = publisher
        self._status = status
        self._sender = sender
        self._announce_to = announced

        self.announced = -1
        """The newest version that this process has announced; -1: none yet."""
        self._writer: FileWriter | None = None
        """Writes files while the trainer takes its next step; None where a transport sends."""
        self._as_files = sender is None and is_read
        if self._as_files:
            self._writer = FileWriter(model, publisher, self._is_there)
        self._version = -1
        self._held: Held = "files"
        self._beat_at = 0.0

    def prepare(self, version: int, *, exact: bool, last: bool) -> None:
        """Before a version is announced. ``exact``: a checkpoint will keep its files, unrounded.
        ``last``: no engine will load it. A version that is written is not sent."""
        files_only = exact or last or self._as_files

        # Rank 0 decides: the file may appear between the looks of two ranks, which would then wait
        # in different collectives.
        sends = not (files_only or _from_main(self._files_wanted()))
        self._version = version

        if sends:
            self._held = "memory"
            self._check_values()  # here, where a colocated trainer still has the device
            mark = partial(parallel.on_main, self._mark)
            retry(mark, f"publish weights version {version}", self._status)
            return

        # A checkpoint links the files next. After the last step no step overlaps with writing.
        may_copy = not (exact or last)
        if may_copy and self._writer is not None and self._writer.copy():
            self._held = "copies"
            return
        self._held = "files"
        self._write_files(exact)

    def size(self, version: int) -> float:
        """MiB that one engine has to read or receive; 0 if this rank does not know."""
        if self._held == "files":
            return self._publisher.size(version)
        if self._sender is None and not self._as_files:
            return 0.0
        return sum(num_bytes(info) for info in self._header()) / 2**20

    def announce(self, last: bool) -> float:
        """Once its metrics are written: have engines load it, unless it is the ``last``; the
        seconds until they have the version, or can read it."""
        if self._held == "copies" and self._writer is not None:
            self._writer.submit(self._version)
            return 0.0  # the writer's thread announces it
        if parallel.rank() == 0:
            # The marker first: the orchestrator looks for it when it hears of the version.
            announce = partial(self._publisher.announce, self._version)
            retry(announce, f"announce weights version {self._version}", self._status)
            self._is_there(self._version)
        return 0.0 if last else self.pass_on()

    def pass_on(self) -> float:
        """After the announcement: wait until the engines have the version, or can read it; the
        seconds it took."""
        start = time.perf_counter()
        version = self._version
        sender = self._sender
        if self._held != "memory" or sender is None:
            return 0.0

        text = f"engines (to take weights version {version})"
        facts = Facts(waits_for="engines")
        self._status.report("waiting", waiting_for=text, facts=facts, step=version)

        directory = self._publisher.path(version)
        main = parallel.rank() == 0
        # Only rank 0 looks at the engines. The other ranks wait for its order in this exchange.
        order = _from_main(sender.wait(directory, self._still_wanted) if main else None)
        if order is None or not self._send(sender, order):
            self._write_files()
        return time.perf_counter() - start

    def settle(self, *, exact: bool) -> Path:
        """The version announced last is the run's last: the folder with its files, written if they
        are missing, or rounded and wanted ``exact``."""
        # A checkpoint keeps unrounded weights, and the announced files may be rounded.
        if self._held == "memory" or (exact and self._publisher.dtype is not None):
            self._write_files(exact)
        if self._writer is not None:
            self._writer.wait()
        return self._publisher.path(self._version)

    def all_have(self, batch: bool) -> bool:
        """While ranks wait for a batch: whether all of them have theirs. Until then files are
        written if an engine wants them, which takes all ranks."""
        if self._writer is not None:
            self._writer.check()
        # Files are there by themselves; before the first version an engine has nothing to ask for.
        if self._as_files or self._version < 0:
            return batch

        wanted = parallel.rank() == 0 and self._files_wanted()
        answers = parallel.gather([batch, wanted])
        if answers[0][1]:
            self._write_files()

        return all(has_batch for has_batch, _ in answers)

    @property
    def being_written(self) -> int | None:
        """On rank 0: the newest version, while a thread writes it; None: all are announced."""
        return self._version if self.announced < self._version else None

    def _is_there(self, version: int) -> None:
        """A version is complete: perhaps in the writer's thread."""
        self.announced = version
        self._announce_to(version)

    def _still_wanted(self) -> bool:
        """A sender asks again and again while it waits for the engines, which may load or compile
        for longer than ``recovery.hang_timeout``: a sign of life."""
        now = time.monotonic()
        if now - self._beat_at >= BEAT_SECONDS:
            self._beat_at = now
            self._status.beat()
        return self._files_wanted()

    def _files_wanted(self) -> bool:
        return FILES_WANTED in names_seen(self._publisher.directory)

    def _mark(self) -> None:
        directory = self._publisher.path(self._version)
        directory.mkdir(parents=True, exist_ok=True)
        # Engines see by it that the version has no files yet (`only_in_memory`).
        (directory / MEMORY).touch()

    def _check_values(self) -> None:
        """Raises ``RunError`` for weights that are not finite. Engines check files before they load
        them. Methods that take tensors one by one cannot."""
        tensors = published_tensors(self._model).values()
        local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
        finite = [t.isfinite().all() for t in local if t.is_floating_point()]
        # Stacked, so that the host waits for the device once, and not for each tensor.
        if not all(parallel.gather(bool(torch.stack(finite).all()))):
            raise RunError(f"weights version {self._version} hold values that are not finite")

    def _write_files(self, exact: bool = False) -> None:
        """Every rank calls this."""
        if self._writer is not None:  # the versions before
            self._writer.wait()
        write = partial(self._publisher.write, self._model, self._version, exact=exact)
        retry(write, f"publish weights version {self._version}", self._status)
        if parallel.rank() == 0:
            # If the marker stayed, every later version would be written as files and never sent.
            (self._publisher.directory / FILES_WANTED).unlink(missing_ok=True)

    def _header(self) -> Header:
        tensors = published_tensors(self._model)
        dtypes = published_dtypes(self._model, tensors, self._publisher.dtype)
        return header_of(tensors, dtypes, published_pieces(self._model, tensors))

    def _send(self, sender: WeightSender, order: object) -> bool:
        """Whether the engines have the version now."""
        tensors = published_tensors(self._model)
        version = self._version
        # Whole tensors come in this order, and the pieces of one follow each other.
        pieces = groupby(published_pieces(self._model, tensors), key=lambda piece: piece.source)

        def send(stream: Iterator[Tensor]) -> None:
            cut = (
                piece.of(tensor)
                for tensor, (_, pieces_of_tensor) in zip(stream, pieces, strict=True)
                for piece in pieces_of_tensor
            )
            sender.send(order, self._header(), cut)

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


def export(model: PreTrainedModel, model_dir: Path, directory: Path) -> None:
    """Write weights, config, ``model_dir``'s tokenizer, and the chat template of the run whose
    folder ``directory`` is in. The adapter of a tuning is merged in, and is in the folder
    ``adapter`` too. Every rank calls this.

    Raises ``WeightsError`` if the disk refuses.
    """
    # Under another name until it is whole.
    unfinished = directory.with_name(f".{directory.name}")
    tuning = tuning_of(model)
    adapter = unfinished / "adapter"

    def begin() -> None:
        clear(unfinished, directory)
        copy_model_files(model.config, model_dir, unfinished, run_dir=directory.parent)
        if tuning is not None:
            adapter.mkdir()

    def end() -> None:
        if tuning is not None:
            tuning.merge(model_dir, adapter, unfinished)
        # Another attempt may have begun during the merge: then this one must not publish.
        check_current()
        unfinished.rename(directory)

    with disk_errors("export the trained model", directory):
        parallel.on_main(begin)
        save(model, adapter if tuning else unfinished)
        parallel.on_main(end)


def copy_model_files(
    config: PretrainedConfig, model_dir: Path, directory: Path, run_dir: Path
) -> None:
    """Everything of a model folder but the weights: ``config``, ``model_dir``'s tokenizer, and the
    run's chat template."""
    for file in model_dir.iterdir():
        if file.is_file() and not file.name.endswith(_WEIGHT_SUFFIXES) and file.name[0] != ".":
            shutil.copy(file, directory)

    config.save_pretrained(directory)
    # Last: it replaces the template that was copied above.
    put_chat_template(run_dir, directory)
