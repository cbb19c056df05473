"""The ASGI middleware before vLLM's application (``--middleware prime_rl_vllm.front.Front``).

    request -> [our route?] -> keys -> answer
                  | no
                  +-> keys -> [text route: salt the cache] -> vLLM

vLLM's routes for clients require the sampling key, if there is one. All others except ``OPEN``
require the admin key.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Match

from prime_rl_engine_kit.body import read_body
from prime_rl_engine_kit.errors import RequestError
from prime_rl_engine_kit.requests import decode
from prime_rl_vllm import state as shared
from prime_rl_vllm.admin import Admin
from prime_rl_vllm.generate import generate
from prime_rl_vllm.prefill import hand_over_prompts
from prime_rl_vllm.report import Metrics, report_forever
from prime_rl_vllm.state import State

log = logging.getLogger(__name__)
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Endpoint = Callable[[HTTPRequest], Awaitable[Response]]

POLL_SECONDS = 0.5
OPEN = {"/health", "/metrics", "/ping", "/version", "/load"}
"""Monitoring routes, which need no key."""
CLIENTS = ("/v1/", "/v2/", "/inference/", "/tokenize", "/detokenize", "/score", "/rerank")
"""Prefixes of the routes that clients use."""
SALTED = {
    *("/v1/chat/completions", "/v1/chat/completions/batch", "/v1/completions", "/v1/responses"),
    *("/v1/messages", "/v1/systemone", "/v1/decisions", "/generative_scoring", "/invocations"),
}
"""vLLM's routes with a cache_salt: all that generate text for a client. Not every version has each
(``tools/vllm_names.py``)."""


class Front:
    def __init__(self, app: Any) -> None:
        if shared.current is None:
            raise RuntimeError("prime_rl_vllm.front works only inside prime_rl_vllm.server")
        self.app = app
        self.state = shared.current
        admin = Admin(self.state)
        self._routes: dict[tuple[str, str], Endpoint] = {
            ("GET", "/health"): self._health,
            ("GET", "/v1/models"): self._models,
            ("POST", "/inference/v1/generate"): self._generate,
            ("POST", "/pause"): admin.pause,
            ("POST", "/resume"): admin.resume,
            ("POST", "/update_weights"): admin.update_weights,
            ("POST", "/sleep"): admin.sleep,
            ("POST", "/wake_up"): admin.wake_up,
        }

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, self._started(scope, receive), send)
        elif scope["type"] != "http":
            await self._served(scope, receive, send, refuse=_close_socket)
        else:
            await self._served(scope, receive, send, refuse=_answer)

    # -- requests ---------------------------------------------------------------------------

    async def _served(
        self, scope: Message, receive: Receive, send: Send, refuse: Callable[..., Awaitable[None]]
    ) -> None:
        """``_guarded``, until the engine is shut down (``State.release``)."""
        has_begun = False

        async def sent(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        task = asyncio.current_task()
        assert task is not None  # uvicorn has one for each request
        self.state.serving.add(task)
        try:
            await self._guarded(scope, receive, sent, refuse=refuse)
        except asyncio.CancelledError:
            if not self.state.ended:
                raise
            task.uncancel()
            # Of a reply that has begun, uvicorn closes the connection: the client sees no end.
            if not has_begun:
                await refuse(_gone(), scope, receive, send)
        finally:
            self.state.serving.discard(task)

    async def _guarded(
        self, scope: Message, receive: Receive, send: Send, refuse: Callable[..., Awaitable[None]]
    ) -> None:
        """Check keys, then call our route or vLLM's. Failures become answers where possible."""
        try:
            self._check_key(scope)
            if self.state.ended:
                raise _gone()
            endpoint = self._routes.get((scope.get("method", ""), scope["path"]))
            if endpoint is not None:
                response = await endpoint(HTTPRequest(scope, receive))
            elif scope.get("method") == "POST" and scope["path"] in SALTED:
                receive = await self._salted(scope, receive)
        except RequestError as error:
            return await refuse(error, scope, receive, send)
        except ClientDisconnect:
            return
        except Exception as error:
            log.exception("%s failed", scope["path"])
            failure = RequestError(f"{type(error).__name__}: {error}", 500)
            return await refuse(failure, scope, receive, send)

        if endpoint is not None:
            return await response(scope, receive, send)
        await self.app(scope, receive, send)

    def _check_key(self, scope: Message) -> None:
        path = scope["path"]
        method = scope.get("method", "GET")
        keys = self.state.keys
        headers = dict(scope["headers"])
        authorization = headers.get(b"authorization", b"").decode("latin-1")
        if method == "OPTIONS":
            return
        if (method, path) not in self._routes and not _is_route(scope):
            raise RequestError(f"{method} {path}: no such route", 404)
        if path.startswith(CLIENTS):
            keys.check_sampling(authorization)
        elif path not in OPEN:
            keys.check_admin(authorization)

    async def _salted(self, scope: Message, receive: Receive) -> Receive:
        """The same request with our salt in its body.

        What vLLM would read and this does not is refused: it would reach the cache without a salt.
        """
        data = await read_body(HTTPRequest(scope, receive))
        # The values stay as they are: to skip 64 MiB takes some hundredths of a second.
        body = decode(data, dict[str, msgspec.Raw])
        asked = decode(bytes(body.get("cache_salt", b"null")), object)
        if not isinstance(asked, str | None):
            raise RequestError(f"cache_salt is {asked!r:.80}; expected a text")
        body["cache_salt"] = msgspec.Raw(msgspec.json.encode(self.state.salt(asked)))
        data = msgspec.json.encode(body)
        headers = [pair for pair in scope["headers"] if pair[0] != b"content-length"]
        scope["headers"] = [*headers, (b"content-length", str(len(data)).encode())]
        return _replay(data, receive)

    async def _health(self, _: HTTPRequest) -> Response:
        try:
            for engine in self.state.engines:
                await engine.check_health()
        except Exception as error:  # any exception of vLLM means that the engine is dead
            raise RequestError(f"the engine has ended: {error}", 503) from error

        return JSONResponse(
            {
                "status": "ok",
                "version": self.state.version,
                "receives": self.state.receives,
                "pauses_itself": True,
                "capacity": self.state.capacity,
            }
        )

    async def _models(self, _: HTTPRequest) -> Response:
        card = {
            "id": self.state.model_name,
            "object": "model",
            "created": 0,
            "owned_by": "prime-rl",
        }
        length = {"max_model_len": self.state.max_model_len}
        return JSONResponse({"object": "list", "data": [card | length]})

    async def _generate(self, http: HTTPRequest) -> Response:
        return await generate(self.state, http)

    # -- start ------------------------------------------------------------------------------

    def _started(self, scope: Message, receive: Receive) -> Receive:
        """Prepare the engine before the application starts."""

        async def inner() -> Message:
            message = await receive()
            if message["type"] == "lifespan.startup":
                try:
                    await _prepare(self.state, scope["app"].state.engine_client)
                except Exception as error:
                    # uvicorn takes it for an application without a start, and would go on.
                    log.exception("the server cannot be prepared, so it ends")
                    self.state.end(f"the server cannot be prepared: {error}")
                    raise
            return message

        return inner


