"""A frame on its way: sealed with a checksum, one for each rank."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from prime_rl.errors import WireError


def sealed(frame: bytes) -> bytes:
    """A frame and its CRC-32, little-endian."""
    return frame + zlib.crc32(frame).to_bytes(4, "little")


def unsealed(data: bytes | memoryview) -> memoryview:
    """The frame of what ``sealed`` made. Raises ``WireError`` if a byte has changed since."""
    frame = memoryview(data)[:-4]
    checksum = memoryview(data)[-4:]
    if len(checksum) < 4 or zlib.crc32(frame) != int.from_bytes(checksum, "little"):
        raise WireError(
            f"a micro batch frame of {len(frame)} bytes was damaged on the way: its checksum "
            "differs. Go on with --resume."
        )
    return frame


def check_num_frames(step: int, frames: Sequence[bytes], num_ranks: int) -> None:
    if len(frames) != num_ranks:
        raise WireError(
            f"step {step}: got {len(frames)} frames, expected one for each of {num_ranks} ranks"
        )
