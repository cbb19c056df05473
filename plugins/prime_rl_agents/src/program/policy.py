# mypy: allow-subclassing-any
"""The policy as one rollout's program sees it: verifiers' train client behind three APIs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from in_process.client import FastTrainClient
from in_process.engine import Span, recorded_versions
from in_process.replies import Wire, name_calls, plain
from in_process.turns import run_number
from program.dialects import OWN_LIMIT, OfPolicy, PolicyResponses, items_of
from program.seam import ChatDialect, Client, Response, message_to_wire, tool_to_wire

CHAT = ChatDialect()


@dataclass(frozen=True, eq=False, slots=True)
class Said:
    """One item of a conversation, and those before it."""

    item: Wire
    before: Said | None


class Conversations:
    """Conversations of the Responses API in one rollout, by the id of the reply that ends each.

    Most clients send the whole conversation with each request. What two conversations begin with
    is kept once.
    """

    def __init__(self) -> None:
        self._ends: dict[str, Said | None] = {}
        self._after: dict[Said | None, list[Said]] = {}
        """What has followed each item; None: what conversations have begun with."""

    def add(self, reply_id: str, items: Iterable[Wire]) -> None:
        """``items``: the conversation, the reply included."""
        end = None
        for item in items:
            known = self._after.setdefault(end, [])
            same = next((said for said in known if said.item == item), None)
            if same is None:
                same = Said(item, end)
                known.append(same)
            end = same
        self._ends[reply_id] = end

    def __contains__(self, reply_id: str) -> bool:
        return reply_id in self._ends

    def items(self, reply_id: str) -> list[Wire]:
        """The conversation that the reply ends. Empty if there is no such reply."""
        items = []
        said = self._ends.get(reply_id)
        while said is not None:
            items.append(said.item)
            said = said.before
        return items[::-1]


class PolicyClient(Client):
    """One per rollout. ``inner`` renders, asks the engine and is shared by all rollouts."""

    def __init__(self, inner: FastTrainClient, trace: Any, ctx: Any) -> None:
        self.inner = inner
        self.trace = trace
        self.run = run_number(ctx, trace)
        self.numbers = itertools.count()
        self.ignored: set[str] = set()
        """Settings of requests that had no effect."""
        self.conversations = Conversations()
        self._spans: list[tuple[Any, list[Span]]] = []

    async def get_response(
        self,
        dialect: Any,
        body: Wire,
        sampling: Any,
        session_id: str | None = None,
        turn: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """One reply of the policy, ``raw`` in the form of ``dialect``. Raises ``ProviderError``."""
        limits = [limit for limit in (sampling.max_tokens, body.get(OWN_LIMIT)) if limit]
        if limits:
            sampling = sampling.model_copy(update={"max_tokens": min(limits)})
        agent = self.trace.agent.name
        with recorded_versions(agent, next(self.numbers), self.run) as spans:
            response = await self.inner.get_response(
                CHAT, body, sampling, session_id, turn, headers
            )

        self._spans.append((response.message, spans))
        name_calls(response.message)
        if isinstance(dialect, OfPolicy):
            response.raw = dialect.write(response)
        if isinstance(dialect, PolicyResponses):
            asked = items_of(body.get("input"))
            self.conversations.add(response.raw["id"], [*asked, *response.raw["output"]])
        return response

    async def relay_aux(
        self, dialect: Any, route: str, body: Wire, headers: Mapping[str, str] | None = None
    ) -> Wire:
        """``count_tokens`` of the Messages API: tokens of the rendered prompt."""
        request = dialect.parse_request(body)
        slot = await self.inner._slot(body["model"])
        tools = [tool_to_wire(tool) for tool in request.tools or ()] or None
        messages = [message_to_wire(plain(message)) for message in request.messages]
        ids = await slot.run(
            lambda: slot.renderer.render_ids(messages, tools=tools, add_generation_prompt=True)
        )
        return {"input_tokens": len(ids)}

    def weight_versions(self) -> dict[str, list[Span]]:
        """The policy versions of each reply's tokens, by its place in the trace."""
        places = {id(node.message): place for place, node in enumerate(self.trace.nodes)}
        return {
            str(places[id(message)]): spans
            for message, spans in self._spans
            if spans and id(message) in places
        }
