"""The taskset ``conversations``: rows of data as messages, and errors that name the row."""

import json

import pytest

from conversations.check_args import ConversationsArgs, check_args, conversations_for
from conversations.rows import conversations_of
from prime_rl import ConfigError

ASK = {"role": "user", "content": "ab"}
REPLY = {"role": "assistant", "content": "ba"}


def test_a_row_has_messages_or_a_prompt_and_a_completion():
    rows = [
        {"messages": [ASK, REPLY], "id": 3},
        {"prompt": "ab", "completion": "ba"},
        {"prompt": [ASK], "completion": [REPLY]},
    ]
    assert conversations_of(rows) == [{"messages": [ASK, REPLY]}] * 3


def test_parts_of_text_are_one_text():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    rows = [{"messages": [{**ASK, "content": parts}, {**REPLY, "content": [{"text": "ba"}]}]}]
    assert conversations_of(rows) == [{"messages": [ASK, REPLY]}]


def test_cells_that_parquet_leaves_empty_are_no_keys():
    call = {"name": "f", "arguments": "{}"}
    messages = [
        {**ASK, "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [{"function": call, "id": None}]},
    ]
    (found,) = conversations_of([{"messages": messages, "tools": None, "score": None}])
    assert found == {
        "messages": [ASK, {"role": "assistant", "tool_calls": [{"function": call}]}],
    }


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a"}, r"row 5: expected the columns messages, or prompt.*: text"),
        ({"messages": []}, "row 5: messages: expected a text or a list of messages"),
        ({"messages": [{"role": "bot"}]}, "message 1: expected a table with role"),
        ({"messages": [ASK]}, "no message is the assistant's"),
        ({"messages": [REPLY]}, "the first message is the assistant's"),
        ({"prompt": 3, "completion": "a"}, "row 5: prompt: expected a text"),
        ({"messages": [ASK, {"role": "assistant"}]}, "message 2: content: expected a text, got No"),
        (
            {"messages": [{**ASK, "content": 5}, REPLY]},
            "content: expected a text, got 5",
        ),
        (
            {"messages": [{**ASK, "content": [{"type": "image_url", "image_url": {}}]}, REPLY]},
            "message 1: content: .*no training on images",
        ),
    ],
)
def test_an_error_names_the_row(row, message):
    with pytest.raises(ConfigError, match=message):
        conversations_of([row], first=5)


def test_rows_are_chosen_by_number_and_counted_from_the_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": str(n), "completion": "x"} for n in range(4)] + [{"text": "bad"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    chosen = conversations_for(ConversationsArgs(data=str(path), first=1, num_examples=2))
    assert [each["messages"][0]["content"] for each in chosen] == ["1", "2"]
    with pytest.raises(ConfigError, match="row 5"):
        check_args({"data": str(path), "first": 3})


def test_a_parquet_file_has_the_same_conversations(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"messages": [ASK, REPLY], "tools": None}, {"messages": [ASK, REPLY, ASK, REPLY]}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    found = conversations_for(ConversationsArgs(data=str(tmp_path / "rows.parquet")))
    assert found == [{"messages": [ASK, REPLY]}, {"messages": [ASK, REPLY, ASK, REPLY]}]


def test_a_key_that_stands_twice_in_a_cell_of_json_is_refused():
    cell = '[{"role": "user", "content": "a", "content": "b"}, {"role": "assistant"}]'
    with pytest.raises(ConfigError, match="row 1, column 'messages': the key 'content' stands tw"):
        conversations_of([{"messages": cell}])


def test_what_a_message_says_may_be_json_and_stays_a_text():
    ask = {"role": "user", "content": '[{"id": 1}]'}
    reply = {"role": "assistant", "content": '["a", "b"]'}
    rows = [
        {"messages": [ask, reply]},
        {"messages": json.dumps([ask, reply])},
        {"prompt": ask["content"], "completion": reply["content"]},
        {"prompt": [ask], "completion": reply["content"]},
    ]
    assert conversations_of(rows) == [{"messages": [ask, reply]}] * len(rows)
