"""The JSON of a run: lines, one per step, evaluation or restart, and tables. The one reader.
``unique_keys`` is for JSON that a user wrote: settings, and rows of data.

Another process may be adding a line, a crash may have left half of one, and an editor or a full
disk may have damaged one. So a line counts once it has its end, and only if it has the expected
shape. ``read_rows`` leaves a damaged line out and logs it; ``parse_row`` raises, for callers that
name the file in their error, and so does ``read_table``, which reads a whole file.
"""

from __future__ import annotations

import json
import logging
import os
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict, cast, is_typeddict

import msgspec

from prime_rl.errors import ConfigError, RunError
from prime_rl.rundir.polls import poll_failed, poll_succeeded

log = logging.getLogger(__name__)


Step = Annotated[int, msgspec.Meta(ge=0, le=10**12)]


class HasStep(TypedDict):
    """A line of a file with one line per step; its other keys are anything."""

    step: Step


def metrics_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a line of ``metrics.jsonl``: what is none, or does not fit 64 bits, is left
    out."""
    return {
        name: value
        for name, value in row.items()
        if value is None
        or isinstance(value, float)
        or (type(value) is int and -(2**63) <= value < 2**63)
    }


def unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, for ``json.loads(text, object_pairs_hook=unique_keys)``. Raises
    ``ConfigError`` for a key that stands twice: ``json`` would keep its last value and drop the
    others without a word."""
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"the key {twice!r} stands twice in a table")
    return table


def parse_json(data: bytes, line: int = 1) -> Any:
    """The value of a JSON text, with or without a byte order mark; NaN counts as a number.
    ``line``: the line of the file on which the text starts. Raises ``ValueError`` with the
    line, what was expected and what was found there."""
    data = data.removeprefix(BOM_UTF8)
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass  # the code below also takes NaN and says where the fault is, three times slower

    try:
        return json.loads(data.decode())
    except json.JSONDecodeError as error:
        expectation = error.msg.replace("Expecting", "expected")
        if expectation == "Extra data":
            expectation = "expected the end of the text"

        at = error.doc[error.pos : error.pos + 20].splitlines()[:1]
        what = repr(at[0]) if at and at[0] else "the end of the line"
        place = f"line {line + error.lineno - 1}, column {error.colno}"
        raise ValueError(f"{place}: {expectation}, found {what}") from error
    except UnicodeDecodeError as error:
        at_fault = line + data.count(b"\n", 0, error.start)
        byte = data[error.start]
        raise ValueError(f"line {at_fault}: expected UTF-8, found the byte 0x{byte:02x}") from error
    except RecursionError as error:
        raise ValueError(f"line {line}: expected JSON, found a value nested too deeply") from error
    except ValueError as error:  # an integer of more than 4,300 digits
        raise ValueError(f"line {line}: expected JSON, found a number too long to read") from error


def parse_row(line: bytes, shape: Any = HasStep, number: int = 1) -> dict[str, Any]:
    """One line with all its keys. ``number``: its line in the file. Raises ``ValueError`` with
    the line, what was expected and what was found, if it is no JSON object of the ``shape``."""
    row = parse_json(line.rstrip(b"\r\n"), number)
    try:
        msgspec.convert(row, dict[str, Any])
        msgspec.convert(row, shape)
    except (ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"line {number}: {_shape_fault(error)}") from error
    return cast("dict[str, Any]", row)


def parse_row_of(path: Path, line: bytes, shape: Any = HasStep) -> dict[str, Any]:
    """``parse_row`` of a line whose number is not known: it is looked up if the line is damaged."""
    try:
        return parse_row(line, shape)
    except ValueError:
        lines = path.read_bytes().split(b"\n")
        return parse_row(line, shape, lines.index(line) + 1 if line in lines else 1)


def _shape_fault(error: Exception) -> str:
    """What msgspec says of a shape, in the words of our other messages."""
    text = str(error).replace("Expected ", "expected ").replace(", got ", ", found ")
    return text.replace("Object missing required field", "expected an object with the key")


def read_table(path: Path, shape: Any = dict[str, Any]) -> Any:
    """The value in a JSON file, converted to the type ``shape`` by msgspec. With a ``TypedDict``
    the keys that it does not name stay. Raises ``FileNotFoundError``, and otherwise ``RunError``
    with the file, the place, what was expected and what was found."""
    try:
        value = parse_json(path.read_bytes())
        converted = msgspec.convert(value, shape)
        json.dumps(value, ensure_ascii=False).encode()  # half a character could not be printed
        return value if is_typeddict(shape) else converted
    except FileNotFoundError:
        raise
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise RunError(f"{path} cannot be read: expected text, found {half!r}") from error
    except (ValueError, OverflowError, RecursionError) as error:
        raise RunError(f"{path} cannot be read: {_shape_fault(error)}") from error


def whole_lines(data: bytes) -> list[bytes]:
    """The lines that have their end, each without it; empty ones too, so that they count."""
    return data[: data.rfind(b"\n") + 1].split(b"\n")[:-1]


def read_rows(path: Path, shape: Any = HasStep) -> list[dict[str, Any]]:
    """The whole lines of a file that have a ``shape``, with all their keys; none without the file.
    A line of another shape is logged and left out: it must not end a run or hide the others. Raises
    ``RunError`` if there is no file to read."""
    return list(each_row(path, shape))


def each_row(path: Path, shape: Any = HasStep) -> Iterator[dict[str, Any]]:
    """Like ``read_rows``, with one line in memory at a time."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}") from error

    with file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n") or not line.strip():
                continue
            try:
                row = parse_row(line, shape, number)
            except ValueError as error:
                log.warning("%s: a line is left out: %s", path, error)
                continue
            yield row


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
        """Complete, non-empty lines written since the last call; none while there is no file, or
        while it cannot be read."""
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
        except OSError as error:
            poll_failed(self._path, error)
            return []

        poll_succeeded(self._path)
        self._offset += data.rfind(b"\n") + 1
        return [line for line in whole_lines(data) if line]
