"""One row of packed sequences, and its binary form.

A frame holds one rank's micro batches of one optimizer step::

    magic "PRLB" | version u16 | header length u32 | header (msgpack) | pad | column | pad | column
    ...

Columns are raw little-endian buffers, 8-byte aligned, that the receiver maps without a Python
object per token. An rl batch has four bytes of token id, four of logprob, four of advantage and
one bit of mask: 12.125 bytes per token, plus ten bytes per sequence. A further stream is a column
called ``name:dtype``, and ``name:dtype*`` if it has several values per token; ``name:dtype*k`` if
these are rows of k.

Shapes: T = tokens of the row, S = its sequences.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from prime_rl.errors import StreamError, WireError
from prime_rl.streams import STREAMS, BoolColumn, FloatColumn, IntColumn, StreamColumn

MAGIC = b"PRLB"
WIRE_VERSION = 1
_PREFIX = struct.Struct("<4sHI")
_ALIGN = 8

_TOKEN_COLUMNS = ("token_ids", "loss_mask", "inference_logprobs", *STREAMS)
_SEQUENCE_COLUMNS = ("sequence_lengths", "temperatures", "env_ids", "rollout_ids", "group_ids")
_DTYPES: dict[str, str] = {
    **dict.fromkeys(("token_ids", "sequence_lengths", "rollout_ids", "group_ids"), "<i4"),
    "env_ids": "<u2",
    **dict.fromkeys(("inference_logprobs", "temperatures", *STREAMS), "<f4"),
}


MEASURED = -1
"""Number of the minibatch whose loss is measured after the step, without training it."""


@dataclass(slots=True, eq=False, kw_only=True)
class MicroBatch:
    """Sequences end to end: each attends only within itself, and positions restart."""

    token_ids: IntColumn
    """[T]"""
    loss_mask: BoolColumn
    """[T] True where the policy sampled the token."""
    inference_logprobs: FloatColumn
    """[T] 0.0 off the mask."""
    sequence_lengths: IntColumn
    """[S], summing to T."""
    temperatures: FloatColumn
    """[S] sampling temperature of each sequence."""
    env_ids: npt.NDArray[np.uint16]
    """[S] index into ``envs``."""
    envs: tuple[str, ...]
    advantages: FloatColumn | None = None
    rl_weights: FloatColumn | None = None
    ce_weights: FloatColumn | None = None
    ref_kl_weights: FloatColumn | None = None
    ref_logprobs: FloatColumn | None = None
    rollout_ids: IntColumn | None = None
    """[S] equal for the sequences of one rollout of the batch. None: no loss of the run needs it.
    """
    group_ids: IntColumn | None = None
    """[S] the same for groups."""
    streams: dict[str, StreamColumn] = field(default_factory=dict)
    """[T] or [T, k] each: further streams by name; ``ROUTES``: [T, layers, k]."""
    minibatch: int = 0
    """The part of the batch that it belongs to; the trainer takes an optimizer step on each, and
    none on ``MEASURED``."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_sequences(self) -> int:
        return len(self.sequence_lengths)

    @property
    def position_ids(self) -> npt.NDArray[np.int64]:
        """[T] each token's position within its own sequence."""
        return np.arange(len(self)) - np.repeat(self.first_tokens, self.sequence_lengths)

    @property
    def first_tokens(self) -> npt.NDArray[np.int64]:
        """[S] the position of each sequence's first token, which nothing predicts."""
        starts = np.cumsum(self.sequence_lengths) - self.sequence_lengths
        return starts.astype(np.int64)

    def check(self) -> None:
        """Raise ``StreamError`` unless every column lines up."""
        for name in _TOKEN_COLUMNS:
            column = getattr(self, name)
            if column is not None and column.shape != self.token_ids.shape:
                raise StreamError(
                    f"micro batch: {name!r} must align with token_ids: "
                    f"got shape {column.shape}, expected {self.token_ids.shape}"
                )

        for name, column in self.streams.items():
            if column.shape[:1] != self.token_ids.shape:
                raise StreamError(
                    f"micro batch: stream {name!r} must align with token_ids: got shape "
                    f"{column.shape}, expected one row for each of {len(self)} tokens"
                )

        for name in _SEQUENCE_COLUMNS:
            column = getattr(self, name)
            if column is not None and column.shape != self.sequence_lengths.shape:
                raise StreamError(f"micro batch: {name!r} must have one value per sequence")

        if (self.sequence_lengths < 1).any():
            raise StreamError("micro batch: every sequence needs at least one token")
        if int(self.sequence_lengths.sum()) != len(self):
            raise StreamError(
                f"micro batch: sequence_lengths sum to {int(self.sequence_lengths.sum())}, "
                f"expected {len(self)} tokens"
            )


