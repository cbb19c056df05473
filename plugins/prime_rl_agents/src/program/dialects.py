# mypy: allow-subclassing-any, allow-untyped-decorators
"""The three APIs that a program may use, for a policy that is rendered to tokens.

    request as JSON -> typed messages -> (tokens, the engine) -> typed reply -> reply as JSON

``in_process.replies`` writes the replies, and recognizes those that a request restates.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

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
from program.seam import AnthropicDialect, ChatDialect, Dialect, Response, ResponsesDialect

if TYPE_CHECKING:
    from program.policy import PolicyClient

OWN_LIMIT = "program_max_tokens"
"""Key of a request here: the limit that the program has set."""

WITHOUT_EFFECT = frozenset(
    {
        *("response_format", "text", "output_config", "stop", "stop_sequences", "logit_bias"),
        *("logprobs", "top_logprobs", "thinking", "reasoning", "reasoning_effort"),
        *("temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty"),
    }
)
"""Keys of a request that have no effect, because they would change the distribution or the reply:
the env's ``sampling`` table decides. A rollout's record lists those that its program has set."""


class OfPolicy:
    """Part of a dialect that answers with the policy. One instance per rollout."""

    policy: PolicyClient

    def apply_overrides(self, body: Wire, model: str, sampling: Any) -> Wire:
        asked = [body[key] for key in LIMITS if isinstance(body.get(key), int)]
        self.policy.ignored |= WITHOUT_EFFECT & {k for k, v in body.items() if v is not None}
        changed: Wire = super().apply_overrides(body, model, sampling)  # type: ignore[misc]
        return changed | ({OWN_LIMIT: min(asked)} if asked else {})

    def parse_request(self, body: Wire) -> Any:
        """The typed request. Raises ``ValueError``, which the program gets as status 400."""
        if body.get("n") not in (None, 1):
            raise ValueError(f"n = {body['n']}: the policy gives one reply per request. Ask again.")
        request = super().parse_request(body)  # type: ignore[misc]
        check_text(request)
        tools = [tool for tool in request.tools or () if is_function(tool)]
        others = {tool.type for tool in request.tools or () if not is_function(tool)}
        self.policy.ignored |= {f"tools: {kind}" for kind in others}
        trace = self.policy.trace
        restated = [as_sent(plain(message), trace) for message in request.messages]
        return request.model_copy(update={"messages": restated, "tools": tools or None})

    def write(self, response: Response) -> Wire:
        """The reply in the form of this API."""
        raise NotImplementedError


class PolicyChat(ChatReplies, OfPolicy, ChatDialect):
    """``POST /v1/chat/completions``."""


class PolicyResponses(ResponsesReplies, OfPolicy, ResponsesDialect):
    """``POST /v1/responses``."""

    def apply_overrides(self, body: Wire, model: str, sampling: Any) -> Wire:
        earlier = body.get("previous_response_id")
        if earlier is not None:
            known = self.policy.conversations.items(earlier)
            body = body | {"input": [*known, *items_of(body.get("input"))]}
        return super().apply_overrides(body, model, sampling)

    def parse_request(self, body: Wire) -> Any:
        earlier = body.get("previous_response_id")
        if earlier is not None and earlier not in self.policy.conversations:
            raise ValueError(
                f"previous_response_id {earlier!r} is no reply of this rollout. Send the whole "
                "conversation as input."
            )
        return super().parse_request(body)


class PolicyMessages(MessagesReplies, OfPolicy, AnthropicDialect):
    """``POST /v1/messages``."""


KINDS: tuple[type[Any], ...] = (PolicyChat, PolicyResponses, PolicyMessages)


def for_policy(dialect: Dialect, policy: PolicyClient) -> Dialect:
    """The dialect that answers where verifiers would use ``dialect``."""
    kind = next(each for each in KINDS if issubclass(each, type(dialect)))
    made = kind()
    made.policy = policy
    return made


def for_frozen(dialect: Dialect, secret: str) -> Dialect:
    """``dialect`` for a model that is not trained: its own session, and the program's own
    sampling."""
    made = copy.copy(dialect)
    made.secret = lambda headers: secret
    made.apply_overrides = lambda body, model, sampling: body | {"model": model}
    return made


def items_of(given: Any) -> list[Wire]:
    """``input`` of the Responses API as a list."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    return list(given or ())
