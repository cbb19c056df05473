"""Rows of prompts: where they come from, and what is refused."""

from __future__ import annotations

import csv
import json
import sys
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conversations.check_args import check_args as check_conversations
from conversations.check_args import read_conversations
from conversations.taskset import ConversationsConfig
from function.bring import function_env
from function.check_args import check_args as check_function
from function.rows import checked_rows, num_rows, read_rows, rows_of
from function.taskset import FunctionConfig
from prime_rl import ConfigError
from program.taskset import ProgramTasksetConfig

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


def test_a_missing_date_of_a_frame_is_none() -> None:
    class NaT(datetime):
        """pandas' missing time: a datetime that equals nothing, itself not either."""

        def __eq__(self, other: object) -> bool:
            return False

        def __ne__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    class Frame:
        columns = ("prompt", "day")

        def to_dict(self, orient: str) -> list[dict[str, Any]]:
            return [{"prompt": "a", "day": NaT(1970, 1, 1)}]

    assert rows_of(Frame()) == [{"prompt": "a", "day": None}]


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


@pytest.mark.parametrize("data", [{"a", "b"}, frozenset("ab")])
def test_rows_without_an_order_are_refused(data: Any) -> None:
    with pytest.raises(ConfigError, match=r"prompts: a set has another order.*sorted"):
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


class FrameOfTwo:
    """What pandas has of a frame with two columns of one name: its rows have the last."""

    columns = ("prompt", "a", "a")

    def to_dict(self, orient: str) -> list[dict[str, str]]:
        return [{"prompt": "p", "a": "2"}]


def test_two_columns_of_one_name_are_refused_wherever_they_are_from(tmp_path: Path) -> None:
    table = pa.table([["p"], ["1"], ["2"]], names=["prompt", "a", "a"])
    path = tmp_path / "a.parquet"
    pq.write_table(table, path)
    frame = FrameOfTwo()
    for read in (lambda: read_rows(str(path)), lambda: rows_of(table), lambda: rows_of(frame)):
        with pytest.raises(ConfigError, match="has two columns called 'a'"):
            read()


def test_a_cell_of_csv_may_be_long_and_the_limit_of_the_module_stays(tmp_path: Path) -> None:
    before = csv.field_size_limit()
    (tmp_path / "a.csv").write_text(f"prompt\n{'x' * 200_000}\n")
    assert read_rows(str(tmp_path / "a.csv")) == [{"prompt": "x" * 200_000}]
    assert csv.field_size_limit() == before


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


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
@pytest.mark.parametrize("set_", [{"split": "test"}, {"split": "train"}, {"subset": "main"}])
def test_a_split_or_subset_of_a_file_is_refused_where_one_is_set(
    tmp_path: Path, suffix: str, set_: dict[str, str]
) -> None:
    path = str(write(tmp_path / f"rows{suffix}", ROWS))
    ((key, value),) = set_.items()
    says = f"^{key}: '{value}' is of a data set of the hub; .*rows{suffix} is a file"
    for read in (read_rows, num_rows, read_conversations):
        with pytest.raises(ConfigError, match=says):
            read(path, **set_)  # type: ignore[operator]
    for check in (check_function, check_conversations):
        with pytest.raises(ConfigError, match=says):
            check({"data": path, "reward": "no_module.f", **set_})
    for config in (FunctionConfig, ConversationsConfig, ProgramTasksetConfig):
        assert config(data=path).split is None
    with pytest.raises(ConfigError, match=says):
        read_rows(path, **config(data=path, **set_).model_dump(include={"split", "subset"}))


def test_a_split_of_prompts_that_are_given_is_refused(tmp_path: Path) -> None:
    for prompts in (["a"], str(write(tmp_path / "rows.jsonl", ROWS))):
        with pytest.raises(ConfigError, match=r"^split: 'test' is of a data set of the hub"):
            function_env(prompts, "builtins:len", split="test", output_dir=tmp_path)


