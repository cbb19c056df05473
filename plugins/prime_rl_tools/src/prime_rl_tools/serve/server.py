"""Engines without a run: ``prime-rl serve`` has one in the foreground, ``prime-rl chat`` two.

    port -> [model process, if the model is made or fetched here] -> engine
    -> healthy -> print how to use it -> wait for Ctrl-C

Engines end with this process.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.console import Console

from prime_rl import EngineLaunch
from prime_rl.errors import RunError
from prime_rl.plugins.status import read_status
from prime_rl.registry.manager import load_plugins
from prime_rl.rundir.launch import ADMIN_KEY, ENGINE_KEY, Launch
from prime_rl.rundir.scratch import Scratch
from prime_rl_app.children import Child, end, sigterm_is_ctrl_c, start, uninterrupted
from prime_rl_app.models import model_path
from prime_rl_tools.serve.request import build_engine, choose_port, model_context, read_key
from prime_rl_tools.serve.settings import ServeSettings

TICK_SECONDS = 0.1
ANYWHERE = ("0.0.0.0", "::")
"""Hosts that mean every address of this machine."""


@dataclass(frozen=True)
class Server:
    """The engine that is being started."""

    settings: ServeSettings
    port: int
    admin_key: str
    api_key: str

    @property
    def url(self) -> str:
        """The URL for clients on this machine, without ``/v1``."""
        host = "127.0.0.1" if self.settings.host in ANYWHERE else self.settings.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"


def serve(settings: ServeSettings, console: Console) -> None:
    """Serve until interrupted, then raise ``KeyboardInterrupt``. Raises ``ConfigError`` if the port
    is taken, ``RunError`` if the model can't be made or the engine ends by itself."""
    server = make_server(settings)
    path, to_make = model_path(settings, load_plugins(disabled=settings.plugins.disabled))
    with (
        Scratch("prime-rl-serve-") as scratch,
        ended_together() as children,
    ):
        if to_make:
            children.append(_start_maker(settings, path, scratch.path))
            _wait_for_model(children[0], settings.model.name, scratch=scratch.path, console=console)

        context = settings.max_model_len or model_context(Path(path))
        console.print(f"starting the {settings.engine} engine on {server.url}", highlight=False)
        children.append(start_engine(server, Path(path), context))
        wait_until_healthy(server, children[-1])
        console.print(describe(server, context), markup=False, highlight=False, soft_wrap=True)
        while True:
            _check_alive(children[-1])
            time.sleep(TICK_SECONDS)


def make_server(settings: ServeSettings) -> Server:
    """An engine's port and keys. Raises ``ConfigError`` if the port is taken."""
    return Server(
        settings,
        port=choose_port(settings.host, settings.port),
        admin_key=os.environ.get(ADMIN_KEY) or secrets.token_urlsafe(24),
        api_key=read_key(settings.api_key_var),
    )


# -- processes --------------------------------------------------------------------------


@contextmanager
def ended_together() -> Iterator[list[Child]]:
    """Processes put into the list are ended on leaving."""
    children: list[Child] = []
    with sigterm_is_ctrl_c():
        try:
            yield children
        finally:
            with uninterrupted():
                end(children)


def _start_maker(settings: ServeSettings, path: str, scratch: Path) -> Child:
    """Start the model process of a run. ``scratch`` gets the files it reads of a run directory."""
    for folder in ("configs", "status"):
        (scratch / folder).mkdir()
    (scratch / "configs" / "run.json").write_text(settings.model_dump_json(), "utf-8")
    Launch(
        model_path=path,
        served_model_name=settings.served_name,
        engine_urls=[],
        transport_type="zmq",
        transport_host="",
        transport_ports=[],
    ).write(scratch)
    argv = [sys.executable, "-P", "-m", "prime_rl_app.models", str(scratch)]
    return start("model", argv, {}, inherits=None)  # with the hub's key


def _wait_for_model(child: Child, name: str, scratch: Path, console: Console) -> None:
    console.print(f"{name} is not in the cache yet: making or fetching it", markup=False)
    with console.status(name) as line:
        while child.exit_code is None:
            report = read_status(scratch / "status" / "model.json")
            if report:
                share = "" if report.progress is None else f" {report.progress:.0%}"
                line.update(f"{report.state}{share}")
            time.sleep(TICK_SECONDS)

    if child.exit_code:
        raise RunError(f"the model {name} could not be made or fetched: see above")


def start_engine(server: Server, path: Path, context: int, log: Path | None = None) -> Child:
    """Start the engine of the model folder ``path``. ``log`` gets its output; None: our stderr."""
    settings = server.settings
    launch = EngineLaunch(
        model_path=path,
        served_model_name=settings.served_name,
        host=settings.host,
        port=server.port,
        max_model_len=context,
        seed=settings.seed,
        admin_key=server.admin_key,
        python=settings.interpreter,
    )
    command = build_engine(settings).command(launch)
    env = {ADMIN_KEY: server.admin_key, ENGINE_KEY: server.api_key, "HF_HUB_OFFLINE": "1"}
    return start(settings.engine, command.argv, env=env | dict(command.env), log=log)


def wait_until_healthy(server: Server, engine: Child) -> None:
    """Return when the engine serves. Raises ``RunError`` if it ends, or never does."""
    limit = server.settings.inference.ready_timeout
    deadline = time.monotonic() + limit
    # Plain HTTP to this machine: no proxy, and no SSL context, which takes 70 ms to build.
    with httpx.Client(base_url=server.url, trust_env=False) as http:
        while not _healthy(http, server):
            _check_alive(engine)
            if time.monotonic() > deadline:
                raise RunError(
                    f"the engine is not healthy after {limit:.0f} s (--inference.ready_timeout)"
                )
            time.sleep(TICK_SECONDS)

        if server.api_key and http.get("/v1/models").is_success:
            raise RunError(
                f"--api-key-var: the engine {engine.name!r} answers requests without the key"
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


# -- what is printed --------------------------------------------------------------------


def describe(server: Server, context: int) -> str:
    """URL, model and context, and the TOML with which a run uses it."""
    settings = server.settings
    key = settings.api_key_var
    frozen = [
        f"    name = {json.dumps(settings.served_name)}",
        f"    base_url = [{json.dumps(f'{server.url}/v1')}]",
        *([f"    api_key_var = {json.dumps(key)}"] if key else []),
    ]
    notes = []
    if settings.show_admin_key:
        notes.append(f"admin    {ADMIN_KEY}={server.admin_key}")
    if settings.host not in ("127.0.0.1", "localhost", "::1") and not key:
        notes.append("warning: listens beyond this machine without a key (--api-key-var)")
    lines = [
        "",
        f"url      {server.url}/v1",
        f"model    {settings.served_name}",
        f"context  {context:,} tokens",
        *notes,
        "",
        "To use it in a run as a frozen model, for example as [orchestrator.algo.teacher]:",
        "",
        *frozen,
        "",
        "ready; Ctrl-C ends it",
    ]
    return "\n".join(lines)
