"""Versions of the weights for the engines, as files or by a weight transport; and, after the last
step, the trained policy as a model folder that ``from_pretrained`` loads.

    <run>/broadcasts/step_3/model.safetensors   written beside, then renamed: whole or not there
    <run>/broadcasts/step_3/STABLE               last of all: engines may load version 3

    after step n:  files, if due -> metrics -> version n announced -> wait for the engines
                                                     engines join: send; files wanted: write them
    waiting for a batch:  files wanted: write them

The trainer goes on when the engines have the version, or can read it; with an installed writer
(``WRITERS``) when it has copied the weights, and a thread writes and announces them. All ranks
write the one file together (``tensor_file.py``), so no rank holds the whole model. For a transport
they gather one tensor at a time, and rank 0 sends it.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel

from prime_rl.entries import entries
from prime_rl.errors import RunError, WeightsError
from prime_rl.plugins.trainer import Tuning
from prime_rl.plugins.weight_transports import Header, WeightSender
from prime_rl.rundir.attempts import check_current
from prime_rl.rundir.chat_template import put_chat_template
from prime_rl.rundir.status import Status, names_in
from prime_rl.trainer import parallel
from prime_rl.trainer.tensor_file import lay_out, write_shared
from prime_rl.weights.tensors import Piece, header_of, num_bytes, pieces_of, whole
from prime_rl.weights.versions import FILES_WANTED, MEMORY, STABLE

logger = logging.getLogger(__name__)

WEIGHTS = "model.safetensors"
WRITERS = "prime_rl.file_writers"
"""Entry points: ``Writer(model, publisher, announced)``. Every rank calls each of its methods:
``copy()`` the weights, if it can; ``submit(version)``, to write and announce them; ``wait()`` until
all are written, or only ``check()``, which both raise what has failed."""
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".index.json", ".gguf")
RETRY_SECONDS = 10.0


def retry(write: Callable[[], object], doing: str, status: Status | None = None) -> None:
    """Call ``write``, and once more after ``RETRY_SECONDS`` if the disk refuses. Raises its second
    error. ``doing`` completes "cannot ...".

    ``write`` starts from nothing each time. With several ranks it fails on all or on none, so that
    all make the second attempt together.
    """
    try:
        write()
    except (OSError, WeightsError) as error:
        logger.error("cannot %s, next attempt in %g s: %s", doing, RETRY_SECONDS, error)
        if status is not None:
            status.report("waiting", waiting_for=f"disk ({error})")
        time.sleep(RETRY_SECONDS)
        write()


class Publisher:
    """Writes versions as files, announces them and keeps the last few."""

    def __init__(
        self, directory: Path, keep: int, dtype: Literal["float32", "bfloat16"] = "float32"
    ) -> None:
        """``dtype``: of the published weights (``trainer.publish_dtype``)."""
        self.directory = directory
        self.keep = keep
        self.dtype = torch.bfloat16 if dtype == "bfloat16" else None

    def path(self, version: int) -> Path:
        """The folder of a version."""
        return self.directory / f"step_{version}"

    def write(self, model: PreTrainedModel, version: int, exact: bool = False) -> None:
        """Write a version without announcing it; every rank calls this. ``exact``: unrounded, as a
        checkpoint keeps this one. Raises ``WeightsError`` if a disk refuses."""
        dtype = None if exact else self.dtype
        self.fill(version, lambda folder: save(model, folder, dtype, flush=exact))

    def fill(
        self, version: int, write: Callable[[Path], None], group: parallel.Group = None
    ) -> None:
        """``write`` the version's files into a folder; every rank calls this, for one ``group``."""
        unfinished, final = self.directory / f".step_{version}", self.path(version)
        with disk_errors(f"write weights version {version}", final):
            parallel.on_main(partial(clear, unfinished, final), group)
            write(unfinished)
            parallel.on_main(partial(_put, unfinished, final), group)

    def size(self, version: int) -> float:
        """Of a version that is written, in MiB; 0 if this machine does not see it."""
        return sum(file.stat().st_size for file in self.path(version).glob("*")) / 2**20

    def announce(self, version: int) -> None:
        """Mark a version as complete, and delete those too old to keep. Rank 0 calls this."""
        with disk_errors(f"announce weights version {version}", self.path(version)):
            check_current()
            (self.path(version) / STABLE).touch()
        for old in self.directory.glob("step_*"):
            if int(old.name.removeprefix("step_")) <= version - self.keep:
                shutil.rmtree(old, ignore_errors=True)


