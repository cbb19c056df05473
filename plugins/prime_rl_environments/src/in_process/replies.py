"""Replies of a policy in the three APIs that agents use, for harnesses and servers.

verifiers' dialects parse requests of all three, and its train client writes replies as Chat
Completions only. Here the reply gets the form of the request: ``Response`` of the Responses API or
``Message`` of the Messages API, whole or as server-sent events.

The next request restates the conversation. If it restates a reply as it was sent, its messages
equal those in the trace, and the turn extends the tokens of the last one. If not, it starts a new
branch. So whatever a wire format changes on the way is undone here: content in parts of text,
opaque items, the spelling of JSON arguments (``plain``, ``as_sent``).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from in_process.seam import AssistantMessage, serialize_completion

if TYPE_CHECKING:
    from in_process.seam import Response

Wire = dict[str, Any]

LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
"""Keys with which the three APIs limit a reply."""


class ChatReplies:
    """Part of a dialect: replies as Chat Completions."""

    def write(self, response: Response) -> Wire:
        """``ChatCompletion``."""
        raw: Wire = serialize_completion(response, response.model)
        raw["id"] = name("chatcmpl")
        raw["created"] = int(time.time())
        return raw

    def stream_events(self, raw: Wire) -> list[bytes]:
        """The message as one chunk, and its end with the usage."""
        (choice,) = raw["choices"]
        delta = dict(choice["message"])
        if "tool_calls" in delta:
            delta["tool_calls"] = [
                call | {"index": index} for index, call in enumerate(delta["tool_calls"])
            ]
        head = {key: raw[key] for key in ("id", "created", "model")}
        head["object"] = "chat.completion.chunk"
        chunks = [
            {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
            {
                "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}],
                "usage": raw["usage"],
            },
        ]
        events = [f"data: {json.dumps(head | chunk)}\n\n".encode() for chunk in chunks]
        return [*events, b"data: [DONE]\n\n"]


class ResponsesReplies:
    """Part of a dialect: replies in the Responses API."""

    def write(self, response: Response) -> Wire:
        """``Response``."""
        return response_object(response)

    def stream_events(self, raw: Wire) -> list[bytes]:
        """Server-sent events, numbered."""
        return [server_event(kind, event) for kind, event in response_events(raw)]


class MessagesReplies:
    """Part of a dialect: replies in the Messages API."""

    def write(self, response: Response) -> Wire:
        """``Message``."""
        return message_object(response)

    def stream_events(self, raw: Wire) -> list[bytes]:
        """Server-sent events."""
        return [server_event(kind, event) for kind, event in message_events(raw)]


# -- requests ------------------------------------------------------------------------------------


def check_text(request: Any) -> None:
    """Raises ``ValueError`` for half a character (a lone surrogate), which no tokenizer takes."""
    try:
        request.model_dump_json()
    except ValueError as error:
        raise ValueError(f"a text of the request is no Unicode: {error}") from error


def plain(message: Any) -> Any:
    """The message with its text as a string, and without items that only a provider can read."""
    content = message.content
    if isinstance(content, list) and all(part.type == "text" for part in content):
        message = message.model_copy(update={"content": "".join(part.text for part in content)})
    if isinstance(message, AssistantMessage) and message.provider_state:
        message = message.model_copy(update={"provider_state": None})
    return message


def as_sent(message: Any, trace: Any) -> Any:
    """The message in the trace, if ``message`` restates it in a form that its API has changed: a
    table of arguments has lost the model's own spelling."""
    if not isinstance(message, AssistantMessage) or not message.tool_calls:
        return message
    call = message.tool_calls[0].id
    for node in reversed(trace.nodes):
        sent = node.message
        calls = node.sampled and sent.tool_calls
        if calls and calls[0].id == call and is_same(sent, message):
            return sent
    return message


def is_same(sent: Any, restated: Any) -> bool:
    """Whether two replies have the same texts, and calls with the same arguments."""
    texts = (sent.content or "", sent.reasoning_content or "")
    if texts != (restated.content or "", restated.reasoning_content or ""):
        return False
    calls = [(call.id, call.name, arguments_of(call)) for call in sent.tool_calls or ()]
    return calls == [(c.id, c.name, arguments_of(c)) for c in restated.tool_calls or ()]


def is_function(tool: Any) -> bool:
    """Whether it is a tool that a chat template can show. Others run at a provider (a web search),
    or are called in a form of their own."""
    return tool.type == "function" and not tool.namespace


def arguments_of(call: Any) -> Wire:
    """A call's arguments as a table. Text that is none is its only value."""
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = call.arguments
    return arguments if isinstance(arguments, dict) else {"arguments": call.arguments}


# -- replies -------------------------------------------------------------------------------------


def name_calls(message: Any) -> None:
    """Give each call an id of its own. Where the model wrote none, verifiers counts them within a
    turn, and programs look calls up by id in the whole conversation."""
    for place, call in enumerate(message.tool_calls or ()):
        if call.id == f"call_{place}":
            call.id = name("call")


def name(kind: str) -> str:
    return f"{kind}_{uuid4().hex}"


