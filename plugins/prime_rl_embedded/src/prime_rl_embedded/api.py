"""The HTTP routes. Each one reads, validates, submits to the engine and answers."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from prime_rl_broadcast.group import backends
from prime_rl_embedded.admin import Admin
from prime_rl_embedded.answers import Texts
from prime_rl_embedded.batch import Batches
from prime_rl_embedded.chat import Chat
from prime_rl_embedded.completions import Completions
from prime_rl_embedded.frontend import complete
from prime_rl_embedded.generate import generate_response
from prime_rl_embedded.loop import EngineLoop
from prime_rl_embedded.metrics import render
from prime_rl_embedded.schema import Limits, generate_requests
from prime_rl_engine_kit.body import ClientGone, read_body
from prime_rl_engine_kit.errors import RequestError
from prime_rl_engine_kit.keys import Keys
from prime_rl_engine_kit.requests import GenerateBody, check_model, decode

log = logging.getLogger(__name__)
Endpoint = Callable[[HTTPRequest], Awaitable[Response]]


class Api:
    """The routes that clients use."""

    def __init__(self, engine: EngineLoop, limits: Limits, texts: Texts) -> None:
        self.engine = engine
        self.limits = limits
        self.texts = texts

    async def health(self, _: HTTPRequest) -> Response:
        if self.engine.closed is not None or not self.engine.alive:
            raise RequestError(self.engine.closed or "the engine's thread has ended", 503)
        scheduler = self.engine.scheduler
        receives = {"workers": 1, "backends": backends(scheduler.model.device.type == "cuda")}
        health = {"version": scheduler.version, "receives": receives, "pauses_itself": True}
        health["capacity"] = scheduler.num_slots
        return JSONResponse({"status": "ok", **health})

    async def models(self, http: HTTPRequest) -> Response:
        """The list, or the card of the model that the path names."""
        limits = self.limits
        asked = http.path_params.get("name")
        check_model(asked, limits)
        card = {"id": limits.model_name, "object": "model", "created": 0, "owned_by": "prime-rl"}
        card |= {"max_model_len": limits.max_model_len, "generate_batch": True}
        return JSONResponse(card if asked else {"object": "list", "data": [card]})

    async def metrics(self, _: HTTPRequest) -> Response:
        return PlainTextResponse(render(self.engine, self.limits.model_name))

    async def generate(self, http: HTTPRequest) -> Response:
        body = decode(await read_body(http, self.limits.max_body_bytes), GenerateBody)
        requests = generate_requests(body, self.limits)
        await complete(self.engine, http, requests)
        with_logprobs = body.sampling_params.logprobs is not None
        content = await self.texts.in_thread(
            generate_response, requests, self.limits.model_name, with_logprobs
        )
        return Response(content, media_type="application/json")


def guarded(endpoint: Endpoint) -> Endpoint:
    """Answer every failure as JSON with its reason."""

    async def run(http: HTTPRequest) -> Response:
        try:
            return await endpoint(http)
        except RequestError as error:
            return JSONResponse(error.body, status_code=error.status, headers=error.headers)
        except (ClientGone, ClientDisconnect):
            return Response(status_code=499)
        except Exception as error:
            log.exception("%s %s failed", http.method, http.url.path)
            failure = RequestError(f"{type(error).__name__}: {error}", 500)
            return JSONResponse(failure.body, status_code=500)

    return run


def keyed(endpoint: Endpoint, keys: Keys) -> Endpoint:
    """Require the sampling key, if the engine has one."""

    async def run(http: HTTPRequest) -> Response:
        keys.check_sampling(http.headers.get("authorization", ""))
        return await endpoint(http)

    return run


def make_app(
    engine: EngineLoop,
    limits: Limits,
    texts: Texts,
    keys: Keys,
    weights_roots: Sequence[Path] | None = None,
) -> Starlette:
    api = Api(engine, limits, texts)
    admin = Admin(engine, keys, weights_roots)
    chat = Chat(texts)
    text = Completions(texts)
    batches = Batches(engine, limits)
    routes: list[tuple[str, str, Endpoint]] = [
        ("GET", "/health", api.health),
        ("GET", "/v1/models", keyed(api.models, keys)),
        ("GET", "/v1/models/{name:path}", keyed(api.models, keys)),
        ("GET", "/metrics", api.metrics),
        ("POST", "/inference/v1/generate", keyed(api.generate, keys)),
        ("POST", "/inference/v1/generate_batch", keyed(batches.generate, keys)),
        ("POST", "/inference/v1/abort", keyed(batches.abort, keys)),
        ("POST", "/v1/chat/completions", keyed(chat.completions, keys)),
        ("POST", "/v1/completions", keyed(text.completions, keys)),
        ("POST", "/pause", admin.pause),
        ("POST", "/update_weights", admin.update_weights),
        ("POST", "/resume", admin.resume),
        ("POST", "/sleep", admin.sleep),
        ("POST", "/wake_up", admin.wake_up),
    ]
    return Starlette(
        routes=[Route(path, guarded(run), methods=[method]) for method, path, run in routes],
        exception_handlers={HTTPException: no_such_route},
    )


async def no_such_route(http: HTTPRequest, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    failure = RequestError(f"{http.method} {http.url.path}: no such route", status)
    return JSONResponse(failure.body, status_code=status)
