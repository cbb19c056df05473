"""The JSON lines of a run: one per step, evaluation or restart. The one reader of them.

Another process may be adding a line, a crash may have left half of one, and an editor or a full
disk may have damaged one. So a line counts once it has its end, and only if it has the expected
shape. ``read_rows`` leaves a damaged line out and logs it; ``parse_row`` raises, for those who name
the file in their error.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any, TypedDict

import msgspec

log = logging.getLogger(__name__)


class HasStep(TypedDict):
    """A line of a file with one line per step; its other keys are anything."""

    step: int


def parse_row(line: bytes, shape: Any = HasStep) -> dict[str, Any]:
    """One line with all its keys. Raises ``ValueError`` if it is no JSON object of the ``shape``,
    ``RecursionError`` if it is nested too deeply."""
    try:
        row = msgspec.json.decode(line)
    except msgspec.DecodeError:
        row = json.loads(line)  # it takes NaN too, and three times as long
    if not isinstance(row, dict):
        raise ValueError(f"expected an object, got {type(row).__name__}")
    msgspec.convert(row, shape)
    return row


def whole_lines(data: bytes) -> list[bytes]:
    """The lines that have their end, each without it; empty ones too, so that they count."""
    return data[: data.rfind(b"\n") + 1].split(b"\n")[:-1]


def read_rows(path: Path, shape: Any = HasStep) -> list[dict[str, Any]]:
    """The whole lines of a file that have a ``shape``, with all their keys; none without the file.
    A line of another shape is logged and left out: it must not end a run or hide the others."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []

    rows = []
    for number, line in enumerate(whole_lines(data), start=1):
        if not line.strip():
            continue
        try:
            rows.append(parse_row(line, shape))
        except (ValueError, RecursionError) as error:
            log.warning("%s, line %d is left out: %s", path, number, error)

    return rows


def last_lines(path: Path, num_bytes: int = 1 << 18) -> list[bytes]:
    """The whole lines in the last ``num_bytes`` of a file, or in more if there is none. Raises
    ``OSError``."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        while True:
            start = max(0, size - num_bytes)
            file.seek(start)
            lines = whole_lines(file.read(size - start))
            if start == 0:
                return lines
            if len(lines) > 1:
                return lines[1:]  # the first may be cut off
            num_bytes *= 4


class Tail:
    """Remembers its position in the file. An incomplete last line is left for the next call. A file
    that was replaced, because the run went back, is read from its start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._inode = 0

    def new_lines(self) -> list[bytes]:
        """Complete, non-empty lines written since the last call; none while there is no file."""
        try:
            with self._path.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                if inode != self._inode:
                    self._offset = 0
                    self._inode = inode
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []

        self._offset += data.rfind(b"\n") + 1
        return [line for line in whole_lines(data) if line]
