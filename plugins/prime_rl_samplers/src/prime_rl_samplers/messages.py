"""Demonstrations: read, check, and split into a prompt and the answer to learn."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeAlias

from prime_rl import ROLES, ConfigError

Message: TypeAlias = Mapping[str, Any]

FORMS = '{"messages": [...]} or {"prompt": ..., "completion": ...}'


@dataclass(frozen=True)
class Demonstration:
    """One conversation to learn from."""

    messages: Sequence[Message]
    fields: Mapping[str, Any]
    """The example's fields, including ``prompt``."""
    where: str
    """For error messages: the file and line, or the env's example."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """The part of the row that the prompt shows, in OpenAI's form."""

    @property
    def num_turns(self) -> int:
        return sum(message["role"] == "assistant" for message in self.messages)


def read_demonstrations(path: Path, where: str) -> list[Demonstration]:
    """The demonstrations of a JSON-lines file, without blank lines. ``where`` (the env and the key)
    begins every error. Raises ``ConfigError`` with the file and the line."""
    try:
        lines = path.read_bytes().removeprefix(BOM_UTF8).split(b"\n")
    except OSError as error:
        raise ConfigError(
            f"{where}: cannot read {path}: {error.strerror}. Relative paths start at the working "
            "directory."
        ) from error

    demonstrations = [
        _from_line(line, f"{where}: {path}:{number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not demonstrations:
        raise ConfigError(f"{where}: {path} is empty, expected lines of {FORMS}")
    return demonstrations


def _from_line(line: bytes, where: str) -> Demonstration:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: expected JSON, got {line[:60]!r} ({error})") from error

    if not isinstance(record, dict):
        raise ConfigError(f"{where}: expected a JSON object, {FORMS}, got {_shown(record)}")
    if ("messages" in record) == ("completion" in record):
        raise ConfigError(f"{where}: expected {FORMS}, got keys {', '.join(sorted(record))}")
    if "completion" in record:
        return demonstration(record, "completion", where)
    messages = conversation(record.pop("messages"), "user", f"{where}: messages")
    return _checked(messages, {**record, "prompt": prompt_of(messages)}, where)


def prompt_of(messages: Sequence[Message]) -> list[Message]:
    """What comes before the assistant's first message."""
    return list(takewhile(lambda message: message["role"] != "assistant", messages))


def demonstration(fields: Mapping[str, Any], key: str, where: str) -> Demonstration:
    """The demonstration in an example's fields: its ``prompt``, and the answer in ``key``.

    Raises ``ConfigError`` if either is missing or not a conversation.
    """
    whole = fields.get(key)
    if isinstance(whole, Mapping) and "messages" in whole:
        record = {**fields, **whole}
        messages = conversation(whole["messages"], "user", f"{where}: {key}: messages")
        return _checked(messages, {**record, "prompt": prompt_of(messages)}, where)
    for needed in ("prompt", key):
        if needed not in fields:
            raise ConfigError(
                f"{where}: got no field {needed!r}, expected it among {', '.join(sorted(fields))}"
            )
    prompt = conversation(fields["prompt"], "user", f"{where}: prompt")
    answer = conversation(fields[key], "assistant", f"{where}: {key}")
    return _checked([*prompt, *answer], {**fields, "prompt": prompt}, where)


def conversation(value: Any, role: str, where: str) -> list[Message]:
    """A list of messages from a text (one message of ``role``), a message or a list of messages.
    Raises ``ConfigError``."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    messages = [value] if isinstance(value, Mapping) else value
    if not isinstance(messages, list | tuple):
        raise ConfigError(f"{where}: expected text or a list of messages, got {_shown(value)}")
    for index, message in enumerate(messages):
        _check_message(message, f"{where}[{index}]")
    return list(messages)


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, Mapping):
        raise ConfigError(f"{where}: expected a message (role, content), got {_shown(message)}")
    if message.get("role") not in ROLES:
        raise ConfigError(
            f"{where}: role: expected one of {', '.join(ROLES)}, got {_shown(message.get('role'))}"
        )

    content = message.get("content")
    calls_only = content is None and message.get("tool_calls")
    if not isinstance(content, str) and not calls_only:
        raise ConfigError(f"{where}: content: expected text, got {_shown(content)}")
    thought = message.get("reasoning_content")
    if thought is not None and not isinstance(thought, str):
        raise ConfigError(f"{where}: reasoning_content: expected text, got {_shown(thought)}")
    if message.get("weight", 1) != 1:
        raise ConfigError(
            f"{where}: weight: got {_shown(message['weight'])}, and every message of the assistant "
            "trains with weight 1. Leave the demonstration out, or end it before this message"
        )

    _check_calls(message.get("tool_calls"), f"{where}: tool_calls")


def _check_calls(calls: Any, where: str) -> None:
    """Check that a renderer can write the calls, and that a tool can take them. Raises
    ``ConfigError``."""
    if calls is None:
        return
    if not isinstance(calls, list | tuple):
        raise ConfigError(f"{where}: expected a list, got {_shown(calls)}")
    for index, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            form = '{"type": "function", "function": {"name": ..., "arguments": ...}}'
            raise ConfigError(f"{where}[{index}]: expected {form}, got {_shown(call)}")
        arguments = function.get("arguments", {})
        try:
            table = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            table = None
        if not isinstance(table, Mapping):
            raise ConfigError(
                f"{where}[{index}]: arguments: expected a JSON object, or its text, got "
                f"{_shown(arguments)}"
            )


def _checked(messages: list[Message], fields: Mapping[str, Any], where: str) -> Demonstration:
    if messages and messages[0]["role"] == "assistant":
        raise ConfigError(
            f"{where}: the first message is the assistant's, and in a rollout a prompt comes "
            "before it. Expected a message of another role"
        )

    try:
        json.dumps([*messages, fields.get("tools")], ensure_ascii=False, default=str).encode()
    except (ValueError, TypeError, RecursionError) as error:  # a lone surrogate, a cycle
        raise ConfigError(f"{where}: no tokenizer takes these messages: {error}") from error

    tools = _tools(fields.get("tools"), where)
    if tools is None and any(message.get("tool_calls") for message in messages):
        raise ConfigError(
            f"{where}: messages call tools, and there is no 'tools': in a rollout the prompt tells "
            "the policy of its tools before it calls one. Expected a list of them in OpenAI's form"
        )
    if tools is not None:
        _check_called(messages, [tool["function"]["name"] for tool in tools], where)

    demonstration = Demonstration(messages, fields, where, tools)
    if not demonstration.num_turns:
        roles = ", ".join(message["role"] for message in messages) or "no messages"
        raise ConfigError(
            f"{where}: expected at least one message of the assistant to learn from, got {roles}"
        )

    return demonstration


def _check_called(messages: Sequence[Message], available: Sequence[str], where: str) -> None:
    """Raises ``ConfigError`` for a call of a tool that the prompt does not tell of."""
    for index, message in enumerate(messages):
        for call in message.get("tool_calls") or ():
            name = call.get("function", call)["name"]
            if name not in available:
                raise ConfigError(
                    f"{where}: messages[{index}]: tool_calls: expected a tool of 'tools' "
                    f"({', '.join(available)}), got {_shown(name)}"
                )


def _tools(value: Any, where: str) -> list[Mapping[str, Any]] | None:
    """The tools of an example; None: it has none."""
    if not value and (value is None or isinstance(value, list)):
        return None
    named = isinstance(value, list) and all(
        isinstance(tool, Mapping)
        and isinstance(tool.get("function"), Mapping)
        and isinstance(tool["function"].get("name"), str)
        for tool in value
    )
    if not named:
        form = '{"type": "function", "function": {"name": ...}}'
        raise ConfigError(f"{where}: tools: expected a list of {form}, got {_shown(value)}")

    return list(value)


def _shown(value: Any) -> str:
    """A value's type and text, truncated to a line."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
