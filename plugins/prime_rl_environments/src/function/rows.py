"""Rows of data with a prompt each: from Python objects, files, or the hub. Imports no verifiers."""

from __future__ import annotations

import csv
import difflib
import importlib
import io
import json
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import Any

from prime_rl import ROLES, ConfigError, unique_keys

Row = dict[str, Any]

SUFFIXES = (".jsonl", ".csv", ".parquet")

OTHER_SUFFIXES = frozenset(
    {
        *(".json", ".ndjson", ".jsonlines", ".yaml", ".yml", ".toml", ".xml"),
        *(".txt", ".md", ".tsv", ".xls", ".xlsx", ".ods", ".py"),
        *(".pq", ".arrow", ".feather", ".orc", ".avro", ".lance", ".db", ".sqlite"),
        *(".npy", ".npz", ".pkl", ".pickle", ".pt", ".h5", ".hdf5"),
        *(".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz"),
    }
)
"""Files of other kinds. Any other dot may be part of a data set's name: ``OpenHermes-2.5``."""

SPLIT = "train"
"""The split of a data set of the hub, where none is set."""

LONGEST_CELL = 2**31 - 1
"""Characters of a cell of CSV. The module's own limit, 131,072, is less than a long prompt has."""

INSTALL = "pip install {0}"


# -- where they come from ------------------------------------------------------------------------


def read_rows(data: str, split: str | None = None, subset: str | None = None) -> list[Row]:
    """The rows of a file, or of a data set of the hub. ``split``: of the hub; None: ``train``.
    Raises ``ConfigError``."""
    path = _file(data, split, subset)
    if path is not None:
        rows: list[Row] = _of_file(path, READERS)
    else:
        rows = _of_table(_of_hub(data, split, subset).to_list())
    return rows


def chosen_rows(args: Any) -> list[Row]:
    """The rows of ``args.data`` that its ``first`` and ``num_examples`` choose. Raises
    ``ConfigError``."""
    rows = read_rows(args.data, args.split, args.subset)
    end = None if args.num_examples is None else args.first + args.num_examples
    chosen = rows[args.first : end]
    if rows and not chosen:
        raise ConfigError(f"first: {args.first} rows to skip, and {args.data!r} has {len(rows)}")
    return chosen


def num_rows(data: str, split: str | None = None, subset: str | None = None) -> int:
    """How many rows ``read_rows`` gives, without making them. Raises ``ConfigError``."""
    path = _file(data, split, subset)
    number: int = len(_of_hub(data, split, subset)) if path is None else _of_file(path, COUNTERS)
    return number


def _file(data: str, split: str | None, subset: str | None) -> Path | None:
    """None: it is the name of a data set of the hub. Raises ``ConfigError``, also for a split or
    subset of a file, all of whose rows are read."""
    path = Path(data).expanduser()
    suffix = path.suffix.lower()
    if suffix in SUFFIXES or path.exists():
        for key, value in (("split", split), ("subset", subset)):
            if value is not None:
                raise ConfigError(
                    f"{key}: {value!r} is of a data set of the hub; {data} is a file, and all of "
                    f"its rows are read. Leave {key} out, or give a file of these rows alone."
                )
        return path
    is_a_name = data.count("/") <= 1 and not data.startswith((".", "/", "~"))
    if is_a_name and suffix not in OTHER_SUFFIXES:
        return None
    raise ConfigError(
        f"data: there is no file {data!r}; expected a file {', '.join(SUFFIXES)}, or the name of a "
        "data set of the hub (owner/name)"
    )


