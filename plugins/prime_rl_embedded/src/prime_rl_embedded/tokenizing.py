"""From messages and text to tokens, with bounds: a client's text may be of any length and shape.

The functions here block for as long as their text is long, so they run in a thread (``Texts``).
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prime_rl_embedded.schema import Limits
from prime_rl_engine_kit.errors import RequestError
from prime_rl_engine_kit.requests import check_prompt

COMPOSED = 4
"""Most characters that one of Unicode's normal forms joins to one."""

_JOINING = {"NFC", "NFD", "NFKC", "NFKD"}
_KEEPING = {"ByteLevel", "Digits", "Metaspace"}
"""Parts of a tokenizer that remove no character."""


class Tokenizing:
    """The served model's tokenizer and chat template."""

    def __init__(self, tokenizer: Any, path: Path, limits: Limits) -> None:
        self.tokenizer = tokenizer
        self.path = path
        self.limits = limits
        self._reserved = _reserved_names(tokenizer)
        self._most_characters = limits.max_model_len * most_characters_per_token(tokenizer)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        template_settings: Mapping[str, Any],
    ) -> list[int]:
        """The prompt's tokens. Raises ``RequestError``."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise RequestError(
                f"{self.path}: the tokenizer has no chat template; send text to "
                "/v1/completions or tokens to /inference/v1/generate"
            )

        self.check_template_settings(template_settings)
        plain = [plain_message(index, message) for index, message in enumerate(messages)]
        settings = {**template_settings, "tools": tools, "add_generation_prompt": True}
        # Only a fast tokenizer gives for the rendered text what it gives for the messages.
        fast = bool(self.tokenizer.is_fast)
        try:
            rendered = self.tokenizer.apply_chat_template(
                plain, tokenize=not fast, return_dict=False, **settings
            )
        except Exception as error:  # a template is a program and may raise anything
            raise RequestError(f"the chat template refused the messages: {error}") from error

        ids = self.text(rendered, special=False) if fast else list(rendered)
        check_prompt(ids, self.limits)
        return ids

    def text(self, text: str, *, special: bool) -> list[int]:
        """The tokens of a text. Raises ``RequestError``."""
        if len(text) > self._most_characters:
            raise RequestError(
                f"the prompt has {len(text)} characters, which are more than "
                f"{self.limits.max_model_len} tokens (max_model_len) can hold"
            )
        encoded = self.tokenizer(text, add_special_tokens=special, verbose=False)
        return list(encoded["input_ids"])

    def check_template_settings(self, settings: Mapping[str, Any]) -> None:
        """Only variables of the template. Raises ``RequestError`` for what would be another
        template, or an option of the tokenizer: either can take any time and memory."""
        refused = sorted(self._reserved & set(settings))
        if refused:
            raise RequestError(
                f"chat_template_kwargs: {', '.join(refused)} cannot be set by a request; it takes "
                "variables of the model's chat template only, such as enable_thinking"
            )


def plain_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as chat templates expect it, whose content is one text.

    - Parts of type ``text`` are joined; no content is the empty text.
    - Arguments of tool calls are objects, not JSON in a text. A text that is no object stays.
    - Other keys without a value are left out: templates ask whether a key is there.

    Raises ``RequestError`` for any other part or shape.
    """
    place = f"messages[{index}]"
    if not isinstance(message.get("role"), str):
        raise RequestError(f"{place}.role is {message.get('role')!r}; expected a text")
    plain = {key: value for key, value in message.items() if value is not None}
    plain["content"] = _content(place, message.get("content"))
    calls = plain.pop("tool_calls", None)
    if calls:
        if not isinstance(calls, list):
            raise RequestError(f"{place}.tool_calls: expected a list")
        plain["tool_calls"] = [_tool_call(place, call) for call in calls]

    return plain


def _content(place: str, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        kind = type(content).__name__
        raise RequestError(f"{place}.content is of type {kind}; expected a text or a list of parts")

    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            shown = part.get("type") if isinstance(part, dict) else part
            raise RequestError(f"{place}: a part of content is {shown!r}; this engine takes text")

    return "".join(part["text"] for part in content)


def _tool_call(place: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(
            f"{place}.tool_calls: expected objects with a function, which has a name and arguments"
        )
    plain = function | {"arguments": _arguments(function.get("arguments"))}
    return {**call, "function": plain}


def _arguments(arguments: Any) -> Any:
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments

    return parsed if isinstance(parsed, dict) else arguments


def _reserved_names(tokenizer: Any) -> set[str]:
    """What a request may not pass to ``apply_chat_template`` besides messages: its own parameters
    and the route's."""
    parameters = inspect.signature(tokenizer.apply_chat_template).parameters
    return {*parameters, "messages", "conversation", "self"} - {"documents", "kwargs"}


def most_characters_per_token(tokenizer: Any) -> float:
    """A bound for the characters that one token stands for; infinite if the tokenizer may drop
    characters, such as repeated spaces, or join any number of unknown ones."""
    if not tokenizer.is_fast:
        return math.inf
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    normalizers = _flat(parts["normalizer"], "normalizers")
    splitters = _flat(parts["pre_tokenizer"], "pretokenizers")
    model = parts["model"]
    bytes_only = any(part["type"] == "ByteLevel" for part in splitters)
    keeps_text = (
        model["type"] == "BPE"
        and (bytes_only or model.get("byte_fallback"))
        and all(map(_keeps_characters, [*normalizers, *splitters]))
        and not any(token["lstrip"] or token["rstrip"] for token in parts["added_tokens"])
    )
    if not keeps_text:
        return math.inf
    joining = any(part["type"] in _JOINING for part in normalizers)
    # A token of bytes is written with a character per byte, so with no fewer than it stands for.
    longest = max(map(len, tokenizer.get_vocab()), default=1)
    return longest * (COMPOSED if joining else 1)


def _flat(part: Mapping[str, Any] | None, key: str) -> list[Mapping[str, Any]]:
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [inner for each in part[key] for inner in _flat(each, key)]


def _keeps_characters(part: Mapping[str, Any]) -> bool:
    kind = part["type"]
    if kind == "Split":
        return bool(part["behavior"] != "Removed")
    if kind == "Replace":
        replaced = part["pattern"].get("String")
        return replaced is not None and len(part["content"]) >= len(replaced)
    return kind in _JOINING or kind in _KEEPING or kind == "Prepend"
