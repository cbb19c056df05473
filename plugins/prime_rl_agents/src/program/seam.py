"""The private names of verifiers that we use beyond those of ``in_process.seam``, and the one
method that we wrap.

``InterceptionServer.handle_request`` serves one model call. It imposes the policy's name on every
request and lets its train client answer Chat Completions only. For the rollouts of this harness the
wrapper hands it another dialect: of the policy, in the API of the request, or of a frozen model
that the request names. Other rollouts are served as before.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from in_process.seam import InterceptionServer as InterceptionServer
from in_process.seam import RolloutSession as RolloutSession
from in_process.seam import TrainClient as TrainClient
from in_process.seam import message_to_wire as message_to_wire
from in_process.seam import server_of as server_of
from in_process.seam import tool_to_wire as tool_to_wire
from prime_rl import PluginError

try:
    from verifiers.v1.clients.client import Client as Client
    from verifiers.v1.dialects import AnthropicDialect as AnthropicDialect
    from verifiers.v1.dialects import ChatDialect as ChatDialect
    from verifiers.v1.dialects import Dialect as Dialect
    from verifiers.v1.dialects import ResponsesDialect as ResponsesDialect
    from verifiers.v1.errors import HarnessError as HarnessError
    from verifiers.v1.trace import Reward as Reward
    from verifiers.v1.types import AssistantMessage as AssistantMessage
    from verifiers.v1.types import Response as Response
except ImportError as error:
    raise PluginError(
        f"harness program: verifiers lacks a name that it uses ({error}). Reinstall verifiers."
    ) from error

Choose = Callable[[Any, str | None], Any]
"""From a dialect and the model's name in a request to the dialect that answers."""

_choosing: dict[str, Choose] = {}
"""The choice for each live rollout of this harness, by the rollout's secret."""


def serve(secret: str, choose: Choose) -> None:
    """From now on ``choose`` says how the requests of the rollout are answered."""
    _choosing[secret] = choose


def forget(secret: str) -> None:
    _choosing.pop(secret, None)


def _wrap() -> None:
    original: Callable[..., Awaitable[Any]] = InterceptionServer.handle_request
    if getattr(original, "asks_programs", False):
        return

    @functools.wraps(original)
    async def handle_request(self: Any, request: Any, dialect: Any) -> Any:
        choose = _choosing.get(dialect.secret(request.headers))
        if choose is not None:
            try:
                model = model_of(await request.read())
            except ValueError as error:
                return web.json_response(dialect.error_body(str(error)), status=400)
            dialect = choose(dialect, model)
        return await original(self, request, dialect)

    handle_request.asks_programs = True  # type: ignore[attr-defined]
    InterceptionServer.handle_request = handle_request


def model_of(body: bytes) -> str | None:
    """The model that a request names. Raises ``ValueError`` for what is no JSON object."""
    try:
        body_json = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the body is not JSON: {error}") from error
    if not isinstance(body_json, dict):
        raise ValueError(f"the body is {type(body_json).__name__}, expected a JSON object")
    model = body_json.get("model")
    return model if isinstance(model, str) else None


_wrap()
