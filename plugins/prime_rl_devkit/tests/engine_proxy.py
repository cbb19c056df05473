"""A proxy that stands before a sound engine and does one thing wrong."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from waiting import LIMIT

GENERATE = "/inference/v1/generate"


class Fault:
    """What goes wrong. As it stands, nothing."""

    def ask(self, path: str, body: Any, headers: dict[str, str]) -> Any:
        """The request's body on its way to the engine; ``Answer`` to keep it from there."""
        return body

    def tell(self, path: str, asked: Any, status: int, said: Any) -> tuple[int, Any]:
        """The answer on its way back. JSON, or text."""
        return status, said


class Answer(Exception):
    """The proxy's own answer."""

    def __init__(self, status: int, said: Any) -> None:
        super().__init__(status)
        self.status, self.said = status, said


class Proxy:
    """Listens on loopback, in a thread of this process."""

    def __init__(self, upstream: str) -> None:
        self.fault = Fault()
        self.upstream = upstream
        self.in_flight = 0
        routes = [Route("/{path:path}", self._pass, methods=["GET", "POST"])]
        config = uvicorn.Config(
            Starlette(routes=routes), port=0, lifespan="off", ws="none", log_level="error"
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        (socket,) = self._server.servers[0].sockets
        self.url = f"http://127.0.0.1:{socket.getsockname()[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(LIMIT)

    async def _pass(self, request: Request) -> Response:
        path, raw = request.url.path, await request.body()
        headers = {k: v for k, v in request.headers.items() if k == "authorization"}
        asked = _decoded(raw)
        self.in_flight += 1
        try:
            sent = self.fault.ask(path, asked, headers)
            content = raw if sent is None else _encoded(sent)
            async with httpx.AsyncClient(timeout=LIMIT, verify=False) as http:
                answer = await http.request(
                    request.method,
                    f"{self.upstream}{path}",
                    params=dict(request.query_params),
                    content=content,
                    headers=headers,
                )
            said = _decoded(answer.content)
            status, said = self.fault.tell(
                path, asked, answer.status_code, answer.text if said is None else said
            )
        except Answer as own:
            status, said = own.status, own.said
        finally:
            self.in_flight -= 1
        return Response(_encoded(said), status)


def _decoded(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return None


def _encoded(said: Any) -> bytes:
    if said is None:
        return b""
    return said.encode() if isinstance(said, str) else json.dumps(said).encode()


Body = dict[str, Any]


def asking(change: Callable[[Body], object]) -> type[Fault]:
    """Faults of generate requests: ``change`` writes into the body."""

    class Asking(Fault):
        def ask(self, path: str, body: Any, headers: dict[str, str]) -> Any:
            if path != GENERATE or not isinstance(body, dict):
                return body
            body = json.loads(json.dumps(body))
            change(body)
            return body

    return Asking


def telling(change: Callable[[Body, Body], object]) -> type[Fault]:
    """Faults of generate replies: ``change`` gets the request and writes into the reply."""

    class Telling(Fault):
        def tell(self, path: str, asked: Any, status: int, said: Any) -> tuple[int, Any]:
            if path == GENERATE and status == 200:
                change(asked, said)
            return status, said

    return Telling


def sampling(change: Callable[[Body], object]) -> type[Fault]:
    """Faults that misread the sampling parameters."""
    return asking(lambda body: change(body.get("sampling_params", {})))
