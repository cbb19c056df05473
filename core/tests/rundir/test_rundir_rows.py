"""Files of a run that were damaged: a bad line ends nothing and hides no other line."""

import json
import logging
import math
import re
from typing import TypedDict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prime_rl.errors import ConfigError, RunError
from prime_rl.rundir.chat_template import CHOICE, read_chat_template
from prime_rl.rundir.launch import Launch
from prime_rl.rundir.rows import (
    last_lines,
    metrics_of,
    parse_row,
    read_rows,
    read_table,
    unique_keys,
    whole_lines,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
)
BAD = [
    "[]",
    "null",
    "3",
    '"text"',
    "{}",
    '{"step": "4"}',
    '{"step": null}',
    '{"step": 1',
    "[" * 9999,
]


@pytest.mark.parametrize("line", BAD)
def test_a_line_of_another_shape_is_named_and_left_out(tmp_path, line, caplog):
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"step": 1, "x": NaN}}\n\n{line}\n{{"step": 2, "y": [3]}}\n{{"step": 3')
    with caplog.at_level(logging.WARNING):
        rows = read_rows(path)
    assert [row["step"] for row in rows] == [1, 2] and rows[1]["y"] == [3]
    assert f"{path}: a line is left out: line 3" in caplog.text


@pytest.mark.parametrize("line", BAD)
def test_a_reader_that_names_the_file_itself_gets_the_error(line):
    with pytest.raises((ValueError, RecursionError)):
        parse_row(line.encode())


def test_a_line_counts_once_it_has_its_end():
    assert whole_lines(b"") == whole_lines(b"a") == []
    assert whole_lines(b"a\nb") == [b"a"]
    assert whole_lines(b"a\n\nb\n") == [b"a", b"", b"b"]


@pytest.mark.parametrize(
    ("text", "num_bytes", "lines"),
    [
        (b"", 4, []),
        (b"no end", 3, []),
        (b"a\nbb\nccc\n", 100, [b"a", b"bb", b"ccc"]),
        (b"a\nbb\nccc\n", 5, [b"ccc"]),  # "b", "ccc": the first is cut off
        (b"a\nbb\nccc\n", 7, [b"ccc"]),  # from the beginning of "bb": that is not known
        (b"a" * 500 + b"\n" + b"b" * 90 + b"\n", 2, [b"b" * 90]),  # longer than what is read first
        (b"a\n" + b"b" * 90, 2, [b"a"]),  # which is still being written
    ],
)
def test_the_last_lines_of_a_file(tmp_path, text, num_bytes, lines):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(text)
    assert last_lines(path, num_bytes) == lines


def test_a_file_that_does_not_exist_has_no_rows(tmp_path):
    assert read_rows(tmp_path / "rows.jsonl") == []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(JSON.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=9)))
def test_whatever_the_lines_are_the_good_ones_are_read(tmp_path, lines):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"step": 1}\n' + b"\n".join(lines) + b'\n{"step": 2}\n')
    rows = read_rows(path)
    assert rows[0] == {"step": 1} and rows[-1] == {"step": 2}
    assert all(isinstance(row["step"], int) for row in rows)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(JSON.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=9))
def test_a_damaged_record_is_an_error_with_its_path(tmp_path, text):
    (tmp_path / "configs").mkdir(exist_ok=True)
    for name, read in (("configs/launch.json", Launch.read), (CHOICE, read_chat_template)):
        (tmp_path / name).write_bytes(text)
        with pytest.raises(RunError, match=f"{name} cannot be read"):
            read(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"[]", "expected `object`, found `array`"),
        (b"{}", "expected an object with the key `a`"),
        (b'{"a": "x"}', "expected `float`, found `str` - at `$.a`"),
        (
            b'{"a":\n\n1,}',
            "line 3, column 3: expected property name",
        ),
        (b'{"a": 1}\n{}', "line 2, column 1: expected the end of the text, found '{}'"),
        (b'{"a": 1}\n\n\xff', "line 3: expected UTF-8, found the byte 0xff"),
        (b"[" * 99_999, "line 1: expected JSON, found a value nested too deeply"),
        (b'{"a": 1' + b"0" * 400 + b"}", "Number out of range - at `$.a`"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "line 1: expected JSON, found a number too long to read"),
        (b'{"a": 1, "b": "\\ud800"}', r"expected text, found '\ud800'"),
    ],
)
def test_a_table_that_cannot_be_read_is_told_with_its_place(tmp_path, text, said):
    path = tmp_path / "table.json"
    path.write_bytes(text)
    with pytest.raises(RunError, match=f"^{re.escape(f'{path} cannot be read: {said}')}"):
        read_table(path, TypedDict("Table", {"a": float}))


def test_a_table_keeps_the_keys_that_its_shape_does_not_name(tmp_path):
    path = tmp_path / "table.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1, "b": NaN}\r\n')
    table = read_table(path, TypedDict("Table", {"a": float}))
    assert table["a"] == 1 and math.isnan(table["b"])
    path.unlink()
    with pytest.raises(FileNotFoundError):
        read_table(path)
    path.mkdir()
    with pytest.raises(RunError, match=r"table\.json cannot be read: Is a directory"):
        read_table(path)
    with pytest.raises(RunError, match=r"table\.json cannot be read: Is a directory"):
        read_rows(path)


@pytest.mark.parametrize("value", [10**400, 2**63, "1e5", [], {}, True])
def test_a_metric_is_a_number_of_64_bits(value):
    row = {"step": 2, "x": value, "y": None, "z": math.inf}
    assert metrics_of(row) == {"step": 2, "y": None, "z": math.inf}


def test_a_key_that_stands_twice_in_any_table_is_named() -> None:
    text = '{"b": 1, "a": [{"b": 2, "c": 3, "b": 4}]}'
    with pytest.raises(ConfigError, match=r"^the key 'b' stands twice in a table$"):
        json.loads(text, object_pairs_hook=unique_keys)
    once = text.replace(', "b": 4', "")
    assert json.loads(once, object_pairs_hook=unique_keys) == {"b": 1, "a": [{"b": 2, "c": 3}]}