def _of_file(path: Path, readers: Mapping[str, Callable[[Path], Any]]) -> Any:
    """What the reader for its suffix makes of a file."""
    if not path.is_file():
        problem = (
            "is a folder" if path.is_dir() else f"does not exist (working folder {Path.cwd()})"
        )
        raise ConfigError(f"data: {path} {problem}; expected a file {', '.join(SUFFIXES)}")
    if path.suffix not in readers:
        raise ConfigError(
            f"data: {path} is a {path.suffix or 'file without a suffix'}; expected one of "
            f"{', '.join(SUFFIXES)}"
        )
    try:
        return readers[path.suffix](path)
    except OSError as error:
        raise ConfigError(f"data: {path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"data: {path} is not UTF-8: {error}") from error


def _of_jsonl(path: Path) -> list[Row]:
    rows: list[Row] = []
    # Not ``splitlines`` of the text: it also splits at U+2028, which a text in JSON may have.
    for number, line in enumerate(path.read_bytes().removeprefix(BOM_UTF8).split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, object_pairs_hook=unique_keys)
        except ConfigError as error:
            raise ConfigError(f"data: {path}, line {number}: {error}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"data: {path}, line {number}: no JSON ({error})") from error
        if not isinstance(row, dict):
            raise ConfigError(
                f"data: {path}, line {number}: expected an object with the columns, found "
                f"{_shown(row)}"
            )
        rows.append(row)

    return rows


def _lines_of(path: Path) -> int:
    with path.open("rb") as file:
        return sum(bool(line.removeprefix(BOM_UTF8).strip()) for line in file)


def _of_csv(path: Path) -> list[Row]:
    text = path.read_text("utf-8-sig")
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    usual_limit = csv.field_size_limit(LONGEST_CELL)
    try:
        header = next(reader, None)
        if not header:
            raise ConfigError(f"data: {path} is empty; expected a line with the columns' names")
        _check_names(header, f"data: {path}")
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
    finally:
        csv.field_size_limit(usual_limit)

    return rows


def _check_names(names: Sequence[Any], where: str) -> None:
    """A row is a table by name: of two columns of one name, it would have the last. Raises
    ``ConfigError``."""
    names = list(names)
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ConfigError(f"{where} has two columns called {twice[0]!r}")


def _of_parquet(path: Path) -> list[Row]:
    parquet = _needs("pyarrow.parquet", f"data: reading {path} needs pyarrow", "pyarrow")
    try:
        _check_names(parquet.read_schema(path).names, f"data: {path}")
        return _of_table(parquet.read_table(path).to_pylist())
    except (OSError, ConfigError):
        raise
    except Exception as error:  # classes of pyarrow
        raise ConfigError(f"data: {path} is no Parquet file: {error}") from error


def _rows_of_parquet(path: Path) -> int:
    parquet = _needs("pyarrow.parquet", f"data: reading {path} needs pyarrow", "pyarrow")
    try:
        number: int = parquet.read_metadata(path).num_rows
        return number
    except OSError:
        raise
    except Exception as error:  # classes of pyarrow
        raise ConfigError(f"data: {path} is no Parquet file: {error}") from error


READERS = {".jsonl": _of_jsonl, ".csv": _of_csv, ".parquet": _of_parquet}
COUNTERS = {
    ".jsonl": _lines_of,
    ".csv": lambda path: len(_of_csv(path)),  # a row may have several lines
    ".parquet": _rows_of_parquet,
}


def _of_hub(name: str, split: str | None, subset: str | None) -> Any:
    """A data set of ``datasets``."""
    what = f"data: {name!r} is no file here; reading it as a data set of the hub needs datasets"
    datasets = _needs("datasets", what, "datasets")
    try:
        return datasets.load_dataset(name, subset, split=split or SPLIT)
    except Exception as error:  # errors of the hub, of the network, of the data set
        raise ConfigError(
            f"data: loading split {split or SPLIT!r} of {name!r} from the hub failed: "
            f"{type(error).__name__}: {error}. Without a network, give a file."
        ) from error


def _needs(module: str, what: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{what}, which is not installed: {INSTALL.format(package)}") from error


def rows_of(data: Any, where: str = "prompts") -> list[Row]:
    """The rows of a Python object: a list of dicts or of texts, a data set of ``datasets``, a table
    of pyarrow, a frame of pandas. Raises ``ConfigError``."""
    if hasattr(data, "to_list") and hasattr(data, "column_names"):  # datasets.Dataset
        data = _of_table(data.to_list())
    elif hasattr(data, "to_pylist"):  # pyarrow.Table
        _check_names(getattr(data, "column_names", ()), f"{where}: the table")
        data = _of_table(data.to_pylist())
    elif hasattr(data, "to_dict") and hasattr(data, "columns"):  # pandas.DataFrame
        _check_names(data.columns, f"{where}: the frame")
        data = _of_table(data.to_dict("records"))

    if isinstance(data, str | bytes | Mapping) or not isinstance(data, Iterable):
        raise ConfigError(f"{where}: expected a list of rows, got {_shown(data)}")

    if isinstance(data, set | frozenset):
        raise ConfigError(
            f"{where}: a set has another order in each process, and a run must find its rows "
            "again. Give a list: sorted(...)"
        )

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


def _of_table(rows: Iterable[Mapping[str, Any]]) -> list[Row]:
    """The rows of a table whose columns have types: dates, times and decimals as texts."""
    return [{name: _with_texts(value) for name, value in row.items()} for row in rows]


def _with_texts(value: Any) -> Any:
    if isinstance(value, date | time):
        is_missing = value != value  # pandas' NaT, which is a date
        return None if is_missing else value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, list):
        return [_with_texts(each) for each in value]
    if isinstance(value, dict):
        return {name: _with_texts(each) for name, each in value.items()}
    return value


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
        _check_system(row, number, column=column, shared=system_prompt)

    return checked


def _plain(row: Mapping[str, Any], number: int) -> Row:
    """The row as another process will get it."""
    plain: Row = {}
    for name, value in row.items():
        if not isinstance(name, str) or not name:
            raise ConfigError(f"data: row {number}: a column is called {name!r}; expected a text")
        try:
            cell = _as_json(value)
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


def _as_json(value: Any) -> Any:
    """A value of Python as JSON has it. What would arrive as something else (a set without its
    order, bytes as a text, a date as a text) is refused. Raises ``TypeError``."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list | tuple):
        return [_as_json(each) for each in value]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"a table's key is {_shown(key)}, expected a text")
        return {key: _as_json(each) for key, each in value.items()}
    if hasattr(value, "tolist"):  # arrays and scalars of numpy and torch
        return _as_json(value.tolist())
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
        parts = message["content"] if isinstance(message["content"], list) else ()
        for part in parts:
            if not isinstance(part, dict) or not isinstance(part.get("type"), str):
                raise ConfigError(
                    f"{where}: message {place}: content has the part {_shown(part)}, expected a "
                    'text, or parts such as {"type": "text", "text": ...}'
                )
    if prompt[-1]["role"] == "assistant":
        raise ConfigError(
            f"{where}: the last message is the assistant's, and the policy is to write that. "
            "Remove it, or keep it in a column of its own."
        )


def _check_system(row: Row, number: int, column: str, shared: str | None) -> None:
    of_row = row.get("system_prompt")
    where = f"data: row {number}"
    if of_row is not None and not isinstance(of_row, str):
        raise ConfigError(f"{where}, column 'system_prompt': expected a text, got {_shown(of_row)}")
    if of_row is not None and shared is not None:
        raise ConfigError(f"{where} has a system_prompt, and the env has one too. Set one of them.")
    prompt = row[column]
    has_message = isinstance(prompt, list) and any(m["role"] == "system" for m in prompt)
    if has_message and (of_row is not None or shared is not None):
        raise ConfigError(f"{where}: the prompt has a system message, and system_prompt is set too")


def _shown(value: Any) -> str:
    """A value's type and text, in one short line."""
    text = " ".join(repr(value).split())
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"