class _Column(msgspec.Struct, array_like=True):
    name: str
    num_bytes: int


class _Row(msgspec.Struct, array_like=True):
    num_tokens: int
    num_sequences: int
    envs: tuple[str, ...]
    columns: list[_Column]


class _Header(msgspec.Struct, array_like=True):
    step: int
    rows: list[_Row]
    minibatches: list[int] = []
    """The optimizer step of each row; left out if all are 0."""


def encode_batch(step: int, micro_batches: Sequence[MicroBatch]) -> bytes:
    """One rank's micro batches of step ``step`` as one frame.

    Raises ``StreamError`` if columns don't align.
    """
    rows = []
    buffers = []
    for micro_batch in micro_batches:
        micro_batch.check()
        columns = []
        for name, data in _wire_columns(micro_batch):
            buffers.append(data.tobytes())
            columns.append(_Column(name, data.nbytes))

        rows.append(
            _Row(
                num_tokens=len(micro_batch),
                num_sequences=micro_batch.num_sequences,
                envs=micro_batch.envs,
                columns=columns,
            )
        )

    # Left out by default, so that the bytes of a run without minibatches are those of before.
    numbers = [micro_batch.minibatch for micro_batch in micro_batches]
    header = msgspec.msgpack.encode([step, rows, numbers] if any(numbers) else [step, rows])
    parts = [_PREFIX.pack(MAGIC, WIRE_VERSION, len(header)), header]
    # Columns begin at multiples of the alignment, so that the reader can map them without a copy.
    parts.append(_padding(_PREFIX.size + len(header)))
    for buffer in buffers:
        parts += [buffer, _padding(len(buffer))]
    return b"".join(parts)


def _wire_columns(micro_batch: MicroBatch) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """The name on the wire and the values of every column that is there."""
    for name in (*_TOKEN_COLUMNS, *_SEQUENCE_COLUMNS):
        column = getattr(micro_batch, name)
        if column is not None:
            # The mask goes as bits, an eighth of its bytes.
            is_mask = name == "loss_mask"
            yield name, np.packbits(column) if is_mask else np.asarray(column, _DTYPES[name])

    for name, column in micro_batch.streams.items():
        dtype = "<f4" if column.dtype.kind == "f" else "<i4"
        rows = "*" if column.ndim == 2 else ""
        # Routes keep the engine's type, one or two bytes each.
        if column.dtype.kind == "u":
            dtype = column.dtype.newbyteorder("<").str
            rows = f"*{column.shape[2]}"
        yield f"{name}:{dtype}{rows}", np.asarray(column, dtype)


def decode_batch(frame: bytes | memoryview) -> tuple[int, list[MicroBatch]]:
    """The step and its micro batches, whose columns (without the mask) are read-only views.

    Raises ``WireError`` if the frame is truncated, not one of ours or of another version.
    """
    view = memoryview(frame).cast("B")
    header, offset = _read_header(view)
    rows = []

    numbers = header.minibatches or [0] * len(header.rows)
    if len(numbers) != len(header.rows):
        raise WireError(
            f"micro batch frame: {len(numbers)} minibatch numbers for {len(header.rows)} rows"
        )

    for row, number in zip(header.rows, numbers, strict=True):
        fields: dict[str, Any] = {"minibatch": number}
        for column in row.columns:
            end = offset + column.num_bytes
            if end > len(view):
                raise WireError(
                    f"micro batch frame is truncated: column {column.name!r} ends at byte {end}, "
                    f"the frame has {len(view)}. Send it again."
                )
            fields[column.name] = _from_bytes(column.name, view[offset:end], row)
            offset = end + len(_padding(column.num_bytes))

        rows.append(_build(fields, row))

    # Bytes that no column claims mean that the two sides count differently.
    if offset != len(view):
        raise WireError(f"micro batch frame should end at byte {offset}, it has {len(view)}")
    return header.step, rows


