# mypy: allow-subclassing-any
"""A worker: verifiers' env server for one environment.

It differs from ``EnvServer`` in four ways. A trace is sent once, when its episode has ended, not
turn by turn: that takes a third of the orchestrator's time. An episode that raises anything, or
returns what cannot be sent, is answered with the reason. Its answer to ``health`` says which
process it is, so that a client notices that another one has taken its address. With a key its
connections are encrypted, and a process without the key can ask for nothing.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import zmq
from pydantic import TypeAdapter
from renderers import RendererConfig
from verifiers.v1.serve.delta import DeltaStreamer, TraceSummary, dump, pack
from verifiers.v1.serve.server import EnvServer
from verifiers.v1.serve.types import RunRequest, RunResponse

from prime_rl.env.environment import contained
from prime_rl.env.episode import EnvSettings, ModelEndpoint
from prime_rl.env.loading import import_verifiers, load_environment, most_episodes, on_overlong
from prime_rl.env.rendering import warm_renderer
from prime_rl.wire.sockets import curve_keys
from prime_rl_env_workers.client import Alive, BadResult

LARGEST = 256 << 20
"""Bytes of one trace."""


class WorkerServer(EnvServer):
    """Serves one environment to one client."""

    def __init__(self, config: Any, address: str, key: bytes | None = None) -> None:
        """``key``: 32 bytes that the client knows too; None: every client is served."""
        instance = uuid.uuid4().hex
        # verifiers binds at once, and a socket that is bound without a key has let others in.
        bound = address if key is None else f"inproc://{instance}"
        super().__init__(config, bound, most_episodes(config))
        self._instance = instance
        if key is not None:
            self._bind_again(address, key)

    def _bind_again(self, address: str, key: bytes) -> None:
        self.frontend.close()  # type: ignore[has-type]  # of a class without types
        _, secret = curve_keys(key)
        socket = self.ctx.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.curve_server = 1
        socket.curve_secretkey = secret
        socket.bind(address)
        self.frontend = socket
        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT)

    async def _handle(
        self, client_id: bytes, request_id: bytes, method: bytes, payload: bytes
    ) -> None:
        if method != b"health":
            await super()._handle(client_id, request_id, method, payload)
            return
        reply = pack(Alive(instance=self._instance).model_dump())
        await self.frontend.send_multipart([client_id, request_id, b"reply", reply])

    async def _run(self, req: RunRequest, client_id: bytes, request_id: bytes) -> RunResponse:
        context = self._context(req.client, req.model, req.sampling)
        (slot,) = self.env.slots(self._build_task(req.task_data))
        with contained():  # SystemExit would end this process, and every rollout in it
            playing = asyncio.create_task(self.env.run_slot(slot, context, self._gate))
        try:
            episode = await playing
        except (Exception, asyncio.CancelledError):
            raise
        except BaseException as error:  # otherwise nothing would be answered
            raise BadResult(f"it raised {type(error).__name__}: {error}") from error

        try:
            changes = DeltaStreamer(lambda: slot.traces, self._unused).diff()
            frames = [pack(delta) for _, delta, _ in changes]
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            reason = f"{type(error).__name__}: {error}"[:1000]
            raise BadResult(f"what it returned cannot be sent: {reason}") from None

        for frame in frames:
            if len(frame) > LARGEST:
                raise BadResult(f"its trace has {len(frame):,} bytes, at most {LARGEST:,} fit")
            await self.frontend.send_multipart([client_id, request_id, b"delta", frame])

        summaries = [
            TraceSummary(id=trace.id, nodes=len(trace.nodes), calls=len(trace.calls))
            for trace in episode.traces
        ]
        return RunResponse(head=dump(episode, exclude={"traces"}), traces=summaries)

    async def _unused(self, delta: Any) -> None:
        raise AssertionError("the changes are sent above")


def from_wire(table: Mapping[str, Any]) -> EnvSettings:
    """The settings that ``to_wire`` gave. Raises ``ValidationError``."""
    path = table["tokenizer_path"]
    renderer: TypeAdapter[Any] = TypeAdapter(RendererConfig | None)
    endpoint: TypeAdapter[Any] = TypeAdapter(ModelEndpoint | None)
    typed = {
        "tokenizer_path": None if path is None else Path(path),
        "renderer": renderer.validate_python(table["renderer"]),
        "untrained": frozenset(table["untrained"]),
        "past_agents": frozenset(table["past_agents"]),
        "past": endpoint.validate_python(table["past"]),
    }
    return EnvSettings(**{**table, **typed})


def serve(table: Mapping[str, Any], address: str, key: str | None = None) -> None:
    """Serve an environment until SIGTERM. ``key``: in hexadecimal. Raises ``ConfigError`` if it
    cannot be made."""
    settings = from_wire(table)
    vf = import_verifiers(settings)
    config = load_environment(vf, settings).config
    if settings.tokenizer_path is not None:
        warm_renderer(settings.tokenizer_path, settings.renderer)
    on_overlong.set(settings.on_overlong)
    secret = None if key is None else bytes.fromhex(key)
    asyncio.run(WorkerServer(config, address, secret).run())
