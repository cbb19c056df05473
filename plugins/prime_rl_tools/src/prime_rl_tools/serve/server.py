"""``prime-rl serve``: one engine alone, in the foreground.

    port -> [model process, if the model is made or fetched here] -> engine
    -> healthy -> what to do with it -> until Ctrl-C

The engine writes to this terminal. Whatever ends us ends it.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.console import Console

from prime_rl.errors import RunError
from prime_rl.plugins.engine import EngineLaunch
from prime_rl.plugins.manager import load_plugins
from prime_rl.run.children import Child, end, sigterm_is_ctrl_c, start, uninterrupted
from prime_rl.run.models import model_path
from prime_rl.run.resolve import build_engine
from prime_rl.rundir.launch import ADMIN_KEY, ENGINE_KEY, Launch
from prime_rl.rundir.status import read_status
from prime_rl_tools.serve.request import Request, choose_port, model_context, read_key

TICK_SECONDS = 0.1
ANYWHERE = ("0.0.0.0", "::")
"""Hosts that mean every address of this machine."""


@dataclass(frozen=True)
class Server:
    """The engine that is being started."""

    request: Request
    host: str
    port: int
    admin_key: str
    api_key: str

    @property
    def url(self) -> str:
        """Where clients on this machine find it; without ``/v1``."""
        host = "127.0.0.1" if self.host in ANYWHERE else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"


def serve(request: Request, console: Console) -> None:
    """Serve until interrupted. Raises ``KeyboardInterrupt`` then; ``ConfigError`` for a port that
    is taken, ``RunError`` when the model can't be made or the engine ends by itself."""
    inference = request.config.inference
    server = Server(
        request,
        host=inference.host,
        port=choose_port(inference.host, inference.port),
        admin_key=os.environ.get(ADMIN_KEY) or secrets.token_urlsafe(24),
        api_key=read_key(request.api_key_var),
    )
    path, to_make = model_path(request.config)
    with tempfile.TemporaryDirectory(prefix="prime-rl-serve-") as scratch, _children() as children:
        if to_make:
            children.append(_start_maker(request, path, Path(scratch)))
            _wait_for_model(children[0], request, Path(scratch), console)
        context = inference.max_model_len or model_context(Path(path))
        console.print(f"starting the {inference.engine} engine on {server.url}", highlight=False)
        children.append(_start_engine(server, Path(path), context))
        _wait_until_healthy(server, children[-1])
        console.print(describe(server, context), markup=False, highlight=False, soft_wrap=True)
        while True:
            _check_alive(children[-1])
            time.sleep(TICK_SECONDS)


# -- processes --------------------------------------------------------------------------


@contextmanager
def _children() -> Iterator[list[Child]]:
    """What is put into the list is ended on leaving, whatever happens."""
    children: list[Child] = []
    with sigterm_is_ctrl_c():
        try:
            yield children
        finally:
            with uninterrupted():
                end(children)


def _start_maker(request: Request, path: str, scratch: Path) -> Child:
    """The process that makes or fetches a run's model, with a run directory made for it."""
    for folder in ("configs", "status"):
        (scratch / folder).mkdir()
    (scratch / "configs" / "run.json").write_text(request.config.model_dump_json())
    Launch(
        model_path=path,
        served_model_name=request.served_model_name,
        engine_urls=[],
        transport_type="zmq",
        transport_host="",
        transport_ports=[],
    ).write(scratch)
    return start("model", [sys.executable, "-m", "prime_rl.run.models", str(scratch)], {})


def _wait_for_model(child: Child, request: Request, scratch: Path, console: Console) -> None:
    name = request.config.model.name
    console.print(f"{name} is not in the cache yet: making or fetching it", markup=False)
    with console.status(name) as line:
        while child.exit_code is None:
            if report := read_status(scratch / "status" / "model.json"):
                share = "" if report.progress is None else f" {report.progress:.0%}"
                line.update(f"{report.state}{share}")
            time.sleep(TICK_SECONDS)
    if child.exit_code:
        raise RunError(f"the model {name} could not be made or fetched: see above")


def _start_engine(server: Server, path: Path, context: int) -> Child:
    config = server.request.config
    launch = EngineLaunch(
        model_path=path,
        served_model_name=server.request.served_model_name,
        host=server.host,
        port=server.port,
        max_model_len=context,
        seed=config.seed,
        admin_key=server.admin_key,
        python=config.inference.interpreter,
    )
    command = build_engine(config, load_plugins()).command(launch)
    env = {ADMIN_KEY: server.admin_key, ENGINE_KEY: server.api_key, "HF_HUB_OFFLINE": "1"}
    return start(config.inference.engine, command.argv, env | dict(command.env))


def _wait_until_healthy(server: Server, engine: Child) -> None:
    limit = server.request.config.inference.ready_timeout
    deadline = time.monotonic() + limit
    # Plain HTTP to ourselves: no proxy, and no SSL context, which costs 70 ms.
    with httpx.Client(base_url=server.url, verify=False, trust_env=False) as http:
        while not _healthy(http, server):
            _check_alive(engine)
            if time.monotonic() > deadline:
                raise RunError(
                    f"the engine is not healthy after {limit:.0f} s (--inference.ready_timeout)"
                )
            time.sleep(TICK_SECONDS)
        if server.api_key and http.get("/v1/models").is_success:
            raise RunError(
                f"--api-key-var: the engine {engine.name!r} answers without the key it was given"
            )


def _healthy(http: httpx.Client, server: Server) -> bool:
    headers = {"Authorization": f"Bearer {server.api_key or server.admin_key}"}
    with suppress(httpx.TransportError):
        answers = (http.get("/health"), http.get("/v1/models", headers=headers))
        return all(answer.is_success for answer in answers)
    return False


def _check_alive(engine: Child) -> None:
    code = engine.exit_code
    if code is not None:
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        raise RunError(f"the engine {engine.name!r} {how}: see above")


# -- what the user sees -----------------------------------------------------------------


def describe(server: Server, context: int) -> str:
    """Where it is, what it is, and how a run uses it."""
    request = server.request
    key = request.api_key_var
    frozen = [
        f"    name = {json.dumps(request.served_model_name)}",
        f"    base_url = [{json.dumps(f'{server.url}/v1')}]",
        *([f"    api_key_var = {json.dumps(key)}"] if key else []),
    ]
    notes = []
    if request.show_admin_key:
        notes.append(f"admin    {ADMIN_KEY}={server.admin_key}")
    if server.host not in ("127.0.0.1", "localhost", "::1") and not key:
        notes.append("warning: listens beyond this machine and needs no key (--api-key-var)")
    lines = [
        "",
        f"url      {server.url}/v1",
        f"model    {request.served_model_name}",
        f"context  {context:,} tokens",
        *notes,
        "",
        "To use it in a run as a frozen model, a teacher say ([orchestrator.algo.teacher]):",
        "",
        *frozen,
        "",
        "ready; Ctrl-C ends it",
    ]
    return "\n".join(lines)
