"""Rows of data as conversations. Imports no verifiers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from prime_rl import ROLES, ConfigError, unique_keys

Conversation: TypeAlias = dict[str, Any]
"""``messages``, and ``tools`` if it has some: both as JSON has them."""

LISTS = ("messages", "tools", "prompt", "completion")
FORMS = "messages, or prompt and completion"


def conversations_of(rows: Sequence[Mapping[str, Any]], first: int = 1) -> list[Conversation]:
    """A conversation of each row. ``first``: the number of the first row, for errors. Raises
    ``ConfigError``."""
    if not rows:
        raise ConfigError("data: there is no row; expected at least one")
    return [_of(row, f"data: row {number}") for number, row in enumerate(rows, first)]


def _of(row: Mapping[str, Any], where: str) -> Conversation:
    columns = {
        name: _column(name, value, where) for name, value in row.items() if value is not None
    }
    if "messages" in columns:
        messages = _messages(columns["messages"], "user", f"{where}: messages")
    elif "prompt" in columns and "completion" in columns:
        prompt = _messages(columns["prompt"], "user", f"{where}: prompt")
        messages = prompt + _messages(columns["completion"], "assistant", f"{where}: completion")
    else:
        names = ", ".join(row) or "none"
        raise ConfigError(f"{where}: expected the columns {FORMS}; its columns are: {names}")

    if not any(message["role"] == "assistant" for message in messages):
        raise ConfigError(f"{where}: no message is the assistant's, so nothing can be learned")
    if messages[0]["role"] == "assistant":
        raise ConfigError(
            f"{where}: the first message is the assistant's; expected one of another role before it"
        )
    conversation: Conversation = {"messages": messages}
    if columns.get("tools"):
        conversation["tools"] = columns["tools"]
    return conversation


def _messages(value: Any, role: str, where: str) -> list[dict[str, Any]]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{where}: expected a text or a list of messages, got {value!r:.80}")
    for place, message in enumerate(value, 1):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise ConfigError(
                f"{where}: message {place}: expected a table with role (one of "
                f"{', '.join(ROLES)}) and content, got {message!r:.80}"
            )
    return [
        _with_text(message, f"{where}: message {place}") for place, message in enumerate(value, 1)
    ]


def _with_text(message: dict[str, Any], where: str) -> dict[str, Any]:
    """The message with its content as one text, where it has parts of text. A message that only
    calls tools has none."""
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return message
    if not isinstance(content, list):
        raise ConfigError(f"{where}: content: expected a text, got {content!r:.80}")
    texts = [
        part["text"]
        for part in content
        if isinstance(part, dict)
        and part.get("type", "text") == "text"
        and isinstance(part.get("text"), str)
    ]
    if len(texts) < len(content):
        raise ConfigError(
            f"{where}: content: expected a text, or parts of text, got {content!r:.80}; there is "
            "no training on images and files"
        )
    return message | {"content": "".join(texts)}


def _column(name: str, value: Any, where: str) -> Any:
    """CSV has lists as the text of JSON. Only a whole column is read so: what a message says may be
    JSON too, and stays a text."""
    if name in LISTS and isinstance(value, str) and value.startswith("[{"):
        try:
            parsed = json.loads(value, object_pairs_hook=unique_keys)
        except ConfigError as error:
            raise ConfigError(f"{where}, column {name!r}: {error}") from error
        except ValueError:
            return value
        may_be_text = name in ("prompt", "completion")
        if may_be_text and not all(isinstance(each, dict) and "role" in each for each in parsed):
            return value
        return _plain(parsed)
    return _plain(value)


def _plain(value: Any) -> Any:
    """Without the empty cells that Parquet has where a key is missing."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
