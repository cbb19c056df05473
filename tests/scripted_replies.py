"""An inference engine on loopback. A function of the prompt's text gives its reply."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web
from loopback import listening

from prime_rl_engine_kit import batch
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
    max_model_len: int = 2048
    takes_batches: bool = False
    batches: list[list[str]] = field(default_factory=list)
    """Request ids of each batch."""
    aborted: dict[str, asyncio.Event] = field(default_factory=dict)
    """Of requests without a reply: set when the client aborts one."""

    async def generate(self, request: web.Request) -> web.StreamResponse:
        self.headers.append(dict(request.headers))
        self.bodies.append(await request.json())
        choice = self._choice(self.bodies[-1]["token_ids"])
        return web.json_response({"request_id": "r", "choices": [choice]})

    def _choice(self, prompt_ids: list[int]) -> dict[str, Any]:
        prompt = TOKENIZER.decode(prompt_ids, skip_special_tokens=False)
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
        return choice

    async def generate_batch(self, request: web.Request) -> web.StreamResponse:
        """Each request alone, in the reverse order. A prompt of one token is refused; one whose
        reply would be ``...`` gets none."""
        response = web.StreamResponse()
        await response.prepare(request)
        asked = msgspec.msgpack.decode(await request.read(), type=batch.RequestBatch).requests
        self.batches.append([each.request_id for each in asked])
        for index, each in reversed([*enumerate(asked)]):
            prompt = batch.bytes_to_ids(each.token_ids)
            if len(prompt) == 1:
                refusal = batch.Answer(index=index, status=400, error="one token")
                await response.write(batch.frame(refusal))
                continue
            choice = self._choice(prompt)
            if self.script(TOKENIZER.decode(prompt, skip_special_tokens=False)) == "...":
                self.aborted.setdefault(each.request_id, asyncio.Event())
                await self.aborted[each.request_id].wait()
            spans = choice.get("weight_versions", ())
            answer = batch.Answer(
                index=index,
                token_ids=batch.ids_to_bytes(choice["token_ids"]),
                logprobs=batch.logprobs_to_bytes(
                    [entry["logprob"] for entry in choice["logprobs"]["content"]]
                ),
                finish_reason=choice["finish_reason"],
                versions=[(int(s["version"]), s["start"], s["end"]) for s in spans],
            )
            await response.write(batch.frame(answer))
        return response

    async def abort(self, request: web.Request) -> web.StreamResponse:
        for name in msgspec.msgpack.decode(await request.read(), type=batch.Abort).request_ids:
            self.aborted[name].set()
        return web.json_response({})

    async def models(self, request: web.Request) -> web.StreamResponse:
        card = {
            "id": MODEL,
            "max_model_len": self.max_model_len,
            "generate_batch": self.takes_batches,
        }
        return web.json_response({"data": [card]})


@asynccontextmanager
async def replying() -> AsyncIterator[ScriptedEngine]:
    """The engine, listening until the context ends."""
    scripted = ScriptedEngine()
    app = web.Application()
    app.router.add_get("/v1/models", scripted.models)
    app.router.add_post("/inference/v1/generate", scripted.generate)
    app.router.add_post(batch.ROUTE, scripted.generate_batch)
    app.router.add_post(batch.ABORT_ROUTE, scripted.abort)
    async with listening(app) as url:
        scripted.base_url = f"{url}/v1"
        yield scripted
