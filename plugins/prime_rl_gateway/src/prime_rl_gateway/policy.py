# mypy: allow-subclassing-any
"""A model client over the live policy, and verifiers' interception with it.

verifiers' ``TrainClient`` renders a conversation, extends the tokens of earlier turns exactly, and
parses the reply. It asks an engine over HTTP; here its requests go to ``Host.live``, which knows
the engines: a request waits while none serves, and always meets the newest version, with its salt.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import verifiers.v1 as vf
from aiohttp import web
from verifiers.v1.clients.train import ElasticRendererPool, RendererSlot, TrainClient
from verifiers.v1.dialects.chat import ChatDialect
from verifiers.v1.errors import ProviderError
from verifiers.v1.interception.server import InterceptionServer
from verifiers.v1.session import RolloutSession

from in_process.replies import name_calls
from prime_rl import EngineError, LiveSampling, OverlongError
from prime_rl_gateway.dialects import SessionDialect, token_limit
from prime_rl_gateway.traces import VERSIONS, spans_of

MODEL = "policy"
"""The model's name on every route. Other names are taken too."""
DIALECT = web.RequestKey("dialect", SessionDialect)
"""The API that a request to the model speaks."""
EVERY_SESSION = 1 << 30
"""All share one renderer: a render takes a fraction of a millisecond."""


@dataclass
class Call:
    """One request to the model."""

    session_id: str
    number: int
    """Number among the requests of its session."""
    limit: int | None
    """The most tokens that the client takes."""
    spans: list[tuple[int, int, int]] = field(default_factory=list)
    """The versions that sampled the reply."""


_call: ContextVar[Call] = ContextVar("call")


class PolicyRoute:
    """The part of an OpenAI client that ``renderers`` uses, over the live policy."""

    def __init__(self, live: LiveSampling, name: str, seq_len: int, most: int | None) -> None:
        """``most``: tokens of a reply, by the run's config."""
        self.base_url = f"gateway:{name}"
        self._live = live
        self._seq_len = seq_len
        self._most = most

    async def get(self, route: str, **options: Any) -> Any:
        """The engine's own check of a prompt's length is enough."""
        raise NotImplementedError(route)

    async def post(self, route: str, *, body: Mapping[str, Any], **options: Any) -> Any:
        """Sample a reply. Raises ``ProviderError``."""
        call = _call.get()
        ids = body["token_ids"]
        room = self._seq_len - len(ids)
        if room < 1:
            raise ProviderError(
                f"This model's maximum context length is {self._seq_len} tokens (seq_len), and the "
                f"conversation has {len(ids)}.",
                status_code=400,
            )
        limits = [limit for limit in (self._most, call.limit) if limit is not None]
        try:
            (completion,) = await self._live.policy.generate(
                ids,
                max_tokens=min([room, *limits]),
                temperature=self._live.temperature,
                stop_token_ids=body["sampling_params"]["stop_token_ids"],
                seed=number_of(call.session_id, call.number),
                group_id=number_of(call.session_id),
            )
        except OverlongError as error:
            raise ProviderError(str(error), status_code=400) from error
        except EngineError as error:
            raise ProviderError(str(error), status_code=502) from error

        call.spans = spans_of(completion.policy_versions)
        tokens = [int(token) for token in completion.token_ids]
        logprobs = completion.logprobs.tolist()
        content = [
            {"token": f"token_id:{token}", "logprob": logprob}
            for token, logprob in zip(tokens, logprobs, strict=True)
        ]
        choice = {
            "index": 0,
            "finish_reason": completion.finish_reason,
            "token_ids": tokens,
            "logprobs": {"content": content},
        }
        return SimpleNamespace(content=json.dumps({"choices": [choice]}).encode())

    async def close(self) -> None:
        """Core closes the engines' connections."""


class PolicyClient(TrainClient):
    """``TrainClient`` with another engine, and for every dialect."""

    def __init__(self, live: LiveSampling, name: str, seq_len: int, most: int | None) -> None:
        self.config = vf.TrainClientConfig(
            base_url="http://policy.invalid",
            api_key_var="NONE",
            renderer_model_name=f"gateway:{name}",
            multiplex=EVERY_SESSION,
        )
        self.client = PolicyRoute(live, name, seq_len, most)
        pool = ElasticRendererPool(f"gateway:{name}", None, multiplex=EVERY_SESSION)
        pool.renderers[:] = [RendererSlot(live.renderer)]

    async def get_response(
        self,
        dialect: SessionDialect,
        body: dict[str, Any],
        sampling: Any,
        session_id: str | None = None,
        turn: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        call = _call.get()
        call.limit = token_limit(body)
        known = {"session_id": session_id, "turn": turn, "headers": headers}
        response = await super().get_response(ChatDialect(), body, sampling, **known)
        name_calls(response.message)
        response.raw = dialect.write(response)
        return response


class Interception(InterceptionServer):
    """verifiers' handler of model requests, for sessions by their id, behind routes of ours."""

    def __init__(self, client: PolicyClient) -> None:
        super().__init__()
        self._client_of_all = client
        self._asked = Counter[str]()
        """Requests of each session, replies of an earlier process included."""

    def add(self, session_id: str, trace: vf.Trace) -> RolloutSession:
        """Serve a session."""
        context = vf.ModelContext(
            model=MODEL, client=self._client_of_all.config, sampling=vf.SamplingConfig()
        )
        session = RolloutSession(ctx=context, trace=trace)
        session.client = self._client_of_all
        self.sessions[session_id] = session
        self._asked[session_id] = trace.num_turns
        return session

    def remove(self, session_id: str) -> None:
        """Seal a session: requests in progress end, and its trace stays as it is."""
        session = self.sessions.pop(session_id, None)
        self._asked.pop(session_id, None)
        if session is not None:
            session.release()

    async def handle(self, request: Any, session_id: str, kind: type[SessionDialect]) -> Any:
        """The answer to one request of a session, in the format of ``kind``."""
        _call.set(Call(session_id, self._asked[session_id], None))
        self._asked[session_id] += 1
        dialect = kind(session_id, self.sessions[session_id].trace)
        request[DIALECT] = dialect
        return await self._handler_for(dialect)(request)

    def record_call(
        self, session: RolloutSession, *call: Any, node: int | None = None, **rest: Any
    ) -> None:
        """Also note which versions sampled the reply."""
        super().record_call(session, *call, node=node, **rest)
        if node is not None and not session.released:
            session.trace.info.setdefault(VERSIONS, {})[str(node)] = _call.get().spans


def number_of(session_id: str, request: int | None = None) -> int:
    """48 bits that belong to a session, or to one of its requests."""
    text = session_id if request is None else f"{session_id} {request}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")
