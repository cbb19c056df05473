"""Rows of prompts: where they come from, and what is refused."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from function.rows import checked_rows, read_rows, rows_of
from prime_rl import ConfigError

ROWS = [{"prompt": "2+3?", "answer": "5"}, {"prompt": "a\u2028b", "answer": 'x,"y"\nz'}]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("\ufeff" + "\n".join(json.dumps(r, ensure_ascii=False) for r in rows))
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8-sig") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_each_kind_of_file_gives_the_same_rows(tmp_path: Path, suffix: str) -> None:
    assert read_rows(str(write(tmp_path / f"rows{suffix}", ROWS))) == ROWS


def test_lists_texts_tables_and_frames_give_rows() -> None:
    class Frame:
        columns = ("prompt", "answer")

        def to_dict(self, orient: str) -> list[dict[str, Any]]:
            assert orient == "records"
            return ROWS

    for data in (ROWS, iter(ROWS), pa.Table.from_pylist(ROWS), Frame()):
        assert rows_of(data) == ROWS
    assert rows_of(["a", "b"]) == [{"prompt": "a"}, {"prompt": "b"}]


@pytest.mark.parametrize("data", ["questions", {"prompt": "a"}, 3, None])
def test_what_is_no_list_of_rows_is_refused(data: Any) -> None:
    with pytest.raises(ConfigError, match="prompts: expected a list of rows, got"):
        rows_of(data)


def test_a_row_that_is_no_dict_is_named() -> None:
    with pytest.raises(ConfigError, match="row 2: expected a dict with a prompt, or a text"):
        rows_of(["a", 3])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"a": 1}\nnope', "line 2: no JSON"),
        ("a.jsonl", "[1]", "line 1: expected an object with the columns, found list"),
        ("a.csv", "", "is empty; expected a line with the columns' names"),
        ("a.csv", "a,a\n1,2", "two columns called 'a'"),
        ("a.csv", "a,b\n1,2\n3", "line 3: 1 cells, and the first line names 2 columns"),
        ("a.csv", 'a\n"b', "line 2: unexpected end of data"),
        ("a.parquet", "nope", "is no Parquet file"),
        ("a.txt", "a", "is a .txt; expected one of .jsonl, .csv, .parquet"),
    ],
)
def test_broken_files_are_refused_with_the_place(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_rows(str(path))


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        read_rows(str(tmp_path / "a.jsonl"))
    with pytest.raises(ConfigError, match="is a folder"):
        read_rows(str(tmp_path))
    (tmp_path / "b.jsonl").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ConfigError, match=r"no JSON|not UTF-8"):
        read_rows(str(tmp_path / "b.jsonl"))


def test_the_hub_and_parquet_name_the_package_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="needs datasets, which is not installed: pip install"):
        read_rows("openai/gsm8k")
    path = write(tmp_path / "rows.parquet", ROWS)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError, match="needs pyarrow, which is not installed: pip install"):
        read_rows(str(path))


def test_a_data_set_of_the_hub_is_loaded_by_name_split_and_subset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    class Loaded:
        column_names = ("prompt", "answer")

        def to_list(self) -> list[dict[str, Any]]:
            return ROWS

    def load_dataset(name: str, subset: str | None, split: str) -> Loaded:
        asked.append((name, subset, split))
        if split == "tset":
            raise ValueError("no split 'tset'")
        return Loaded()

    module = ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    assert read_rows("openai/gsm8k", "test", "main") == ROWS == rows_of(Loaded())
    assert asked == [("openai/gsm8k", "main", "test")]
    with pytest.raises(ConfigError, match=r"split 'tset' of 'openai/gsm8k' .* no split 'tset'"):
        read_rows("openai/gsm8k", "tset")


MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"promt": "a"}, "row 1 has no column 'prompt'.*columns are: promt"),
        ({}, "row 1 has no column 'prompt'.*none"),
        ({"prompt": ""}, "row 1, column 'prompt': the prompt is empty"),
        ({"prompt": 3}, "expected a text or a list of messages, got int 3"),
        ({"prompt": []}, "list of messages is empty"),
        ({"prompt": [{"role": "user"}]}, "message 1: expected a table with role and content"),
        ({"prompt": [{"role": "me", "content": ""}]}, "role is 'me', expected one of system"),
        ({"prompt": [{"role": "user", "content": 1}]}, "message 1: content is int 1"),
        ({"prompt": [*MESSAGES, {"role": "assistant", "content": "x"}]}, "last message is the as"),
        ({"prompt": "a", "x": float("nan")}, "row 1, column 'x': float nan has no form in JSON"),
        ({"prompt": "a", "x": object}, "column 'x': .* has no form in JSON"),
        ({"prompt": "a", "x": "\ud800"}, "column 'x': .* has no form in JSON"),
        ({"prompt": "a", 3: "b"}, "a column is called 3; expected a text"),
        ({"prompt": "a", "system_prompt": 3}, "column 'system_prompt': expected a text, got int"),
    ],
)
def test_rows_that_cannot_be_sampled_are_refused_with_row_and_column(
    row: dict[Any, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        checked_rows([row])


def test_two_system_prompts_are_refused() -> None:
    system = [{"role": "system", "content": "s"}, *MESSAGES]
    for row in ({"prompt": "a", "system_prompt": "b"}, {"prompt": system}):
        checked_rows([row])
        with pytest.raises(ConfigError, match="system"):
            checked_rows([row], system_prompt="c")


def test_no_row_and_a_prompt_under_another_name() -> None:
    with pytest.raises(ConfigError, match="there is no row"):
        checked_rows([])
    assert checked_rows([{"question": "a"}], "question") == [{"question": "a"}]


CELLS = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(),
    ),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
    max_leaves=6,
)


@given(CELLS)
def test_what_json_has_arrives_as_it_was(cell: Any) -> None:
    assert checked_rows([{"prompt": "a", "cell": cell}]) == [{"prompt": "a", "cell": cell}]


def test_arrays_and_tuples_become_lists() -> None:
    row = {"prompt": "a", "x": np.arange(2), "y": (1, 2), "z": np.float64(0.5)}
    assert checked_rows([row]) == [{"prompt": "a", "x": [0, 1], "y": [1, 2], "z": 0.5}]
