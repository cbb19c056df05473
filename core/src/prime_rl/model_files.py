"""A model folder's safetensors: which tensor lies where, and a mark that tells two bases apart.

Importing this brings in neither torch nor safetensors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from prime_rl.errors import WeightsError

SAMPLED_BYTES = 4096
"""Of each tensor, for the fingerprint."""


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies."""

    path: Path
    shape: list[int]
    dtype: str
    """As safetensors spells it: F32, BF16."""
    start: int
    """In the file, in bytes."""
    end: int


class ModelFiles:
    """The tensors of a model folder by name, from the files' headers alone.

    Raises ``WeightsError`` if the folder has none, one lacks, or one is cut off.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tensors: dict[str, Entry] = {}
        for path in _shards(directory):
            with opened(path):  # checks that the file is as long as its header says
                self.tensors |= _header(path)

    def by_file(self) -> Iterator[tuple[Path, list[str]]]:
        """Every file with the names of its tensors."""
        for path, entries in groupby(self.tensors.items(), key=lambda item: item[1].path):
            yield path, [name for name, _ in entries]

    def fingerprint(self) -> str:
        """A hash of every tensor's name, shape, type and first 4 KiB: reads little of a large
        model, and does not depend on how it is cut into files."""
        digest = hashlib.sha256()
        for name, entry in sorted(self.tensors.items()):
            digest.update(json.dumps([name, entry.shape, entry.dtype]).encode())
            with entry.path.open("rb") as file:
                file.seek(entry.start)
                digest.update(file.read(min(entry.end - entry.start, SAMPLED_BYTES)))
        return digest.hexdigest()[:16]

    def ties_embeddings(self) -> bool:
        """Whether ``config.json`` says that the head is the embedding."""
        return bool(self._text_config().get("tie_word_embeddings"))

    @property
    def vocab_size(self) -> int | None:
        """Of ``config.json``, if it says so."""
        return self._text_config().get("vocab_size")

    def _text_config(self) -> dict[str, Any]:
        try:
            config: dict[str, Any] = json.loads((self.directory / "config.json").read_text())
        except (OSError, ValueError):
            return {}
        return config.get("text_config") or config


def read_headers(directory: Path) -> dict[str, Entry]:
    """The tensors of a model folder by name, without a look at what follows the headers: in
    milliseconds, and without safetensors, which imports torch. Raises ``WeightsError``."""
    tensors: dict[str, Entry] = {}
    for path in _shards(directory):
        try:
            tensors |= _header(path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise WeightsError(f"{path}: its header can't be read: {error}") from error
    return tensors


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file. Raises ``WeightsError`` if it cannot be read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise WeightsError(f"{path}: can't be read: {error}") from error


def _shards(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        paths = sorted(directory.glob("model*.safetensors"))
    else:
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise WeightsError(f"{index}: not an index of safetensors: {error}") from error
        paths = sorted(directory / name for name in names)
    if not paths:
        raise WeightsError(f"{directory}: no model*.safetensors in it; expected a model folder")
    return paths


def _header(path: Path) -> dict[str, Entry]:
    """The format: eight bytes that say how long the JSON after them is, the JSON, the data."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size - 8:
            raise ValueError("it is shorter than it says: no safetensors (of git-lfs?), or cut off")
        table: dict[str, Any] = json.loads(file.read(length))
    table.pop("__metadata__", None)
    return {
        name: Entry(
            path,
            entry["shape"],
            entry["dtype"],
            *(8 + length + offset for offset in entry["data_offsets"]),
        )
        for name, entry in table.items()
    }
