"""Versions of the weights as files, and the parts of the model that they contain.

    <run>/broadcasts/step_3/model.safetensors   written beside, then renamed: whole or not there
    <run>/broadcasts/step_3/STABLE               last of all: engines may load version 3

All ranks write the one file together (``tensor_file.py``), so no rank holds the whole model.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Literal, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from prime_rl.config.trainer import ROUTER_BIASES
from prime_rl.errors import WeightsError
from prime_rl.plugins.trainer import Tuning
from prime_rl.rundir.attempts import check_current
from prime_rl.rundir.status import Status
from prime_rl.trainer import parallel
from prime_rl.trainer.tensor_file import lay_out, write_shared
from prime_rl.weights.tensors import Piece, pieces_of, whole
from prime_rl.weights.versions import STABLE

logger = logging.getLogger(__name__)

WEIGHTS = "model.safetensors"
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
        """``dtype``: that of the published weights (``trainer.publish_dtype``)."""
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
        self, version: int, write: Callable[[Path], None], group: parallel.RankGroup = None
    ) -> None:
        """``write`` the version's files into a folder; every rank calls this, for one ``group``."""
        unfinished = self.directory / f".step_{version}"
        final = self.path(version)
        with disk_errors(f"write weights version {version}", final):
            parallel.on_main(partial(clear, unfinished, final), group)
            write(unfinished)
            parallel.on_main(partial(_move_into_place, unfinished, final), group)

    def size(self, version: int) -> float:
        """MiB of a written version; 0 if this machine does not see it, or not now."""
        with suppress(OSError):
            return sum(file.stat().st_size for file in self.path(version).glob("*")) / 2**20
        return 0.0

    def announce(self, version: int) -> None:
        """Mark a version as complete, and delete those too old to keep. Rank 0 calls this."""
        with disk_errors(f"announce weights version {version}", self.path(version)):
            check_current()
            (self.path(version) / STABLE).touch()

        for old in self.directory.glob("step_*"):
            if int(old.name.removeprefix("step_")) <= version - self.keep:
                shutil.rmtree(old, ignore_errors=True)


@contextmanager
def disk_errors(doing: str, path: Path) -> Iterator[None]:
    """Raises ``WeightsError`` with the space that is left instead of an error of the disk."""
    try:
        yield
    except (OSError, WeightsError) as error:
        folder = path
        # A folder that is not there yet is on the disk of the nearest one above it.
        while not folder.exists():
            folder = folder.parent
        free = f"Free there: {shutil.disk_usage(folder).free / 2**30:.2f} GiB."
        raise WeightsError(f"cannot {doing} to {path}: {error}. {free}") from error


def clear(unfinished: Path, final: Path) -> None:
    """An empty folder to write into, and nothing in the final place; a version that is announced
    and lacks its files stays."""
    shutil.rmtree(unfinished, ignore_errors=True)
    if not (final / STABLE).exists():
        shutil.rmtree(final, ignore_errors=True)
    unfinished.mkdir(parents=True)


def _move_into_place(unfinished: Path, final: Path) -> None:
    check_current()
    if not final.exists():
        unfinished.rename(final)
        return

    # The version was announced while its weights were in the trainer's memory.
    # The tensors last: from then on engines load the folder (``has_files``).
    for file in sorted(unfinished.iterdir(), key=lambda file: file.suffix == ".safetensors"):
        file.replace(final / file.name)
    unfinished.rmdir()


def save(
    model: PreTrainedModel, directory: Path, dtype: torch.dtype | None = None, flush: bool = False
) -> None:
    """Write the whole model, or the adapter where a tuning trains one; every rank calls this."""
    tuning = tuning_of(model)
    tensors = published_tensors(model)
    name = tuning.weights_file if tuning else WEIGHTS
    metadata = tuning.metadata() if tuning else {}
    dtypes = published_dtypes(model, tensors, dtype)
    pieces = published_pieces(model, tensors)
    layout = lay_out(tensors, dtypes, metadata=metadata, pieces=pieces)
    write_shared(directory / name, layout, tensors=tensors, flush=flush)

    if tuning is not None:
        parallel.on_main(partial(tuning.write_config, directory))


def tuning_of(model: PreTrainedModel) -> Tuning | None:
    """None if the whole model trains."""
    return getattr(model, "prime_rl_tuning", None)


def published_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights by their names in the model, as this rank holds them; a tied head does not appear
    twice. Where a tuning trains an adapter, that alone, by the tuning's names."""
    tuning = tuning_of(model)
    if tuning:
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
    keeps in float32 for every type of model, and the biases of routers, which move by less than a
    rounding (those that are parameters are rounded: the trainer rounds them too). None of an
    adapter, which engines add to the base in float32."""
    if dtype is None or tuning_of(model) is not None:
        return {}

    strict = model._keep_in_fp32_modules_strict or ()
    kept = [f"*{pattern}*" for pattern in strict]
    biases = [f"*{name}" for name in ROUTER_BIASES]

    def is_kept(name: str, tensor: Tensor) -> bool:
        patterns = kept if isinstance(tensor, nn.Parameter) else kept + biases
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    return {
        name: dtype
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and not is_kept(name, tensor)
    }
