# mypy: allow-subclassing-any
"""The routes of OpenAI and Anthropic for one session.

verifiers reads all three formats. ``in_process.replies`` writes the replies, and recognizes those
that a request restates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verifiers.v1.dialects.anthropic import AnthropicDialect
from verifiers.v1.dialects.chat import ChatDialect
from verifiers.v1.dialects.responses import ResponsesDialect
from verifiers.v1.types import Request, Response

from in_process.replies import (
    LIMITS,
    ChatReplies,
    MessagesReplies,
    ResponsesReplies,
    Wire,
    as_sent,
    check_text,
    is_function,
    plain,
)

UNSERVED = ("previous_response_id", "conversation", "background")
"""What would need a memory of the server."""


def check_body(body: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` for what no reply can be given to."""
    if body.get("n") not in (None, 1):
        raise ValueError(f"n: got {body['n']!r}, expected 1. Open a session for each sample.")
    for name in UNSERVED:
        if body.get(name):
            raise ValueError(f"{name}: replies are not stored here. Send the whole conversation.")
    token_limit(body)


def token_limit(body: Mapping[str, Any]) -> int | None:
    """The most tokens that the client takes. Raises ``ValueError``."""
    limits = []
    for name in LIMITS:
        limit = body.get(name)
        if limit is None:
            continue
        if type(limit) is not int or limit < 1:
            raise ValueError(f"{name}: got {limit!r}, expected a whole number from 1")
        limits.append(limit)
    return min(limits, default=None)


class SessionDialect:
    """What the three have in common."""

    def __init__(self, session_id: str, trace: Any) -> None:
        """``session_id``: the session that the request's path names, and its ``trace``."""
        super().__init__()
        self._session_id = session_id
        self._trace = trace

    def secret(self, headers: Mapping[str, str]) -> str:
        """The server has checked the key."""
        return self._session_id

    def parse_request(self, body: Wire) -> Request:
        """Raises ``ValueError``, which the client gets as status 400."""
        check_body(body)
        request: Request = super().parse_request(body)  # type: ignore[misc]
        check_text(request)
        others = [tool for tool in request.tools or () if not is_function(tool)]
        if others:
            raise ValueError(f"tools: got one of type {others[0].type!r}, expected functions only")
        messages = [as_sent(plain(message), self._trace) for message in request.messages]
        if not messages:
            raise ValueError("the request has no messages")
        if any(isinstance(message.content, list) for message in messages):
            raise ValueError("a message has an image or a file; this policy reads text only")
        return request.model_copy(update={"messages": messages})

    def write(self, response: Response) -> Wire:
        """The reply in this format."""
        raise NotImplementedError


class Chat(ChatReplies, SessionDialect, ChatDialect):
    """``POST chat/completions``."""


class Messages(MessagesReplies, SessionDialect, AnthropicDialect):
    """``POST messages``."""


class Responses(ResponsesReplies, SessionDialect, ResponsesDialect):
    """``POST responses``."""

    def apply_overrides(self, body: Wire, model: str, sampling: Any) -> Wire:
        """verifiers takes the limit away, which this client reads."""
        limits = {name: body[name] for name in LIMITS if name in body}
        changed: Wire = super().apply_overrides(body, model, sampling)
        return changed | limits
