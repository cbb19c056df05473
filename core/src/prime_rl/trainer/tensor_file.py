"""A safetensors file that all ranks write at once: each puts its own parts of the tensors in place.

    [length of the header, 8 bytes][header, JSON][first tensor][second tensor] ...

A shard of rows is a run of bytes in the file, so nothing is gathered and no rank waits for
another's tensors. The file is byte for byte the one that a single rank writes. Rank 0 gathers
tensors that are sharded otherwise, or all if a rank does not see rank 0's disk, one at a time.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from prime_rl.trainer import parallel
from prime_rl.trainer.rank import Rank
from prime_rl.weights.tensors import Piece, header_of, num_bytes

BLOCK = 1 << 20
"""Elements that are rounded, copied to the host and written at a time: 4 MiB of float32."""


@dataclass(frozen=True)
class FileLayout:
    """Where everything lies in a file."""

    header: bytes
    slots: Mapping[str, tuple[torch.dtype, int]]
    """Type of each tensor, and where it begins, in bytes from the header's end."""
    size: int
    """Bytes of the whole file."""


@dataclass(frozen=True)
class TensorPart:
    """A run of a tensor's elements, in row-major order."""

    values: Tensor
    """[elements]"""
    start: int
    """How many come before them."""


def own_part(tensor: Tensor) -> TensorPart | None:
    """The part of the whole that this rank writes: every element is in one rank's part. Rank 0
    writes a tensor that all hold; replicas of a shard divide it among themselves.

    None, on every rank, for a tensor whose shards are not runs of elements: it has to be gathered.
    """
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        values = tensor.reshape(-1)
        return TensorPart(values if parallel.rank() == 0 else values[:0], 0)

    placements = tensor.placements
    mesh = tensor.device_mesh
    # Exact types: shards of any other placement may not be runs of elements.
    shards = [p for p in placements if type(p) is not Replicate]
    by_rows = not shards or (len(shards) == 1 and type(shards[0]) is Shard and shards[0].dim == 0)
    if not by_rows or mesh.size() != parallel.num_ranks():
        return None

    rows = max((1, *tensor.shape[:1]))
    values = tensor.to_local().reshape(-1)
    start = parallel.first_row(tensor) * (tensor.numel() // rows)

    replica = 0
    replicas = 1
    place = mesh.get_coordinate() or ()
    for placement, size, index in zip(placements, mesh.shape, place, strict=True):
        if type(placement) is Replicate:
            replica = replica * size + index
            replicas = replicas * size

    first = len(values) * replica // replicas
    last = len(values) * (replica + 1) // replicas
    return TensorPart(values[first:last], start + first)


def lay_out(
    like: Mapping[str, Tensor],
    dtypes: Mapping[str, torch.dtype] | None = None,
    metadata: Mapping[str, str] | None = None,
    pieces: Sequence[Piece] | None = None,
) -> FileLayout:
    """Tensors with the names, shapes and types of ``like``, one after the other. ``dtypes``: of
    those that are stored in another type. ``pieces``: what the header calls them; None: each is
    whole."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}

    slots = {}
    end = 0
    for name, tensor in like.items():
        dtype = (dtypes or {}).get(name, tensor.dtype)
        slots[name] = (dtype, end)
        end += tensor.numel() * dtype.itemsize

    # The header lists the pieces, which cover the same bytes one after the other.
    start = 0
    for info in header_of(like, dtypes or {}, pieces):
        stop = start + num_bytes(info)
        entry = {"dtype": info.dtype, "shape": info.shape, "data_offsets": [start, stop]}
        table[info.name] = entry
        start = stop

    # The tensors begin at a multiple of 8 bytes.
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return FileLayout(header, slots, len(header) + end)


def write_shared(
    path: Path, layout: FileLayout, tensors: Mapping[str, Tensor], flush: bool = False
) -> None:
    """Write a file of all ranks' parts; every rank calls this. ``path`` is on a disk of rank 0,
    which the others need not see.

    ``flush``: on return, the bytes of other machines are on the disk; rank 0 can flush its own at
    any time. Raises ``OSError`` on a rank whose disk refuses, and then ``WeightsError`` on the
    others.
    """
    # A rank that finds a file of a new random name sees rank 0's disk, and not one like it.
    mark = parallel.gather(secrets.token_hex(8))[0]
    unfinished = path.with_name(f".{mark}")
    parallel.on_main(partial(begin_file, unfinished, layout))
    all_see_it = all(parallel.gather(_is_there(unfinished, layout.size)))

    parts = {}
    gathered = {}
    for name, tensor in tensors.items():
        part = own_part(tensor) if all_see_it else None
        if part is None:
            gathered[name] = tensor
        else:
            parts[name] = part

    def write_gathered(stream: Iterator[Tensor]) -> None:
        _write_whole(unfinished, layout, names=list(gathered), stream=stream)

    parallel.on_all(partial(write_parts, unfinished, layout, parts=parts, flush=flush))
    if gathered:
        # After the parts: each rank writes those alone, but all ranks gather together.
        parallel.stream_to_main(gathered, write_gathered)
    parallel.on_main(partial(unfinished.rename, path))


def write_stream(
    path: Path,
    like: Mapping[str, Tensor],
    stream: Iterator[Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a file tensor by tensor, with one tensor in memory at a time; for one rank.

    ``like`` has names, shapes and types in the order in which ``stream`` yields the values.
    """
    layout = lay_out(like, metadata=metadata)
    begin_file(path, layout)
    _write_whole(path, layout, names=list(like), stream=stream)


def begin_file(path: Path, layout: FileLayout) -> None:
    """The header, and room for the rest. Closed before another rank opens it: network file systems
    show the right size only then."""
    with path.open("wb") as file:
        file.write(layout.header)
        file.truncate(layout.size)


def _is_there(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def write_parts(
    path: Path, layout: FileLayout, parts: Mapping[str, TensorPart], flush: bool
) -> None:
    """This rank's parts, into a file that rank 0 has begun. Raises ``OSError``."""
    with _opened(path) as file:
        for name, part in parts.items():
            _write_part(file, layout, name=name, part=part)

        rank = Rank.of_process()
        if flush and rank.number != rank.local:  # not on rank 0's machine: numbers go by machine
            os.fsync(file)


def _write_whole(
    path: Path, layout: FileLayout, names: list[str], stream: Iterator[Tensor]
) -> None:
    with _opened(path) as file:
        for name, tensor in zip(names, stream, strict=True):
            _write_part(file, layout, name=name, part=TensorPart(tensor.reshape(-1), 0))


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """For writing only: a client of a network file system that could read would send whole pages,
    and overwrite another machine's bytes in a page that both write to."""
    file = os.open(path, os.O_WRONLY)
    try:
        yield file
    finally:
        os.close(file)


def _write_part(file: int, layout: FileLayout, name: str, part: TensorPart) -> None:
    """Rounded to nearest, ties to even, as an engine that loads the float32 values rounds them."""
    dtype, start = layout.slots[name]
    offset = len(layout.header) + start + part.start * dtype.itemsize

    blocks: Sequence[Tensor] = torch.split(part.values, BLOCK) if len(part.values) else ()
    for block in blocks:
        data = block.to(dtype).cpu().contiguous().view(torch.uint8).numpy().data
        while len(data):  # the system may write less than it is given
            written = os.pwrite(file, data, offset)
            data = data[written:]
            offset = offset + written