async def _prepare(state: State, engine: Any) -> None:
    from prometheus_client import REGISTRY

    state.engine = engine
    of_run = state.weights_roots is not None
    for number, each in enumerate(state.engines):
        first = number * state.num_workers
        for problem in await state.ask_workers_of(
            each, "prime_rl_remember", state.model_dir, first, of_run
        ):
            if problem is not None:
                raise RequestError(f"the model cannot be given new weights: {problem}")

    await engine.update_weight_version(str(state.version))
    _watch_the_end(state, engine)
    if state.serves_adapters:
        for each in state.engines:
            _add_adapter(state, each)
    if state.prefill:
        hand_over_prompts(state)
    state.watching = asyncio.create_task(_end_with_an_engine(state))
    REGISTRY.register(Metrics(state))
    state.reporting = asyncio.create_task(report_forever(state))


def _watch_the_end(state: State, engine: Any) -> None:
    """Record whether the engine was dead before its shutdown, which always sets ``errored``; after
    it, end the requests in flight."""
    inner = engine.shutdown
    loop = asyncio.get_running_loop()

    def shutdown(*args: Any, **kwargs: Any) -> None:
        state.died = state.died if state.ending else bool(engine.errored)
        state.ending = True
        inner(*args, **kwargs)
        loop.call_soon_threadsafe(state.release)  # vLLM may call this on another thread

    engine.shutdown = shutdown


async def _end_with_an_engine(state: State) -> None:
    """End the server when an engine has died: the run starts it again, with all engines. vLLM does
    so for the engine that samples alone, and waits for what is in flight, such as an update."""
    while not any(engine.errored for engine in state.engines):
        await asyncio.sleep(POLL_SECONDS)

    if not state.ending:  # an engine that is shut down counts as dead too
        dead = "the engine" if state.engine.errored else "a prefill engine"
        log.error("%s has died, so the server ends; the reason is above", dead)
        state.end(f"{dead} died; its log has the reason")


def _add_adapter(state: State, engine: Any) -> None:
    """Have every request use the adapter of the moment it starts."""
    inner = engine.generate

    def generate(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **(kwargs | {"lora_request": state.adapter}))

    engine.generate = generate


def _gone() -> RequestError:
    return RequestError(
        "the engine has ended, and its server ends with it: send the request again", 503
    )


def _is_route(scope: Message) -> bool:
    """Whether vLLM has this path, for any method."""
    return any(route.matches(scope)[0] is not Match.NONE for route in scope["app"].routes)


def _replay(data: bytes, receive: Receive) -> Receive:
    """Deliver a body that was already read, then the messages after it."""
    left = [{"type": "http.request", "body": data, "more_body": False}]

    async def inner() -> Message:
        return left.pop() if left else await receive()

    return inner


async def _answer(error: RequestError, scope: Message, receive: Receive, send: Send) -> None:
    answer = JSONResponse(error.body, status_code=error.status, headers=error.headers)
    await answer(scope, receive, send)


async def _close_socket(error: RequestError, scope: Message, receive: Receive, send: Send) -> None:
    await send({"type": "websocket.close", "code": 1008, "reason": str(error)[:120]})
