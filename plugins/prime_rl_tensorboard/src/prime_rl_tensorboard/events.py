"""TensorBoard's event file: protobuf records in TFRecord frames.

A frame is: length (uint64), checksum of the length, record, checksum of the record, all little
endian (``tensorflow/core/lib/io/record_writer.h``). A record is an ``Event``
(``tensorflow/core/util/event.proto``): 1 wall_time (double), 2 step (int64), 3 file_version
(string), 5 summary, whose values (1) hold 1 tag (string) and 2 simple_value (float).
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

POLYNOMIAL = 0x82F63B78
"""CRC-32C (Castagnoli), bits reversed."""
VARINT = 0
DOUBLE = 1
BYTES = 2
FLOAT = 5
"""Wire types of protobuf."""


def _table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (POLYNOMIAL if byte & 1 else 0)
        table.append(byte)
    return table


_CRC = _table()


class EventFile:
    """One ``events.out.tfevents...`` file, unbuffered: a reader sees each write at once."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("ab", buffering=0)
        self._file.write(frame(_double(1, time.time()) + _bytes(3, b"brain.Event:2")))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write every metric as a scalar of one step."""
        values = b"".join(_bytes(1, scalar(name, value)) for name, value in metrics.items())
        event = _double(1, time.time()) + _varint_field(2, step) + _bytes(5, values)
        self._file.write(frame(event))

    def close(self) -> None:
        self._file.close()


def scalar(tag: str, value: float) -> bytes:
    """``Summary.Value`` with a float32, like all scalars of TensorBoard."""
    return _bytes(1, tag.encode()) + _key(2, FLOAT) + struct.pack("<f", _float32(value))


def frame(record: bytes) -> bytes:
    """A record with its length and checksums."""
    length = struct.pack("<Q", len(record))
    checksums = (struct.pack("<I", masked_crc(part)) for part in (length, record))
    return length + next(checksums) + record + next(checksums)


def masked_crc(data: bytes) -> int:
    """CRC-32C, rotated right by 15 bits, plus a constant: a CRC of data that contains CRCs would be
    weak."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _float32(value: float) -> float:
    """Clip to the range of float32."""
    largest = 3.4028234663852886e38
    return max(-largest, min(largest, value))


def _key(field: int, wire_type: int) -> bytes:
    return _varint(field << 3 | wire_type)


def _varint(value: int) -> bytes:
    value &= 0xFFFFFFFFFFFFFFFF  # a negative int64 is its two's complement
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _varint_field(field: int, value: int) -> bytes:
    return _key(field, VARINT) + _varint(value)


def _double(field: int, value: float) -> bytes:
    return _key(field, DOUBLE) + struct.pack("<d", value)


def _bytes(field: int, value: bytes) -> bytes:
    return _key(field, BYTES) + _varint(len(value)) + value
