"""A safetensors file that all ranks write at once: each puts its own parts of the tensors in place.

    [length of the header, 8 bytes][header, JSON][first tensor][second tensor] ...

A shard of rows is a run of bytes in the file, so nothing is gathered and no rank waits for
another's tensors. The file is byte for byte what one rank writes. What is sharded otherwise, and
everything if a rank does not see rank 0's disk, is gathered by rank 0, one tensor at a time.
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

from prime_rl.trainer import parallel
from prime_rl.trainer.place import Place
from prime_rl.weights.tensors import NAMES

BLOCK = 1 << 20
"""Elements rounded, fetched from a device and written at a time: 4 MiB of float32."""


@dataclass(frozen=True)
class Slot:
    """A tensor's place in the file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    """In bytes, from the file's beginning."""


@dataclass(frozen=True)
class Layout:
    """Where everything lies in a file."""

    header: bytes
    slots: Mapping[str, Slot]
    size: int
    """Of the whole file, in bytes."""


def lay_out(
    like: Mapping[str, Tensor],
    dtypes: Mapping[str, torch.dtype] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Layout:
    """Tensors of the names, shapes and types of ``like``, one after the other. ``dtypes``: those
    that are stored in another type than they have."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    slots, end = {}, 0
    for name, tensor in like.items():
        dtype = (dtypes or {}).get(name, tensor.dtype)
        slots[name] = Slot(tuple(tensor.shape), dtype, end)
        start, end = end, end + tensor.numel() * dtype.itemsize
        shape = list(tensor.shape)
        table[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    moved = {n: Slot(s.shape, s.dtype, len(header) + s.start) for n, s in slots.items()}
    return Layout(header, moved, len(header) + end)


def write_shared(
    path: Path, layout: Layout, tensors: Mapping[str, Tensor], flush: bool = False
) -> None:
    """Write a file of this rank's and the other ranks' parts; every rank calls this. ``path``'s
    folder lies on a disk of rank 0, which need not be there on the others.

    ``flush``: what other machines wrote is on the disk when this returns; rank 0's machine can see
    to its own at any time. Raises ``OSError`` on a rank whose disk refuses, and then
    ``WeightsError`` on the others.
    """
    # A name that nobody has used: a rank that finds it sees what rank 0 sees.
    mark = parallel.gather(secrets.token_hex(8))[0]
    unfinished = path.with_name(f".{mark}")
    parallel.on_main(partial(_begin, unfinished, layout))
    shared = all(parallel.gather(_is_there(unfinished, layout.size)))
    parts = {n: parallel.own_part(tensor) if shared else None for n, tensor in tensors.items()}
    own = {name: part for name, part in parts.items() if part is not None}
    parallel.on_all(partial(_write_parts, unfinished, layout, own, flush and _is_elsewhere()))
    gathered = {name: tensors[name] for name, part in parts.items() if part is None}
    if gathered:
        parallel.stream_to_main(gathered, partial(_write_whole, unfinished, layout, list(gathered)))
    parallel.on_main(partial(unfinished.rename, path))


def write_stream(
    path: Path,
    like: Mapping[str, Tensor],
    stream: Iterator[Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a file tensor by tensor, so that no two need to be in memory at once; for one rank.

    ``like`` has names, shapes and types in the order in which ``stream`` brings the values.
    """
    layout = lay_out(like, metadata=metadata)
    _begin(path, layout)
    _write_whole(path, layout, list(like), stream)


def _begin(path: Path, layout: Layout) -> None:
    """The header, and room for the rest. Closed before anybody else opens it: network file systems
    promise a look at its size only then."""
    with path.open("wb") as file:
        file.write(layout.header)
        file.truncate(layout.size)


def _is_there(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def _is_elsewhere() -> bool:
    """Whether this is not rank 0's machine. Ranks are numbered machine by machine."""
    place = Place.of_process()
    return place.rank != place.local_rank


def _write_parts(
    path: Path, layout: Layout, parts: Mapping[str, parallel.Part], flush: bool
) -> None:
    with _opened(path) as file:
        for name, part in parts.items():
            _put(file, layout.slots[name], part)
        if flush:
            os.fsync(file)


def _write_whole(path: Path, layout: Layout, names: list[str], stream: Iterator[Tensor]) -> None:
    with _opened(path) as file:
        for name, tensor in zip(names, stream, strict=True):
            _put(file, layout.slots[name], parallel.Part(tensor.reshape(-1), 0))


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """For writing only: of a page that two machines share, a client of a network file system that
    cannot have read it sends the bytes that were written, and not the page."""
    file = os.open(path, os.O_WRONLY)
    try:
        yield file
    finally:
        os.close(file)


def _put(file: int, slot: Slot, part: parallel.Part) -> None:
    """Rounded to nearest, ties to even, as an engine that loads the float32 values rounds them."""
    offset = slot.start + part.start * slot.dtype.itemsize
    blocks: Sequence[Tensor] = torch.split(part.values, BLOCK) if len(part.values) else ()
    for block in blocks:
        data = block.to(slot.dtype).cpu().contiguous().view(torch.uint8).numpy().data
        while len(data):
            written = os.pwrite(file, data, offset)
            data, offset = data[written:], offset + written
