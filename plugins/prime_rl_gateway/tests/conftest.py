"""A gateway on loopback, over a policy that a test scripts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from gateway_texts import END, ids_of, text_of, tokenizer

from prime_rl import Completion, Rollout, SourceRequest
from prime_rl.testing import FakeHost, FakeReference
from prime_rl_gateway.settings import GatewayConfig
from prime_rl_gateway.source import Gateway


class ScriptedPolicy(FakeReference):
    """Answers by a function of the prompt's text. Each token of a reply has a logprob of its own,
    and the first half is one version older than the rest."""

    def __init__(self, script: Callable[[str], str]) -> None:
        super().__init__(reply=lambda ids, seed: ids_of(script(text_of(ids))))
        self.version = 0
        self.sampled: list[tuple[list[int], list[int], list[float]]] = []
        """Prompt, reply and logprobs of each request."""

    async def generate(self, token_ids: Any, **asked: Any) -> list[Completion]:
        (completion,) = await super().generate(token_ids, **asked)
        size = len(completion.token_ids)
        first = sum(len(reply) for _, reply, _ in self.sampled)
        logprobs = -0.001 * np.arange(first + 1, first + size + 1, dtype=np.float32)
        versions = np.full(size, self.version, np.int32)
        self.sampled.append(
            ([*map(int, token_ids)], completion.token_ids.tolist(), logprobs.tolist())
        )
        return [
            Completion(
                prompt_ids=completion.prompt_ids,
                token_ids=completion.token_ids,
                logprobs=logprobs,
                finish_reason=completion.finish_reason,
                temperature=completion.temperature,
                policy_versions=versions,
            )
        ]


class KeptHost(FakeHost):
    """Its folder outlives it, as that of a run does."""

    place: Path

    @property
    def folder(self) -> Path:
        return self.place


@dataclass
class Running:
    """A gateway that listens, and a client with its key."""

    source: Gateway
    host: FakeHost
    policy: ScriptedPolicy
    url: str
    key: str
    http: httpx.AsyncClient

    async def open(self, **asked: Any) -> dict[str, Any]:
        answer = await self.http.post("/sessions", json=asked)
        assert answer.status_code == 201, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def say(self, session: dict[str, Any], *messages: tuple[str, str]) -> str:
        """The policy's reply to a conversation, by chat completions."""
        answer = await self.chat(session, *messages)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["message"]["content"]
        return text

    async def chat(
        self, session: dict[str, Any], *messages: tuple[str, str], **more: Any
    ) -> httpx.Response:
        said = [{"role": role, "content": text} for role, text in messages]
        return await self.http.post(
            f"/sessions/{session['id']}/v1/chat/completions",
            json={"model": "policy", "messages": said, **more},
        )

    async def reward(self, session: dict[str, Any], **asked: Any) -> httpx.Response:
        return await self.http.post(f"/sessions/{session['id']}/reward", json=asked)

    async def group(self, version: int = 0, group_id: int = 7) -> list[Rollout]:
        """The rollouts of the next group, as the orchestrator asks for them."""
        return [*await self.source.group(SourceRequest(group_id, 0, version))]


@pytest.fixture
def gateway(tmp_path: Path) -> Callable[..., Any]:
    """``async with gateway(script, ...) as running``; a second one in the same test continues from
    the files of the first."""
    from renderers import Qwen3RendererConfig

    from prime_rl.env.rendering import new_renderer

    folder = tmp_path / "tokenizer"
    tokenizer().save_pretrained(folder)

    @asynccontextmanager
    async def run(
        script: Callable[[str], str] = lambda prompt: f"ok{END}",
        *,
        step: int = 0,
        thinking: bool = False,
        host: dict[str, Any] | None = None,
        load: Path | None = None,
        **settings: Any,
    ) -> AsyncIterator[Running]:
        policy = ScriptedPolicy(script)
        made = KeptHost(
            policy=policy,
            renderer=new_renderer(folder, Qwen3RendererConfig(enable_thinking=thinking)),
            step=step,
            **(host or {}),
        )
        made.place = tmp_path / "run"
        source = Gateway(GatewayConfig(**settings))
        await source.setup(made)
        if load is not None:
            source.load(load)
        url = f"http://127.0.0.1:{source.server.port}"
        key = next(iter(source.server._keys.values()))
        client = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"},
            trust_env=False,
            timeout=600.0,
            # Fewer than a kernel lets wait (net.core.somaxconn): one process is both ends.
            limits=httpx.Limits(max_connections=100),
        )
        try:
            async with client:
                yield Running(source, made, policy, url, key, client)
        finally:
            await source.close()

    return run