@pytest.mark.parametrize(
    "name", ["teknium/OpenHermes-2.5", "a/b.c", "a.b/c", "gsm8k-1.0", "HuggingFaceH4/ultra_v0.1"]
)
def test_a_dot_is_part_of_a_data_sets_name(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    asked = []

    def load_dataset(name: str, subset: str | None, split: str) -> pa.Table:
        asked.append((name, subset, split))
        return SimpleNamespace(to_list=lambda: ROWS)

    module = ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    assert read_rows(name) == ROWS
    assert asked == [(name, None, "train")]


@pytest.mark.parametrize(
    "name", ["rows.json", "rows.txt", "data/rows.TSV", "rows.jsonl.gz", "rows.py", "./a", "a/b/c"]
)
def test_what_can_only_be_a_file_is_not_looked_for_at_the_hub(name: str) -> None:
    with pytest.raises(ConfigError, match="there is no file"):
        read_rows(name)


@pytest.mark.parametrize(
    "row",
    [
        '{"prompt": "a", "prompt": "b"}',
        '{"prompt": "a", "answer": "1", "answer": "1"}',
        '{"prompt": [{"role": "user", "content": "a", "role": "system"}]}',
    ],
)
def test_a_key_that_stands_twice_in_a_row_is_refused_with_its_line(
    tmp_path: Path, row: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"prompt": "first"}}\n\n{row}\n')
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 3: the key '\w+' stands twice in a t"):
        read_rows(str(path))


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
        ({"prompt": [{"role": "user", "content": ["a"]}]}, "message 1: content has the part str"),
        ({"prompt": [{"role": "user", "content": [{}]}]}, "message 1: content has the part dict"),
        ({"prompt": [*MESSAGES, {"role": "assistant", "content": "x"}]}, "last message is the as"),
        ({"prompt": "a", "x": float("nan")}, "row 1, column 'x': float nan has no form in JSON"),
        ({"prompt": "a", "x": {"b", "c"}}, "row 1, column 'x': set .*a set is neither text"),
        ({"prompt": "a", "x": [frozenset()]}, "column 'x': .*a frozenset is neither text"),
        ({"prompt": "a", "x": b"yes"}, "column 'x': bytes .*a bytes is neither text"),
        ({"prompt": "a", "x": date(2026, 1, 2)}, "column 'x': .*a date is neither text"),
        ({"prompt": "a", "x": Decimal("0.1")}, "column 'x': .*a Decimal is neither text"),
        ({"prompt": "a", "x": {"y": 1j}}, "column 'x': .*a complex is neither text"),
        ({"prompt": "a", "x": {1: "b"}}, "column 'x': .*a table's key is int 1, expected a text"),
        ({"prompt": "a", "x": iter("b")}, "column 'x': .*_iterator is neither text"),
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


def test_dates_and_decimals_of_a_table_become_texts(tmp_path: Path) -> None:
    row = {"prompt": "a", "day": date(2026, 1, 2), "price": Decimal("0.10"), "at": [time(1, 2)]}
    table = pa.Table.from_pylist([row])
    pq.write_table(table, tmp_path / "rows.parquet")

    expected = [{"prompt": "a", "day": "2026-01-02", "price": "0.10", "at": ["01:02:00"]}]
    assert checked_rows(rows_of(table)) == expected
    assert checked_rows(read_rows(str(tmp_path / "rows.parquet"))) == expected


def test_arrays_and_tuples_become_lists() -> None:
    row = {"prompt": "a", "x": np.arange(2), "y": (1, 2), "z": np.float64(0.5)}
    assert checked_rows([row]) == [{"prompt": "a", "x": [0, 1], "y": [1, 2], "z": 0.5}]


CELLS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=6)


@given(rows=st.lists(CELLS, min_size=1, max_size=5), suffix=st.sampled_from([".jsonl", ".csv"]))
def test_rows_are_counted_as_they_are_read(
    tmp_path_factory: pytest.TempPathFactory, rows: list[str], suffix: str
) -> None:
    path = tmp_path_factory.mktemp("rows") / f"data{suffix}"
    if suffix == ".jsonl":
        lines = [json.dumps({"prompt": cell}, ensure_ascii=False) for cell in rows]
        path.write_bytes(b"\xef\xbb\xbf" + "\n\n \r\n".join([*lines, ""]).encode())
    else:
        with path.open("w", encoding="utf-8-sig", newline="") as file:
            csv.writer(file).writerows([["prompt"], *([cell] for cell in rows)])
    assert num_rows(str(path)) == len(read_rows(str(path))) == len(rows)


def test_rows_of_parquet_are_counted_by_its_metadata(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a", "b", "c"]}), tmp_path / "data.parquet")
    assert num_rows(str(tmp_path / "data.parquet")) == 3
    (tmp_path / "wrong.parquet").write_bytes(b"x")
    with pytest.raises(ConfigError, match="is no Parquet file"):
        num_rows(str(tmp_path / "wrong.parquet"))
