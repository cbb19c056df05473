"""An inference engine whose answers are a fixed function of the request: the same on any machine.

A model's log-probabilities differ in their last bits between machines. These are exact in float32,
so the bytes that an orchestrator makes of them can be compared with a digest in the repository.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web
from transformers import PreTrainedTokenizerBase

LETTERS = "abcdefghijklmnopqrstuvwxyz"
END = "<|im_end|>"
MESSAGE = re.compile(r"<\|im_start\|>(\w+)\n((?:(?!<\|im_start\|>).)*)<\|im_end\|>", re.DOTALL)
TAG, WORD, TOOL = re.compile(r"</?\w+>"), re.compile(r"[a-z]+"), '"name": "get"'


def scripted_reply(prompt: str, rng: random.Random) -> str:
    """What a half-trained policy might write: the last word backwards with some letters wrong, a
    proposal where the user asks for one, or a call of the tool that the prompt offers."""
    messages = [text for role, text in MESSAGE.findall(prompt) if role == "user"]
    asked = TAG.sub("", messages[-1]).strip() if messages else ""
    word = (WORD.findall(asked) or ["a"])[-1]
    if TOOL in prompt and "<tool_response>" not in messages[-1]:
        call = json.dumps({"name": "get", "arguments": {"k": word}})
        return f"<tool_call>\n{call}\n</tool_call>"
    letters = [rng.choice(LETTERS) if rng.random() < 0.4 else each for each in reversed(word)]
    if asked.startswith("+"):
        letters = [*word, *letters[:1]]
    return "".join(letters)


class ScriptedEngine:
    """The routes of an engine that the orchestrator asks, on a real socket."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, models: tuple[str, ...]) -> None:
        self.url = ""
        self._tokenizer, self._models, self._version = tokenizer, models, 0

    async def health(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "ok", "version": self._version})

    async def models(self, request: web.Request) -> web.StreamResponse:
        cards = [{"id": name, "max_model_len": 2048} for name in self._models]
        return web.json_response({"data": cards})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        prompt, settings = asked["token_ids"], asked["sampling_params"]
        if "prompt_logprobs" in settings:
            return web.json_response({"choices": [], "prompt_logprobs": _scores(prompt)})
        seed = hashlib.sha256(json.dumps([prompt, settings.get("seed")]).encode()).hexdigest()
        rng = random.Random(seed)
        reply = scripted_reply(self._tokenizer.decode(prompt), rng) + END
        ids = self._tokenizer(reply, add_special_tokens=False)["input_ids"]
        kept = ids[: settings.get("max_tokens", len(ids))]
        logprobs = [-rng.randrange(1, 2048) / 1024 for _ in kept]
        content = [
            {"token": f"token_id:{token}", "logprob": value}
            for token, value in zip(kept, logprobs, strict=True)
        ]
        choice = {
            "index": 0,
            "token_ids": kept,
            "finish_reason": "stop" if len(kept) == len(ids) else "length",
            "logprobs": {"content": content},
        }
        return web.json_response({"request_id": "r", "choices": [choice]})

    async def update_weights(self, request: web.Request) -> web.StreamResponse:
        self._version = (await request.json())["version"]
        return web.json_response({"version": self._version})

    async def done(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({})

    async def start(self) -> web.AppRunner:
        """Listen on a free port of this machine."""
        app = web.Application()
        app.router.add_get("/health", self.health)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/inference/v1/generate", self.generate)
        app.router.add_post("/update_weights", self.update_weights)
        for route in ("/pause", "/resume"):
            app.router.add_post(route, self.done)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner


def _scores(prompt: list[int]) -> list[dict[str, Any] | None]:
    """A log-probability for every token but the first, by the token and its position."""
    values = [-((token * 31 + place * 17) % 2048 + 1) / 1024 for place, token in enumerate(prompt)]
    pairs = list(zip(prompt, values, strict=True))[1:]
    return [None, *({str(token): {"logprob": value}} for token, value in pairs)]


@contextmanager
def scripted_engine(tokenizer: PreTrainedTokenizerBase, *models: str) -> Iterator[ScriptedEngine]:
    """An engine that serves ``models`` from a thread of its own, until the context ends."""
    engine, loop = ScriptedEngine(tokenizer, models), asyncio.new_event_loop()
    runner = loop.run_until_complete(engine.start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield engine
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
