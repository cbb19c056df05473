"""One turn of a rollout, as a function call instead of an HTTP request."""

from __future__ import annotations

import asyncio
import json
import time
import weakref
from collections.abc import Mapping
from typing import Any

import verifiers.v1 as vf

from in_process.client import FastTrainClient
from in_process.engine import recorded_versions
from in_process.seam import ChatDialect, RolloutError, TaskError, TrainClient, graph, server_of

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
        self.server = server_of(secret)
        self.session = self.server.sessions[secret]
        if isinstance(self.session.client, TrainClient):
            self.session.client = FastTrainClient.of(self.session.client, self.server.stack)
        session = self.session
        self.is_plain = (
            isinstance(session.client, FastTrainClient)
            and not session.network_policy.network_restricted
            and not (session.request_interceptors or session.request_stops)
            and not (session.response_interceptors or session.response_stops)
        )
        """Nothing may change a request or a reply, so a turn needs no copies of them as JSON."""

    async def turn(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send one chat request. Returns the assistant's message as JSON. Raises ``Refused``."""
        agent = self.trace.agent.name
        number = len(self.trace.calls)
        with recorded_versions(agent, number, self.run) as versions:
            reply = await (self._call(request) if self.is_plain else self._handle(request))
        if versions:
            node = str(self.trace.calls[-1].node)
            self.trace.info.setdefault("weight_versions", {})[node] = versions
        return reply

    async def _handle(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """By verifiers' handler. In a separate task, as in aiohttp: verifiers cancels the tasks of
        a session's handlers when its rollout ends."""
        handler = self.server._handler_for(DIALECT)
        response = await asyncio.create_task(handler(DirectRequest(self.secret, request)))
        if response.status != 200:
            raise Refused(response.text)
        reply: dict[str, Any] = json.loads(response.body)["choices"][0]["message"]
        return reply

    async def _call(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """What the handler does where nothing may change a request or a reply: limits and stops,
        the model call, the commit to the trace, the record of the call."""
        session = self.session
        trace = self.trace
        if session.stopped:
            raise refusal(f"rollout stopped: {trace.stop_condition}")
        body = DIALECT.apply_overrides(dict(request), session.ctx.model, session.ctx.sampling)
        try:
            asked = DIALECT.parse_request(body)
            turn = await self._open(asked)
        except ValueError as error:
            raise refusal(str(error)) from error

        session.error = failure = response = node = None
        started = time.time()
        try:
            response = await session.client.get_response(
                DIALECT, body, session.ctx.sampling, session_id=trace.id, turn=turn
            )
            if session.released:  # concluded while sampling
                raise refusal("rollout concluded")
            if session.stopped:
                raise refusal(f"rollout stopped: {trace.stop_condition}")
            node = turn.commit(response)
            session.consume_prepared(turn.tail)
        except Refused:
            raise
        except BaseException as error:
            failure = error
            if isinstance(error, RolloutError):
                session.error = error
            if not isinstance(error, Exception):
                raise
            raise refusal(str(error)) from error
        finally:
            if node is None:
                turn.abandon()
            self.server.record_call(
                session,
                DIALECT,
                body,
                started,
                node=node,
                finish_reason=response.finish_reason if response else None,
                usage=response.usage if response else None,
                error=failure,
            )

        message: dict[str, Any] = response.raw["choices"][0]["message"]
        return message

    async def _open(self, asked: Any) -> graph.PendingTurn:
        """The turn in the trace's graph, unless a limit or a stop of the task refuses it."""
        session = self.session
        trace = self.trace
        try:
            refused = await session.refused()
        except RolloutError as error:
            session.error = error
            raise refusal(str(error)) from error
        except Exception as error:
            text = f"model boundary hook failed: {type(error).__name__}: {error}"
            session.error = TaskError(text)
            raise refusal(text) from error

        if refused is not None:
            raise refusal(f"rollout stopped: {refused}")
        turn = graph.prepare_turn(trace, asked.messages, asked.tools)
        trace.preview(turn, turn.tail)
        if session.on_turn_input is not None:
            on_input = session.on_turn_input
            session.on_turn_input = None
            on_input()

        return turn


def refusal(text: str) -> Refused:
    """In the form of the handler's reply."""
    return Refused(json.dumps(DIALECT.error_body(text)))
