"""One turn of a rollout, as a function call instead of an HTTP request."""

from __future__ import annotations

import asyncio
import json
import weakref
from collections.abc import Mapping
from typing import Any

import verifiers.v1 as vf

from in_process.engine import FastTrainClient, recorded_versions
from in_process.seam import ChatDialect, TrainClient, server_of

DIALECT = ChatDialect()
PATH = "/v1/chat/completions"


class Refused(Exception):
    """verifiers refused the turn: a limit, a stop, or a failed model call. The message is its JSON
    reply."""


class DirectRequest(dict[Any, Any]):
    """The part of an aiohttp request that verifiers' handler reads. It is a dict, because the
    handler stores values in the request."""

    path = PATH

    def __init__(self, secret: str, body: Mapping[str, Any]) -> None:
        super().__init__()
        self.headers = {"Authorization": f"Bearer {secret}"}
        self._body = json.dumps(body).encode()

    async def read(self) -> bytes:
        return self._body


_runs: dict[int, list[str]] = {}
"""Trace ids of each live agent in the order they began, by the ``id()`` of the agent's context."""


def run_number(ctx: vf.ModelContext, trace: vf.Trace) -> int:
    """The number of runs that the agent began before this one in its episode. verifiers creates
    one context per agent and episode."""
    if id(ctx) not in _runs:
        _runs[id(ctx)] = []
        weakref.finalize(ctx, _runs.pop, id(ctx), None)
    runs = _runs[id(ctx)]
    if trace.id not in runs:
        runs.append(trace.id)
    return runs.index(trace.id)


class TurnDriver:
    """Runs the turns of one segment of one rollout."""

    def __init__(self, secret: str, trace: vf.Trace, ctx: vf.ModelContext) -> None:
        self.secret = secret
        self.trace = trace
        self.run = run_number(ctx, trace)
        server = server_of(secret)
        self.handler = server._handler_for(DIALECT)
        session = server.sessions[secret]
        if isinstance(session.client, TrainClient):
            session.client = FastTrainClient.of(session.client, server.stack)

    async def turn(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send one chat request. Returns the assistant's message as JSON. Raises ``Refused``."""
        agent, number = self.trace.agent.name, len(self.trace.calls)
        with recorded_versions(agent, number, self.run) as versions:
            # In a separate task, as in aiohttp: verifiers cancels the tasks of a session's handlers
            # when its rollout ends.
            response = await asyncio.create_task(self.handler(DirectRequest(self.secret, request)))
        if response.status != 200:
            raise Refused(response.text)
        if versions:
            node = str(self.trace.calls[-1].node)
            self.trace.info.setdefault("weight_versions", {})[node] = versions
        reply: dict[str, Any] = json.loads(response.body)["choices"][0]["message"]
        return reply