def response_object(response: Response) -> Wire:
    """``Response`` of the Responses API, all fields that its clients require."""
    message = response.message
    output: list[Wire] = []
    if message.reasoning_content:
        summary = [{"type": "summary_text", "text": message.reasoning_content}]
        output.append({"type": "reasoning", "id": name("rs"), "summary": summary})
    if message.content or not message.tool_calls:
        text: Wire = {"type": "output_text", "text": message.content or "", "annotations": []}
        output.append(
            {
                "type": "message",
                "id": name("msg"),
                "role": "assistant",
                "status": "completed",
                "content": [text | {"logprobs": []}],
            }
        )
    output += [
        {
            "type": "function_call",
            "id": name("fc"),
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }
        for call in message.tool_calls or ()
    ]
    is_cut = response.finish_reason == "length"
    return {
        "id": name("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if is_cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": None,
        "metadata": {},
        "model": response.model,
        "output": output,
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": {
            "input_tokens": response.usage.input_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": response.usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": response.usage.total_tokens,
        },
    }


STOPS = {"length": "max_tokens", "tool_calls": "tool_use"}
"""``stop_reason`` of the Messages API. Others: ``end_turn``."""


def message_object(response: Response) -> Wire:
    """``Message`` of the Messages API."""
    message = response.message
    content: list[Wire] = []
    if message.reasoning_content:
        thought = message.reasoning_content
        content.append({"type": "thinking", "thinking": thought, "signature": ""})
    if message.content or not message.tool_calls:
        content.append({"type": "text", "text": message.content or ""})
    content += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments_of(call)}
        for call in message.tool_calls or ()
    ]
    return {
        "id": name("msg"),
        "type": "message",
        "role": "assistant",
        "model": response.model,
        "content": content,
        "stop_reason": STOPS.get(response.finish_reason or "", "end_turn"),
        "stop_sequence": None,
        "usage": {
            "input_tokens": response.usage.input_tokens,
            "output_tokens": response.usage.completion_tokens,
        },
    }


# -- streams -------------------------------------------------------------------------------------


def server_event(kind: str, payload: Mapping[str, Any]) -> bytes:
    return f"event: {kind}\ndata: {json.dumps(payload)}\n\n".encode()


def response_events(raw: Wire) -> Iterator[tuple[str, Wire]]:
    """The events of a reply of the Responses API, numbered."""
    for number, (kind, event) in enumerate(_response_events(raw)):
        yield kind, {"type": kind, "sequence_number": number} | event


def _response_events(raw: Wire) -> Iterator[tuple[str, Wire]]:
    begun = raw | {"status": "in_progress", "output": [], "usage": None}
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    for index, item in enumerate(raw["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        empty = item | {"message": {"content": []}, "function_call": {"arguments": ""}}.get(
            item["type"], {"summary": []}
        )
        yield "response.output_item.added", {"output_index": index, "item": empty}
        yield from _item_events(item, place)
        yield "response.output_item.done", {"output_index": index, "item": item}

    yield f"response.{raw['status']}", {"response": raw}


def _item_events(item: Wire, place: Wire) -> Iterable[tuple[str, Wire]]:
    """What stands between the beginning and the end of an item."""
    if item["type"] == "function_call":
        text = item["arguments"]
        yield "response.function_call_arguments.delta", place | {"delta": text}
        done = {"arguments": text, "name": item["name"]}
        yield "response.function_call_arguments.done", place | done
    elif item["type"] == "reasoning":
        part = item["summary"][0]
        place = place | {"summary_index": 0}
        empty = part | {"text": ""}
        yield "response.reasoning_summary_part.added", place | {"part": empty}
        yield "response.reasoning_summary_text.delta", place | {"delta": part["text"]}
        yield "response.reasoning_summary_text.done", place | {"text": part["text"]}
        yield "response.reasoning_summary_part.done", place | {"part": part}
    else:
        part = item["content"][0]
        place = place | {"content_index": 0}
        logprobs: Wire = {"logprobs": []}
        yield "response.content_part.added", place | {"part": part | {"text": ""}}
        yield "response.output_text.delta", place | {"delta": part["text"]} | logprobs
        yield "response.output_text.done", place | {"text": part["text"]} | logprobs
        yield "response.content_part.done", place | {"part": part}


EMPTY_BLOCKS: dict[str, Wire] = {
    "text": {"text": ""},
    "thinking": {"thinking": "", "signature": ""},
    "tool_use": {"input": {}},
}
"""How a block of each type begins."""


def message_events(raw: Wire) -> Iterator[tuple[str, Wire]]:
    """The events of a reply of the Messages API."""
    begun = raw | {"content": [], "stop_reason": None}
    begun["usage"] = raw["usage"] | {"output_tokens": 0}
    yield "message_start", {"type": "message_start", "message": begun}
    for index, block in enumerate(raw["content"]):
        place = {"index": index}
        empty = block | EMPTY_BLOCKS[block["type"]]
        start = {"type": "content_block_start", "content_block": empty}
        yield "content_block_start", start | place
        change = {"type": "content_block_delta", "delta": _delta(block)}
        yield "content_block_delta", change | place
        yield "content_block_stop", {"type": "content_block_stop"} | place

    ending = {"stop_reason": raw["stop_reason"], "stop_sequence": None}
    yield "message_delta", {"type": "message_delta", "delta": ending, "usage": raw["usage"]}
    yield "message_stop", {"type": "message_stop"}


def _delta(block: Wire) -> Wire:
    if block["type"] == "tool_use":
        return {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
    kind = block["type"]
    return {"type": f"{kind}_delta", kind: block[kind]}