class Broadcaster:
    """Brings each version to the engines: by ``sender``, or as files without one."""

    def __init__(
        self,
        model: PreTrainedModel,
        publisher: Publisher,
        sender: WeightSender | None,
        status: Status,
        announced: Callable[[int], None] = lambda version: None,
    ) -> None:
        """``announced`` is called on rank 0, perhaps in another thread."""
        self._model, self._publisher, self._status = model, publisher, status
        self._sender, self._announced = sender, announced
        installed = entries(WRITERS) if sender is None else ()
        self._writers = [each.load()(model, publisher, announced) for each in installed][:1]
        self._copied = False
        self._version, self._waits = -1, False

    def prepare(self, version: int, *, exact: bool, last: bool) -> None:
        """Before a version is announced. ``exact``: a checkpoint will keep its files, unrounded.
        ``last``: no engine will load it. A version that is written is not sent."""
        files_only = exact or last or self._sender is None
        # Rank 0 decides: the file may appear between the looks of two ranks, which would then wait
        # in different collectives.
        self._waits = not (files_only or _from_main(self._files_wanted()))
        self._version = version
        self._copied = files_only and not (exact or last) and any(w.copy() for w in self._writers)
        if self._waits:
            mark = partial(parallel.on_main, self._mark)
            retry(mark, f"publish weights version {version}", self._status)
        elif not self._copied:
            self._write_files(exact)

    def size(self, version: int) -> float:
        """MiB that one engine has to read or receive; 0 if this rank does not know."""
        if not (self._waits or self._copied):
            return self._publisher.size(version)
        return sum(num_bytes(info) for info in self._header()) / 2**20

    def announce(self, last: bool) -> float:
        """Once its metrics are written: have engines load it, unless it is the ``last``; the
        seconds until they have the version, or can read it."""
        if self._copied:
            self._writers[0].submit(self._version)
            return 0.0
        if parallel.rank() == 0:
            announce = partial(self._publisher.announce, self._version)
            retry(announce, f"announce weights version {self._version}", self._status)
            self._announced(self._version)
        return 0.0 if last else self.pass_on()

    def pass_on(self) -> float:
        """After the announcement: wait until the engines have the version, or can read it; the
        seconds it took."""
        start, version, sender = time.perf_counter(), self._version, self._sender
        if not self._waits or sender is None:
            return 0.0
        text = f"engines (to take weights version {version})"
        self._status.report("waiting", waiting_for=text, step=version)
        directory, main = self._publisher.path(version), parallel.rank() == 0
        order = _from_main(sender.wait(directory, self._files_wanted) if main else None)
        if order is None or not self._send(sender, order):
            self._write_files()
        return time.perf_counter() - start

    def settle(self, *, exact: bool) -> Path:
        """The version announced last is the run's last: the folder with its files, written if they
        are missing, or rounded and wanted ``exact``."""
        if self._waits or (exact and self._publisher.dtype is not None):
            self._write_files(exact)
        for writer in self._writers:
            writer.wait()
        return self._publisher.path(self._version)

    def all_have(self, batch: bool) -> bool:
        """While ranks wait for a batch: whether all of them have theirs. Until then files are
        written if an engine wants them, which takes all ranks."""
        for writer in self._writers:
            writer.check()
        if self._sender is None or self._version < 0:
            return batch
        wanted = parallel.rank() == 0 and self._files_wanted()
        answers = parallel.gather([batch, wanted])
        if answers[0][1]:
            self._write_files()
        return all(has for has, _ in answers)

    def _files_wanted(self) -> bool:
        return FILES_WANTED in names_in(self._publisher.directory)

    def _mark(self) -> None:
        directory = self._publisher.path(self._version)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / MEMORY).touch()

    def _write_files(self, exact: bool = False) -> None:
        """Every rank calls this."""
        for writer in self._writers:  # the versions before
            writer.wait()
        write = partial(self._publisher.write, self._model, self._version, exact)
        retry(write, f"publish weights version {self._version}", self._status)
        if parallel.rank() == 0:
            (self._publisher.directory / FILES_WANTED).unlink(missing_ok=True)

    def _header(self) -> Header:
        tensors = published_tensors(self._model)
        dtypes = published_dtypes(self._model, tensors, self._publisher.dtype)
        return header_of(tensors, dtypes, published_pieces(self._model, tensors))

    def _send(self, sender: WeightSender, order: object) -> bool:
        """Whether the engines have the version now."""
        tensors, version = published_tensors(self._model), self._version
        # Engines check files before they load them. Those that take tensors one by one cannot.
        local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors.values()]
        finite = [t.isfinite().all() for t in local if t.is_floating_point()]
        if not all(parallel.gather(bool(torch.stack(finite).all()))):
            raise RunError(f"weights version {version} hold values that are not finite")
        pieces = groupby(published_pieces(self._model, tensors), key=lambda piece: piece.source)

        def send(stream: Iterator[Tensor]) -> None:
            cut = (p.of(each) for each, (_, own) in zip(stream, pieces, strict=True) for p in own)
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


