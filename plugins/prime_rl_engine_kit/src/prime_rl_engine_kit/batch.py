"""The messages of ``POST /inference/v1/generate_batch``, an optional route (docs/engines.md).

A client sends the requests of one moment together, and gets each answer as soon as it is ready.
Token ids and log-probabilities are columns of bytes, little-endian: int32 and float32.

    request   MessagePack of ``RequestBatch``
    reply     a stream of frames: length (uint32, little-endian), then MessagePack of ``Answer``
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

ROUTE = "/inference/v1/generate_batch"
ABORT_ROUTE = "/inference/v1/abort"
MAX_REQUESTS = 4096
"""Requests of one batch."""


class BatchRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request. The other keys are those of ``/inference/v1/generate``."""

    request_id: str
    token_ids: bytes
    sampling_params: dict[str, Any] = {}
    model: str | None = None
    cache_salt: str | None = None
    priority: int | None = None


class RequestBatch(msgspec.Struct):
    """The body of a request."""

    requests: list[BatchRequest]


class Answer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The answer to the request at ``index`` of the batch."""

    index: int
    token_ids: bytes = b""
    logprobs: bytes = b""
    finish_reason: str | None = None
    versions: list[tuple[int, int, int]] = []
    """(policy version, start, end) of the sampled tokens."""
    status: int = 200
    """Anything else: the request failed, and ``error`` says why."""
    error: str = ""
    routes: bytes = b""
    """``routed_experts`` [N, layers, k] from position ``routes_start`` on. Empty: not recorded."""
    routes_shape: tuple[int, int, int] = (0, 0, 0)
    routes_dtype: str = "uint8"
    routes_start: int = 0


class Abort(msgspec.Struct):
    """The body of ``ABORT_ROUTE``: the ids of batched requests that the engine is to end."""

    request_ids: list[str]


_encoder = msgspec.msgpack.Encoder()
_answers = msgspec.msgpack.Decoder(Answer)


def ids_to_bytes(ids: list[int]) -> bytes:
    return np.array(ids, "<i4").tobytes()


def bytes_to_ids(column: bytes) -> list[int]:
    """Raises ``ValueError`` unless the column is whole."""
    tokens: list[int] = np.frombuffer(column, "<i4").tolist()
    return tokens


def logprobs_to_bytes(logprobs: list[float]) -> bytes:
    return np.array(logprobs, "<f4").tobytes()


def bytes_to_logprobs(column: bytes) -> list[float]:
    """Raises ``ValueError`` unless the column is whole."""
    values: list[float] = np.frombuffer(column, "<f4").tolist()
    return values


def frame(answer: Answer) -> bytes:
    """One answer in the reply's stream."""
    data = _encoder.encode(answer)
    return len(data).to_bytes(4, "little") + data


def take_answers(buffer: bytearray) -> Iterator[Answer]:
    """Remove the whole frames at the start of ``buffer``. Raises ``msgspec.DecodeError``."""
    start = 0
    while len(buffer) - start >= 4:
        end = start + 4 + int.from_bytes(buffer[start : start + 4], "little")
        if len(buffer) < end:
            break
        yield _answers.decode(memoryview(buffer)[start + 4 : end].tobytes())
        start = end
    del buffer[:start]
