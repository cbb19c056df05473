"""An inference engine on loopback. A function of the prompt's text gives its reply."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from loopback import listening

from prime_rl_environments.tiny.tokenizer import build_tokenizer

TOKENIZER = build_tokenizer()
MODEL = "scripted"


@dataclass
class ScriptedEngine:
    """Answers ``/inference/v1/generate`` with ``script``, from the decoded prompt to the reply."""

    script: Callable[[str], str] = lambda prompt: "ok"
    version: int | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    native_shape: bool = False
    """Write logprob entries as vLLM 0.32 does."""
    base_url: str = ""

    async def generate(self, request: web.Request) -> web.StreamResponse:
        self.headers.append(dict(request.headers))
        self.bodies.append(await request.json())
        prompt = TOKENIZER.decode(self.bodies[-1]["token_ids"], skip_special_tokens=False)
        ids = TOKENIZER.encode(self.script(prompt) + "<|im_end|>", add_special_tokens=False)
        content: list[dict[str, Any]] = [
            {"token_id": token, "logprob": -0.25 * (place + 1)} for place, token in enumerate(ids)
        ]
        if not self.native_shape:
            content = [entry | {"token": f"token_id:{entry['token_id']}"} for entry in content]
        choice: dict[str, Any] = {
            "index": 0,
            "token_ids": ids,
            "finish_reason": "stop",
            "logprobs": {"content": content},
        }
        if self.version is not None:
            half = len(ids) // 2  # as if the weights changed half-way
            choice["weight_versions"] = [
                {"version": str(self.version), "start": 0, "end": half},
                {"version": str(self.version + 1), "start": half, "end": len(ids)},
            ]
        return web.json_response({"request_id": "r", "choices": [choice]})

    async def models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"data": [{"id": MODEL, "max_model_len": 2048}]})


@asynccontextmanager
async def replying() -> AsyncIterator[ScriptedEngine]:
    """The engine, listening until the context ends."""
    scripted = ScriptedEngine()
    app = web.Application()
    app.router.add_get("/v1/models", scripted.models)
    app.router.add_post("/inference/v1/generate", scripted.generate)
    async with listening(app) as url:
        scripted.base_url = f"{url}/v1"
        yield scripted