def clear(unfinished: Path, final: Path) -> None:
    """An empty folder to write into, and nothing in the final place; a version that is announced
    and lacks its files stays."""
    shutil.rmtree(unfinished, ignore_errors=True)
    if not (final / STABLE).exists():
        shutil.rmtree(final, ignore_errors=True)
    unfinished.mkdir(parents=True)


def _put(unfinished: Path, final: Path) -> None:
    check_current()
    if not final.exists():
        unfinished.rename(final)
        return
    # The tensors last: from then on engines load the folder (``has_files``).
    for file in sorted(unfinished.iterdir(), key=lambda file: file.suffix == ".safetensors"):
        file.replace(final / file.name)
    unfinished.rmdir()


def save(
    model: PreTrainedModel, directory: Path, dtype: torch.dtype | None = None, flush: bool = False
) -> None:
    """Write the whole model, or the adapter where a tuning trains one; every rank calls this."""
    tuning, tensors = tuning_of(model), published_tensors(model)
    name, metadata = (tuning.weights_file, tuning.metadata()) if tuning else (WEIGHTS, {})
    dtypes, pieces = published_dtypes(model, tensors, dtype), published_pieces(model, tensors)
    layout = lay_out(tensors, dtypes, metadata, pieces)
    write_shared(directory / name, layout, tensors, flush)
    if tuning is not None:
        parallel.on_main(partial(tuning.write_config, directory))


def tuning_of(model: PreTrainedModel) -> Tuning | None:
    """None if the whole model trains."""
    return getattr(model, "prime_rl_tuning", None)


def published_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights by their names in the model, as this rank holds them; a tied head does not appear
    twice. Where a tuning trains an adapter, that alone, by the tuning's names."""
    if tuning := tuning_of(model):
        return tuning.tensors(model)
    tensors: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        # By identity: tied modules hold one parameter, and two empty shards may share an address.
        tensors.setdefault(id(tensor), (name, tensor))
    return dict(tensors.values())


def published_pieces(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> list[Piece]:
    """What the tensors are called in the model's folder, and so by engines; those of a tuning have
    their names already."""
    if tuning_of(model) is not None:
        return whole(tensors)
    if not hasattr(model, "prime_rl_pieces"):  # a large model has many
        model.prime_rl_pieces = pieces_of(model, tensors)
    return cast("list[Piece]", model.prime_rl_pieces)


def published_dtypes(
    model: PreTrainedModel, tensors: Mapping[str, Tensor], dtype: torch.dtype | None
) -> dict[str, torch.dtype]:
    """The tensors that are rounded to ``dtype`` for the engines: floats, without what transformers
    keeps in float32 for every type of model (a router's bias). None of an adapter, which engines
    add to the base in float32."""
    if dtype is None or tuning_of(model) is not None:
        return {}
    kept = [f"*{pattern}*" for pattern in model._keep_in_fp32_modules_strict or ()]
    return {
        name: dtype
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and not any(fnmatchcase(name, p) for p in kept)
    }


@contextmanager
def disk_errors(doing: str, path: Path) -> Iterator[None]:
    """Raises ``WeightsError`` with the space that is left instead of an error of the disk."""
    try:
        yield
    except (OSError, WeightsError) as error:
        folder = path
        while not folder.exists():
            folder = folder.parent
        free = f"Free there: {shutil.disk_usage(folder).free / 2**30:.2f} GiB."
        raise WeightsError(f"cannot {doing} to {path}: {error}. {free}") from error


def export(model: PreTrainedModel, model_dir: Path, directory: Path) -> None:
    """Write weights, config, ``model_dir``'s tokenizer, and the chat template of the run whose
    folder ``directory`` is in. The adapter of a tuning is merged in, and is in the folder
    ``adapter`` too. Every rank calls this.

    Raises ``WeightsError`` if the disk refuses.
    """
    unfinished, tuning = directory.with_name(f".{directory.name}"), tuning_of(model)
    adapter = unfinished / "adapter"

    def begin() -> None:
        clear(unfinished, directory)
        copy_model_files(model.config, model_dir, unfinished, run_dir=directory.parent)
        if tuning is not None:
            adapter.mkdir()

    def end() -> None:
        if tuning is not None:
            tuning.merge(model_dir, adapter, unfinished)
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
    put_chat_template(run_dir, directory)
