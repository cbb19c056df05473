"""Rows of question and answer from local files, or from a dataset of the Hugging Face hub."""

from __future__ import annotations

import importlib
import json
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prime_rl import ConfigError, unique_keys

SUFFIXES = (".jsonl", ".parquet")


def local_files(path: Path) -> list[Path]:
    """The file, or the files of a folder in order of their names. Raises ``ConfigError`` if there
    are none."""
    files = [path] if path.is_file() else sorted(path.rglob("*")) if path.is_dir() else []
    tables = [file for file in files if file.suffix in SUFFIXES]
    if tables:
        return tables
    what = f"{len(files)} files, none of them" if files else "nothing"
    raise ConfigError(f"args.path: at {path} there is {what} .jsonl or .parquet")


def hub_files(dataset: str, pattern: str) -> list[Path]:
    """Download the files of a dataset into the hub's cache. Raises ``ConfigError``."""
    if Path(dataset).suffix in SUFFIXES:
        raise ConfigError(
            f"args.dataset: expected the name of a dataset of the hub; found a file, {dataset!r}. "
            "Set args.path instead."
        )

    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(dataset, repo_type="dataset", allow_patterns=pattern)
    except Exception as error:  # errors of the hub and of the network
        raise ConfigError(
            f"args.dataset: fetching {dataset!r} from the hub failed: {error}. Without a network, "
            "copy its files here and set path."
        ) from error

    files = sorted(Path(folder).glob(pattern))
    if not files:
        raise ConfigError(f"args.files: dataset {dataset!r} has no file {pattern!r}")
    return files


def rows_of(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of one file, each with its place: the file, and the line or the row. Raises
    ``ConfigError`` that names the line of a broken row."""
    if file.suffix == ".parquet":
        try:
            parquet = importlib.import_module("pyarrow.parquet")
        except ImportError as error:
            raise ConfigError(
                f'{file}: reading Parquet needs pyarrow: pip install "prime-rl-math[parquet]"'
            ) from error
        try:
            rows = parquet.read_table(file).to_pylist()
        except (OSError, ValueError) as error:  # pyarrow's are both
            raise ConfigError(f"{file}: expected a Parquet file: {error}") from error
        for number, row in enumerate(rows, 1):
            yield f"{file}, row {number}", row
        return

    # Not ``splitlines`` of the text: it also splits at U+2028, which a text in JSON may have.
    for number, line in enumerate(file.read_bytes().removeprefix(BOM_UTF8).split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, object_pairs_hook=unique_keys)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{file}, line {number}: no JSON ({error})") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{file}, line {number}: expected an object, found {str(row)[:40]!r}")
        yield f"{file}, line {number}", row
