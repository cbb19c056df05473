"""All private names of verifiers that we use, and the one method that we wrap.

verifiers serves a rollout's model calls from an HTTP server on loopback: it keeps one
``RolloutSession`` per rollout under a secret, and ``InterceptionServer.handle_request`` runs a turn
(limits, stops, hooks, the model call, the commit to the trace, the record of the call). A harness
in the same process needs that turn without HTTP, but it gets only the secret, not the server. So
``register`` is wrapped to remember the server of each secret.

The server still listens, for tool servers and other harnesses.
"""

from __future__ import annotations

import functools
from importlib.metadata import version
from weakref import WeakValueDictionary

from prime_rl import PluginError

SUPPORTED_VERIFIERS = "0.4.0"


def _check() -> None:
    """Raise ``PluginError`` if this is another version of verifiers."""
    installed = version("verifiers")
    if installed != SUPPORTED_VERIFIERS:
        raise PluginError(
            f"harness in-process: found verifiers {installed}, expected {SUPPORTED_VERIFIERS}, "
            "because it uses private names. Run pip install "
            f'"verifiers=={SUPPORTED_VERIFIERS}", or choose another harness.'
        )


_check()

try:
    from verifiers.v1 import graph as graph
    from verifiers.v1.clients.client import SESSION_ID_HEADER as SESSION_ID_HEADER
    from verifiers.v1.clients.train import ElasticRendererPool as ElasticRendererPool
    from verifiers.v1.clients.train import TrainClient as TrainClient
    from verifiers.v1.clients.train import _is_valid_incremental_tail as is_valid_tail
    from verifiers.v1.clients.train import response_from_generate as response_from_generate
    from verifiers.v1.clients.train import serialize_completion as serialize_completion
    from verifiers.v1.clients.train import tool_to_wire as tool_to_wire
    from verifiers.v1.configs.client import resolve_api_key as resolve_api_key
    from verifiers.v1.configs.client import resolve_headers as resolve_headers
    from verifiers.v1.dialects.chat import ChatDialect as ChatDialect
    from verifiers.v1.dialects.chat import message_to_wire as message_to_wire
    from verifiers.v1.errors import ProviderError as ProviderError
    from verifiers.v1.errors import RolloutError as RolloutError
    from verifiers.v1.errors import TaskError as TaskError
    from verifiers.v1.graph import PendingTurn as PendingTurn
    from verifiers.v1.interception.server import InterceptionServer as InterceptionServer
    from verifiers.v1.session import RolloutSession as RolloutSession
    from verifiers.v1.types import AssistantMessage as AssistantMessage
    from verifiers.v1.types import Response as Response

    from in_process import caches as caches
except ImportError as error:
    raise PluginError(
        f"harness in-process: verifiers {SUPPORTED_VERIFIERS} lacks a name that it uses ({error}). "
        "Reinstall verifiers, or choose another harness."
    ) from error

METHODS = ("_handler_for", "acquire", "record_call", "register", "unregister")
"""Methods of ``InterceptionServer`` that we use, besides its attributes ``sessions`` and ``stack``.
"""

missing = [name for name in METHODS if not hasattr(InterceptionServer, name)]
if missing:
    raise PluginError(
        f"harness in-process: verifiers' InterceptionServer lacks {', '.join(missing)}. "
        "Reinstall verifiers, or choose another harness."
    )

is_incremental = is_valid_tail

_servers: WeakValueDictionary[str, InterceptionServer] = WeakValueDictionary()
"""The server of each live rollout, by the rollout's secret."""


def _remember_servers() -> None:
    """Wrap ``register`` and ``unregister`` once, to keep ``_servers`` up to date."""
    register = InterceptionServer.register
    unregister = InterceptionServer.unregister
    if hasattr(register, "__wrapped__"):
        return

    @functools.wraps(register)
    def register_and_remember(self: InterceptionServer, session: RolloutSession) -> tuple[str, str]:
        secrets: tuple[str, str] = register(self, session)
        _servers[secrets[0]] = self
        return secrets

    @functools.wraps(unregister)
    def unregister_and_forget(
        self: InterceptionServer, model_secret: str, state_secret: str
    ) -> None:
        _servers.pop(model_secret, None)
        unregister(self, model_secret, state_secret)

    InterceptionServer.register = register_and_remember
    InterceptionServer.unregister = unregister_and_forget


_remember_servers()
caches.install()


def server_of(secret: str) -> InterceptionServer:
    """The server that has the session of this secret. Raises ``PluginError`` if the rollout does
    not run in this process."""
    server = _servers.get(secret)
    if server is None:
        raise PluginError(
            "harness in-process: the rollout's interception server is not in this process. The "
            "harness runs in the environment's process and cannot use a remote interception."
        )
    return server
