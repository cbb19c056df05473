"""Rows of data with a prompt each: from Python objects, files, or the hub. Imports no verifiers."""

from __future__ import annotations

import csv
import difflib
import importlib
import io
import json
from codecs import BOM_UTF8
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from prime_rl import ROLES, ConfigError

Row = dict[str, Any]

SUFFIXES = (".jsonl", ".csv", ".parquet")

INSTALL = "pip install {0}"


# -- where they come from ------------------------------------------------------------------------


def read_rows(data: str, split: str = "train", subset: str | None = None) -> list[Row]:
    """The rows of a file, or of a data set of the hub. Raises ``ConfigError``."""
    path = Path(data).expanduser()
    if path.suffix in SUFFIXES or path.exists():
        return _of_file(path)
    if data.count("/") <= 1 and not data.startswith((".", "/", "~")) and not path.suffix:
        return _of_hub(data, split, subset)
    raise ConfigError(
        f"data: there is no file {data!r}; expected a file {', '.join(SUFFIXES)}, or the name of a "
        "data set of the hub (owner/name)"
    )


def _of_file(path: Path) -> list[Row]:
    if not path.is_file():
        found = "is a folder" if path.is_dir() else f"does not exist (working folder {Path.cwd()})"
        raise ConfigError(f"data: {path} {found}; expected a file {', '.join(SUFFIXES)}")
    try:
        if path.suffix == ".jsonl":
            rows = _of_jsonl(path)
        elif path.suffix == ".csv":
            rows = _of_csv(path)
        elif path.suffix == ".parquet":
            rows = _of_parquet(path)
        else:
            raise ConfigError(
                f"data: {path} is a {path.suffix or 'file without a suffix'}; expected one of "
                f"{', '.join(SUFFIXES)}"
            )
    except OSError as error:
        raise ConfigError(f"data: {path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"data: {path} is not UTF-8: {error}") from error

    return rows


def _of_jsonl(path: Path) -> list[Row]:
    rows: list[Row] = []
    # Not ``splitlines`` of the text: it also splits at U+2028, which a text in JSON may have.
    for number, line in enumerate(path.read_bytes().removeprefix(BOM_UTF8).split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"data: {path}, line {number}: no JSON ({error})") from error
        if not isinstance(row, dict):
            raise ConfigError(
                f"data: {path}, line {number}: expected an object with the columns, found "
                f"{_shown(row)}"
            )
        rows.append(row)

    return rows


def _of_csv(path: Path) -> list[Row]:
    text = path.read_text("utf-8-sig")
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = next(reader, None)
        if not header:
            raise ConfigError(f"data: {path} is empty; expected a line with the columns' names")
        twice = [name for name in header if header.count(name) > 1]
        if twice:
            raise ConfigError(f"data: {path} has two columns called {twice[0]!r}")
        rows: list[Row] = []
        for cells in reader:
            if not cells:  # an empty line
                continue
            if len(cells) != len(header):
                raise ConfigError(
                    f"data: {path}, line {reader.line_num}: {len(cells)} cells, and the first line "
                    f"names {len(header)} columns"
                )
            rows.append(dict(zip(header, cells, strict=True)))
    except csv.Error as error:
        raise ConfigError(f"data: {path}, line {reader.line_num}: {error}") from error

    return rows


def _of_parquet(path: Path) -> list[Row]:
    parquet = _needs("pyarrow.parquet", f"data: reading {path} needs pyarrow", "pyarrow")
    try:
        rows: list[Row] = parquet.read_table(path).to_pylist()
        return rows
    except OSError:
        raise
    except Exception as error:  # classes of pyarrow
        raise ConfigError(f"data: {path} is no Parquet file: {error}") from error


def _of_hub(name: str, split: str, subset: str | None) -> list[Row]:
    what = f"data: {name!r} is no file here; reading it as a data set of the hub needs datasets"
    datasets = _needs("datasets", what, "datasets")
    try:
        loaded = datasets.load_dataset(name, subset, split=split)
    except Exception as error:  # errors of the hub, of the network, of the data set
        raise ConfigError(
            f"data: loading split {split!r} of {name!r} from the hub failed: "
            f"{type(error).__name__}: {error}. Without a network, give a file."
        ) from error
    rows: list[Row] = loaded.to_list()
    return rows


def _needs(module: str, what: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{what}, which is not installed: {INSTALL.format(package)}") from error


def rows_of(data: Any, where: str = "prompts") -> list[Row]:
    """The rows of a Python object: a list of dicts or of texts, a data set of ``datasets``, a table
    of pyarrow, a frame of pandas. Raises ``ConfigError``."""
    if hasattr(data, "to_list") and hasattr(data, "column_names"):  # datasets.Dataset
        data = data.to_list()
    elif hasattr(data, "to_pylist"):  # pyarrow.Table
        data = data.to_pylist()
    elif hasattr(data, "to_dict") and hasattr(data, "columns"):  # pandas.DataFrame
        data = data.to_dict("records")

    if isinstance(data, str | bytes | Mapping) or not isinstance(data, Iterable):
        raise ConfigError(f"{where}: expected a list of rows, got {_shown(data)}")

    rows: list[Row] = []
    for number, row in enumerate(data, 1):
        if isinstance(row, str):
            rows.append({"prompt": row})
        elif isinstance(row, Mapping):
            rows.append(dict(row))
        else:
            raise ConfigError(
                f"{where}: row {number}: expected a dict with a prompt, or a text, got "
                f"{_shown(row)}"
            )
    return rows


# -- what they must have -------------------------------------------------------------------------


def checked_rows(
    rows: Sequence[Mapping[str, Any]], column: str = "prompt", system_prompt: str | None = None
) -> list[Row]:
    """The rows as JSON has them, each with a prompt under ``column``. Raises ``ConfigError`` that
    names the row, counted from 1."""
    if not rows:
        raise ConfigError("data: there is no row; expected at least one")
    checked = [_plain(row, number) for number, row in enumerate(rows, 1)]
    for number, row in enumerate(checked, 1):
        if column not in row:
            close = difflib.get_close_matches(column, row, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ConfigError(
                f"data: row {number} has no column {column!r}, the prompt; its columns are: "
                f"{', '.join(row) or 'none'}. Name the column: prompt_column = ...{hint}"
            )
        _check_prompt(row[column], f"data: row {number}, column {column!r}")
        _check_system(row, number, column, system_prompt)

    return checked


def _plain(row: Mapping[str, Any], number: int) -> Row:
    """The row as another process will get it."""
    plain: Row = {}
    for name, value in row.items():
        if not isinstance(name, str) or not name:
            raise ConfigError(f"data: row {number}: a column is called {name!r}; expected a text")
        try:
            cell = to_jsonable_python(value, inf_nan_mode="constants", fallback=_fallback)
            text = json.dumps(cell, allow_nan=False)
            text.encode()
            json.dumps(cell, ensure_ascii=False).encode()
        except (ValueError, TypeError, RecursionError) as error:
            raise ConfigError(
                f"data: row {number}, column {name!r}: {_shown(value)} has no form in JSON, in "
                f"which rows travel: {error}. Convert it, or leave the column out."
            ) from error
        plain[name] = json.loads(text)

    return plain


def _fallback(value: Any) -> Any:
    """Arrays and scalars of numpy and torch."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} is neither text, number, list nor table")


def _check_prompt(prompt: Any, where: str) -> None:
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ConfigError(f"{where}: the prompt is empty")
        return
    if not isinstance(prompt, list):
        raise ConfigError(f"{where}: expected a text or a list of messages, got {_shown(prompt)}")
    if not prompt:
        raise ConfigError(f"{where}: the list of messages is empty")
    for place, message in enumerate(prompt, 1):
        if not isinstance(message, dict) or "role" not in message or "content" not in message:
            raise ConfigError(
                f"{where}: message {place}: expected a table with role and content, got "
                f"{_shown(message)}"
            )
        if message["role"] not in ROLES:
            raise ConfigError(
                f"{where}: message {place}: role is {message['role']!r}, expected one of "
                f"{', '.join(ROLES)}"
            )
        if not isinstance(message["content"], str | list):
            raise ConfigError(
                f"{where}: message {place}: content is {_shown(message['content'])}, expected a "
                "text"
            )
    if prompt[-1]["role"] == "assistant":
        raise ConfigError(
            f"{where}: the last message is the assistant's, and the policy is to write that. "
            "Remove it, or keep it in a column of its own."
        )


def _check_system(row: Row, number: int, column: str, shared: str | None) -> None:
    own = row.get("system_prompt")
    where = f"data: row {number}"
    if own is not None and not isinstance(own, str):
        raise ConfigError(f"{where}, column 'system_prompt': expected a text, got {_shown(own)}")
    if own is not None and shared is not None:
        raise ConfigError(f"{where} has a system_prompt, and the env has one too. Set one of them.")
    prompt = row[column]
    has_message = isinstance(prompt, list) and any(m["role"] == "system" for m in prompt)
    if has_message and (own is not None or shared is not None):
        raise ConfigError(f"{where}: the prompt has a system message, and system_prompt is set too")


def _shown(value: Any) -> str:
    """A value's type and text, in one short line."""
    text = " ".join(repr(value).split())
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"