def _from_bytes(name: str, data: memoryview, row: _Row) -> npt.NDArray[Any]:
    expected = row.num_sequences if name in _SEQUENCE_COLUMNS else row.num_tokens
    kind = name.partition(":")[2]
    dtype = _DTYPES.get(name, kind.removesuffix("*"))
    # A stream of several values per token: their number follows from the bytes.
    if kind in ("<f4*", "<i4*") and len(data) % max(4 * expected, 1) == 0:
        return np.frombuffer(data, dtype).reshape(expected, -1 if expected else 0)

    if kind.startswith(("|u1*", "<u2*")):
        return _rows_of_routes(name, data, num_tokens=expected)
    if name == "loss_mask":
        needed = -(-expected // 8)
    elif dtype in ("<f4", "<i4", "<u2"):
        needed = expected * np.dtype(dtype).itemsize
    else:
        raise WireError(f"micro batch frame holds an unknown column {name!r}")

    if len(data) != needed:
        raise WireError(
            f"micro batch frame: column {name!r} has {len(data)} bytes, expected {needed}"
        )

    if name == "loss_mask":
        return np.unpackbits(np.frombuffer(data, np.uint8), count=expected).view(np.bool_)
    return np.frombuffer(data, dtype)


def _rows_of_routes(name: str, data: memoryview, num_tokens: int) -> npt.NDArray[Any]:
    """[T, layers, k]; the name ends with k."""
    dtype, _, width = name.partition(":")[2].partition("*")
    k = int(width) if width.isdecimal() else 0
    size = num_tokens * k * np.dtype(dtype).itemsize
    if not size or len(data) % size:
        raise WireError(
            f"micro batch frame: column {name!r} has {len(data)} bytes, expected a multiple of "
            f"{size} for {num_tokens} tokens"
        )
    return np.frombuffer(data, dtype).reshape(num_tokens, -1, k)


def _build(fields: dict[str, Any], row: _Row) -> MicroBatch:
    streams = {n.partition(":")[0]: fields.pop(n) for n in [*fields] if ":" in n}
    try:
        micro_batch = MicroBatch(envs=row.envs, **fields, streams=streams)
        micro_batch.check()
    except (TypeError, StreamError) as error:
        raise WireError(f"micro batch frame does not hold a whole micro batch: {error}") from error

    if len(micro_batch.env_ids) and int(micro_batch.env_ids.max()) >= len(row.envs):
        raise WireError("micro batch frame names an env that is not in its table")
    return micro_batch


def _read_header(view: memoryview) -> tuple[_Header, int]:
    if len(view) < _PREFIX.size:
        raise WireError(f"micro batch frame is truncated: {len(view)} bytes")

    magic, version, size = _PREFIX.unpack_from(view)
    if magic != MAGIC:
        raise WireError(
            f"not a micro batch frame: it starts with {bytes(magic)!r}, expected {MAGIC!r}"
        )

    if version != WIRE_VERSION:
        raise WireError(
            f"micro batch frame has wire version {version}, this trainer reads {WIRE_VERSION}. "
            "Run the same prime-rl-core on both sides."
        )

    end = _PREFIX.size + size
    if end > len(view):
        raise WireError(
            f"micro batch frame is truncated: header ends at byte {end}, the frame has {len(view)}"
        )

    try:
        header = msgspec.msgpack.decode(view[_PREFIX.size : end], type=_Header)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WireError(f"micro batch frame has an unreadable header: {error}") from error

    return header, end + len(_padding(end))


def _padding(size: int) -> bytes:
    return b"\0" * (-size % _ALIGN)
