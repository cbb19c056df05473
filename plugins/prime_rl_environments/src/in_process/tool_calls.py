# mypy: allow-subclassing-any
"""What the model wrote as a tool call, so that the harness can answer it.

A renderer's parser raises at JSON that nests too deep or has a number of too many digits, drops
calls that it cannot parse with their text, and hands on names that are no text. Each would cost the
rollout, or end it as if the model had said nothing. Here a call either has a name and arguments
that a tool can be called with, or its text stays in the reply and ``fault_of`` says what is wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from renderers.base import ParsedResponse, ParsedToolCall, ToolCallParseStatus

MOST_LEVELS = 64
"""Nested lists and tables in arguments: what hashes, renders or saves them is recursive."""

MALFORMED = "malformed_tool_calls"
"""Key of a reply in the OpenAI form: what is wrong with each call that could not be parsed."""


MARKER = re.compile(r"<[^<>\s]*tool[^<>\s]*>")
"""A token that begins or ends tool calls, as every family writes it: ``<tool_call>``, for example.
"""

TOO_DEEP = f"it nests deeper than {MOST_LEVELS} levels"


@dataclass
class UnreadableCall(ParsedToolCall):
    """A call that the parser of the renderer does not record."""

    reason: str = ""


def unreadable(raw: str, reason: str, span: tuple[int, int] | None = None) -> UnreadableCall:
    status = ToolCallParseStatus.INVALID_JSON
    return UnreadableCall(raw=raw, token_span=span, status=status, reason=readable(reason))


def keep_what_was_written(renderer: Any) -> None:
    """Replace the parser of a renderer, once."""
    parse = renderer.parse_response
    if not hasattr(parse, "keeps_text"):
        renderer.parse_response = keeping_text(parse, renderer)


def keeping_text(parse: Callable[..., ParsedResponse], renderer: Any) -> Callable[..., Any]:
    """``parse``, whose reply holds every call, as one that can be answered or as text."""

    def parse_response(token_ids: list[int], **options: Any) -> ParsedResponse:
        tokens = before_stop(token_ids, renderer.get_stop_token_ids())
        try:
            parsed = parse(token_ids, **options)
        except Exception as error:  # the model's text decides which
            text = decode(renderer, tokens)
            reason = f"{type(error).__name__}: {error}"
            if isinstance(error, RecursionError):
                reason = TOO_DEEP
            return ParsedResponse(content=text, tool_calls=[unreadable(text, reason)])

        calls = [answerable(call) for call in parsed.tool_calls]
        dropped = "" if calls else dropped_section(parsed, decode(renderer, tokens))
        if dropped:
            calls = [unreadable(dropped, "no call follows its first token")]
        texts = [text_of(call, tokens, renderer) for call in calls if not call.name]
        before = text_before_header(tokens, renderer)
        beside = texts_beside(parsed, tokens, renderer)
        content = "\n".join(filter(None, [before, parsed.content, *texts, *beside]))
        return replace(parsed, content=content, tool_calls=calls)

    parse_response.keeps_text = True  # type: ignore[attr-defined]
    return parse_response


def before_stop(token_ids: Sequence[int], stops: Sequence[int]) -> list[int]:
    """The tokens before the first stop token: the spans of calls count these."""
    end = next((place for place, token in enumerate(token_ids) if token in stops), len(token_ids))
    return list(token_ids[:end])


def dropped_section(parsed: ParsedResponse, text: str) -> str:
    """The end of ``text`` from a marker of tool calls on, if a parser that found no call there has
    dropped it; else an empty text."""
    kept = parsed.content or parsed.reasoning_content or ""
    if kept not in text:
        return ""
    rest = text[text.rindex(kept) + len(kept) :]
    marker = MARKER.search(rest)
    return "" if marker is None else rest[marker.start() :]


TAG = re.compile(r"<[^<>]*>")
"""Markers that begin or end a part of a reply, where a model writes them as text."""
HEADER = "<|end_header_id|>"
ROLE = re.compile(r"<\|start_header_id\|>\w*$")


def text_before_header(tokens: Sequence[int], renderer: Any) -> str:
    """The text that the model wrote before the end of a header. The parser of Llama 3 reads only
    what follows the header. Empty for the header of the reply itself, which has a role and nothing
    before it."""
    text = decode(renderer, tokens)
    if HEADER not in text:
        return ""
    known = renderer._tokenizer.convert_tokens_to_ids(HEADER)
    if known not in tokens:  # written as text, which no parser looks for
        return ""
    end = len(tokens) - 1 - [*reversed(tokens)].index(known)
    head = ROLE.sub("", decode(renderer, tokens[:end])).strip()
    return head


def texts_beside(parsed: ParsedResponse, tokens: Sequence[int], renderer: Any) -> list[str]:
    """The text in a section of calls that is no call, and the text after the last call, where the
    parser has dropped it."""
    spans = sorted(call.token_span for call in parsed.tool_calls if call.token_span is not None)
    if not spans or len(spans) < len(parsed.tool_calls):  # another call may be in such a text
        return []
    first, _ = spans[0]
    _, *sections = MARKER.split(decode(renderer, tokens[:first]))
    lead = sections[-1] if sections else ""  # what stands before a section is content
    ends = [end for _, end in spans]
    starts = [start for start, _ in spans[1:]] + [len(tokens)]
    gaps = [decode(renderer, tokens[end:start]) for end, start in zip(ends, starts, strict=True)]
    kept = "".join(f"{parsed.content or ''}{parsed.reasoning_content or ''}".split())
    texts = [TAG.sub("", text).strip() for text in (lead, *gaps)]
    return [text for text in texts if re.search(r"\w", text) and "".join(text.split()) not in kept]


def text_of(call: ParsedToolCall, tokens: Sequence[int], renderer: Any) -> str:
    """A call as the model wrote it, with its delimiters where the parser knows its place."""
    if call.token_span is None:
        return str(call.raw)
    start, end = call.token_span
    return decode(renderer, tokens[start:end])


def decode(renderer: Any, tokens: Sequence[int]) -> str:
    return str(renderer._tokenizer.decode(list(tokens), skip_special_tokens=False))


def answerable(call: ParsedToolCall) -> ParsedToolCall:
    """The call with a name that is text, and arguments that can be saved. One without a name has
    not been understood."""
    unknown_tool = call.status == ToolCallParseStatus.UNKNOWN_TOOL
    if not call.name or not (unknown_tool or call.status == ToolCallParseStatus.OK):
        return call if isinstance(call.name, str) else replace(call, name=None)
    if levels_of(call.arguments) > MOST_LEVELS or levels_of(call.name) > MOST_LEVELS:
        return unreadable(call.raw, TOO_DEEP, call.token_span)

    name: Any = call.name
    arguments: Any = call.arguments
    if isinstance(arguments, str):
        arguments = readable(arguments)
    elif "\\ud" in json.dumps(arguments):  # as text: renderers hands it on as it is
        arguments = readable(json.dumps(arguments, ensure_ascii=False))

    return replace(
        call,
        name=readable(name if isinstance(name, str) else json.dumps(name)),
        arguments=arguments,
        status=ToolCallParseStatus.OK,  # the harness answers that there is no such tool
    )


def levels_of(value: Any) -> int:
    """How deep lists and tables nest. Without recursion: that is what may not be."""
    levels = 0
    layer = [value]
    while layer and levels <= MOST_LEVELS:
        inner: list[Any] = []
        for each in layer:
            if isinstance(each, dict):
                inner += each.values()
            elif isinstance(each, list):
                inner += each
        levels += any(isinstance(each, dict | list) for each in layer)
        layer = inner

    return levels


def readable(text: Any) -> str:
    """The text without lone surrogates, which no tokenizer takes. ``text`` may be an error of a
    tool, and making its text may fail."""
    try:
        return str(text).encode("utf-8", "replace").decode()
    except Exception as error:
        return f"its text cannot be made: {type(error).__name__}"


def fault_of(call: ParsedToolCall) -> str:
    """What is wrong with a call that could not be parsed, for the model."""
    if call.status == ToolCallParseStatus.UNCLOSED_BLOCK:
        return "it has no end"
    if call.status == ToolCallParseStatus.MISSING_NAME:
        return "it names no tool"
    if isinstance(call, UnreadableCall):
        return call.reason
    try:
        json.loads(call.raw)
    except ValueError as error:
        return f"it is not valid JSON: {readable(str(error))}"
    except RecursionError:
        return TOO_DEEP

    return "it cannot be read"
