"""A model folder's safetensors: where each tensor lies, and a fingerprint of a base.

Importing this, and reading headers, brings in neither torch nor safetensors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from prime_rl import WeightsError

SAMPLED_BYTES = 4096
"""Bytes of each tensor that the fingerprint reads."""


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies."""

    path: Path
    shape: list[int]
    dtype: str
    """The name of safetensors: F32, BF16."""
    start: int
    """In the file, in bytes."""
    end: int


class ModelFiles:
    """A model folder by its files' headers. Raises ``WeightsError`` if a file is missing or cut
    off, or the folder has none."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tensors = read_headers(directory)

    def by_file(self) -> Iterator[tuple[Path, list[str]]]:
        """Every file with the names of its tensors."""
        for path, entries in groupby(self.tensors.items(), key=lambda item: item[1].path):
            yield path, [name for name, _ in entries]

    def fingerprint(self) -> str:
        """A hash of every tensor's name, shape, type and first 4 KiB: quick for a large model, and
        independent of how it is split into files."""
        digest = hashlib.sha256()
        for name, entry in sorted(self.tensors.items()):
            digest.update(json.dumps([name, entry.shape, entry.dtype]).encode())
            with entry.path.open("rb") as file:
                file.seek(entry.start)
                digest.update(file.read(min(entry.end - entry.start, SAMPLED_BYTES)))
        return digest.hexdigest()[:16]

    def ties_embeddings(self) -> bool:
        """Whether the head is the embedding, by ``config.json``."""
        return bool(self.text_config().get("tie_word_embeddings"))

    def text_config(self) -> dict[str, Any]:
        """``config.json``, or its ``text_config``; empty if it cannot be read."""
        try:
            config = json.loads((self.directory / "config.json").read_text("utf-8-sig"))
        except (OSError, ValueError, RecursionError):
            return {}

        if not isinstance(config, dict):
            return {}
        nested = config.get("text_config")
        return nested if isinstance(nested, dict) else config


def weight_dir(given: str, roots: Sequence[Path] | None) -> Path:
    """The folder of a weight update. Raises ``WeightsError`` if it lies in none of ``roots`` (None:
    it may lie anywhere)."""
    path, is_folder = _resolved(given)
    if not is_folder:
        raise WeightsError(f"{given}: no such folder")
    check_inside(given, roots)
    return path


def check_inside(given: str, roots: Sequence[Path] | None) -> None:
    """Raises ``WeightsError`` if a path, which may be absent, lies in none of ``roots``."""
    path, _ = _resolved(given)
    if roots is not None and not any(path.is_relative_to(root.resolve()) for root in roots):
        listed = " or ".join(map(str, roots))
        raise WeightsError(f"{given} lies outside of the run; expected a folder in {listed}")


def _resolved(given: str) -> tuple[Path, bool]:
    """A path without links, and whether it is a folder."""
    try:
        path = Path(given).resolve()
        return path, path.is_dir()
    except (OSError, ValueError) as error:  # too long, a null byte
        raise WeightsError(f"{given[:200]!r} is no path: {error}") from error


def regular(path: Path) -> Path:
    """The path of a file, or of nothing. Raises ``WeightsError``: reading a FIFO would wait."""
    if path.exists() and not path.is_file():
        raise WeightsError(f"{path}: not a file")
    return path


def read_headers(directory: Path) -> dict[str, TensorEntry]:
    """The tensors of a model folder by name, in milliseconds. Raises ``WeightsError``."""
    tensors: dict[str, TensorEntry] = {}
    for path in _shards(directory):
        try:
            tensors |= _header(path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise WeightsError(f"{path}: can't be read: {error}") from error
    return tensors


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file. Raises ``WeightsError`` if it cannot be read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(regular(path), framework="pt", device="cpu") as file:
            yield file
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise WeightsError(f"{path}: can't be read: {error}") from error


def _shards(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        paths = sorted(directory.glob("model*.safetensors"))
    else:
        try:
            table = json.loads(regular(index).read_text("utf-8-sig"))
            names = {str(name) for name in table["weight_map"].values()}
        except (
            *(OSError, ValueError, KeyError, TypeError, AttributeError),
            RecursionError,
        ) as error:
            raise WeightsError(f"{index}: not an index of safetensors: {error}") from error
        outside = [name for name in names if Path(name).name != name]
        if outside:
            raise WeightsError(f"{index}: {outside[0]!r} is not the name of a file")
        paths = sorted(directory / name for name in names)

    if not paths:
        raise WeightsError(f"{directory}: no model*.safetensors in it; expected a model folder")
    return paths


def _header(path: Path) -> dict[str, TensorEntry]:
    """The format: eight bytes with the length of the JSON after them, the JSON, the data."""
    with regular(path).open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        size = path.stat().st_size
        if length > size - 8:
            raise ValueError("it is shorter than it says: no safetensors (of git-lfs?), or cut off")
        table: dict[str, Any] = json.loads(file.read(length))

    table.pop("__metadata__", None)
    entries = {
        name: TensorEntry(
            path,
            entry["shape"],
            entry["dtype"],
            *(8 + length + offset for offset in entry["data_offsets"]),
        )
        for name, entry in table.items()
    }
    end = max((entry.end for entry in entries.values()), default=8 + length)
    if end != size:
        raise ValueError(f"it is {size} bytes long, and its header says {end}: it is cut off")
    return entries
