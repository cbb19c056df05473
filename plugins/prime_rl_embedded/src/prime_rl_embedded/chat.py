"""``/v1/chat/completions`` for outside clients, with the tokenizer's own chat template.

Text in, text out: tool calls are not parsed. Rollouts use ``/inference/v1/generate`` instead.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse

from prime_rl_embedded.detokenize import TextStream
from prime_rl_embedded.frontend import complete, stream_tokens
from prime_rl_embedded.generate import usage, weight_versions
from prime_rl_embedded.loop import EngineLoop
from prime_rl_embedded.requests import Request
from prime_rl_embedded.schema import Limits, choices_of, resolve_sampling
from prime_rl_engine_kit.body import read_body, while_wanted
from prime_rl_engine_kit.errors import RequestError
from prime_rl_engine_kit.requests import SamplingFields, check_model, check_prompt, decode


class ChatBody(SamplingFields, kw_only=True):
    """``POST /v1/chat/completions``: OpenAI's keys plus vLLM's."""

    messages: list[dict[str, Any]]
    model: str | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    priority: int | None = None


@dataclass
class Answer:
    """A request and its text so far."""

    index: int
    request: Request
    text: TextStream

    @property
    def finish_reason(self) -> str | None:
        return "stop" if self.text.stopped is not None else self.request.finish_reason


class Chat:
    """Renders the prompt, runs it and formats the answer. The first request loads the tokenizer."""

    def __init__(self, engine: EngineLoop, limits: Limits, model_path: Path) -> None:
        self.engine, self.limits = engine, limits
        self._path = model_path
        self._tokenizer: Any = None
        self._loading = asyncio.Lock()

    async def completions(self, http: HTTPRequest) -> Response:
        body = decode(await read_body(http), ChatBody)
        check_model(body.model, self.limits)
        if (body.response_format or {}).get("type", "text") != "text":
            raise RequestError("response_format: this engine offers text only")
        answers = self._answers(body, await self._render(body))
        head = _head(answers[0].request, self.limits.model_name)
        if body.stream:
            return StreamingResponse(
                self._stream(body, answers, head), media_type="text/event-stream"
            )
        await self._run(http, answers)
        choices = [self._choice(body, answer) for answer in answers]
        reply = {**head, "object": "chat.completion", "choices": choices}
        return JSONResponse(reply | _usage(answers) | self._prompt_ids(body, answers))

    # -- from messages to requests --------------------------------------------------

    async def _render(self, body: ChatBody) -> list[int]:
        tokenizer = await self._load_tokenizer()
        try:
            ids = tokenizer.apply_chat_template(
                body.messages,
                tools=body.tools,
                add_generation_prompt=True,
                return_dict=False,
                **(body.chat_template_kwargs or {}),
            )
        except Exception as error:  # a template is a program and may raise anything
            raise RequestError(f"the chat template refused the messages: {error}") from error
        check_prompt(ids, self.limits)
        return list(ids)

    async def _load_tokenizer(self) -> Any:
        async with self._loading:
            if self._tokenizer is None:
                self._tokenizer = await asyncio.to_thread(_load_tokenizer, self._path)
        return self._tokenizer

    def _answers(self, body: ChatBody, prompt: list[int]) -> list[Answer]:
        if body.max_tokens is None:
            body.max_tokens = body.max_completion_tokens
        alternatives = (body.top_logprobs or 0) if body.logprobs else 0
        params = resolve_sampling(body, len(prompt), self.limits, top_logprobs=alternatives)
        stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
        if "" in stop:
            raise RequestError("stop contains an empty string, which matches everywhere")
        request_id = body.request_id or f"chatcmpl-{uuid.uuid4().hex}"
        skip = body.skip_special_tokens is not False
        return [
            Answer(
                index,
                Request(prompt, choice, request_id, body.cache_salt, body.priority or 0),
                TextStream(self._tokenizer, stop, skip),
            )
            for index, choice in enumerate(choices_of(params, body.n or 1))
        ]

    # -- running --------------------------------------------------------------------

    async def _run(self, http: HTTPRequest, answers: list[Answer]) -> None:
        """Run to the end. The text is decoded while it grows only if there are stop strings."""
        if answers[0].text.has_stops:
            await self._follow(http, answers)
            return
        await complete(self.engine, http, [answer.request for answer in answers])
        for answer in answers:
            answer.text.push(answer.request.token_ids)
            answer.text.finish()

    async def _follow(self, http: HTTPRequest, answers: list[Answer]) -> None:
        async def drain(answer: Answer) -> None:
            async for _ in self._grow(answer):
                pass

        async def drain_all() -> None:
            await asyncio.gather(*map(drain, answers))

        await while_wanted(http, drain_all())

    async def _grow(self, answer: Answer) -> AsyncIterator[None]:
        """Yield whenever the text may have grown, until the request ends or a stop string."""
        request, seen = answer.request, 0
        tokens = stream_tokens(self.engine, request)
        try:
            async for count in tokens:
                answer.text.push(request.token_ids[seen:count])
                seen = count
                yield
                if answer.text.stopped is not None:
                    break
        finally:
            await tokens.aclose()
        answer.text.finish()
        yield

    async def _stream(
        self, body: ChatBody, answers: list[Answer], head: dict[str, Any]
    ) -> AsyncIterator[str]:
        head = {**head, "object": "chat.completion.chunk"}
        events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        tasks = [asyncio.ensure_future(self._deltas(body, a, events)) for a in answers]
        open_answers = len(tasks)
        try:
            while open_answers:
                choice = await events.get()
                if choice is None:
                    open_answers -= 1
                    continue
                yield _event(choice if "error" in choice else {**head, "choices": [choice]})
            if (body.stream_options or {}).get("include_usage"):
                yield _event({**head, "choices": [], **_usage(answers)})
            yield "data: [DONE]\n\n"
        finally:
            for task in tasks:
                task.cancel()

    async def _deltas(
        self, body: ChatBody, answer: Answer, events: asyncio.Queue[dict[str, Any] | None]
    ) -> None:
        """One answer's chunks, then None. A failure is an event: the 200 is already sent."""
        sent, counted = 0, 0
        events.put_nowait(_delta(answer, {"role": "assistant", "content": ""}))
        try:
            async for _ in self._grow(answer):
                shown, count = answer.text.shown, len(answer.request.token_ids)
                if shown > sent or (body.logprobs and count > counted):
                    chunk = _delta(answer, {"content": answer.text.text[sent:shown]})
                    if body.logprobs:
                        chunk["logprobs"] = {"content": self._entries(answer, counted, count)}
                    events.put_nowait(chunk)
                    sent, counted = max(sent, shown), count
            last = _delta(
                answer, {"content": answer.text.text[sent:]} if len(answer.text.text) > sent else {}
            )
            events.put_nowait(last | {"finish_reason": answer.finish_reason})
        except RequestError as error:
            events.put_nowait(error.body)
        finally:
            events.put_nowait(None)

    # -- from requests to JSON ------------------------------------------------------

    def _choice(self, body: ChatBody, answer: Answer) -> dict[str, Any]:
        request = answer.request
        choice: dict[str, Any] = {
            "index": answer.index,
            "message": {"role": "assistant", "content": answer.text.text},
            "logprobs": None,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.text.stopped or request.stop_reason,
            "weight_versions": weight_versions(request),
        }
        if body.logprobs:
            choice["logprobs"] = {"content": self._entries(answer, 0, len(request.token_ids))}
        if body.return_token_ids:
            choice["token_ids"] = request.token_ids
        return choice

    def _entries(self, answer: Answer, start: int, end: int) -> list[dict[str, Any]]:
        request = answer.request
        entries = []
        for i in range(start, end):
            row = request.top_logprobs[i] if request.top_logprobs else []
            alternatives = [self._entry(s.token_id, s.logprob) for s in row]
            own = self._entry(request.token_ids[i], request.logprobs[i])
            entries.append(own | {"top_logprobs": alternatives})
        return entries

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    def _prompt_ids(self, body: ChatBody, answers: list[Answer]) -> dict[str, Any]:
        return {"prompt_token_ids": answers[0].request.prompt} if body.return_token_ids else {}


def _load_tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=path.is_dir())
    except Exception as error:
        raise RequestError(f"{path}: no usable tokenizer, so no chat: {error}") from error
    if not getattr(tokenizer, "chat_template", None):
        raise RequestError(
            f"{path}: the tokenizer has no chat template; send tokens to /inference/v1/generate"
        )
    return tokenizer


def _head(request: Request, model: str) -> dict[str, Any]:
    return {"id": request.request_id, "created": int(time.time()), "model": model}


def _usage(answers: list[Answer]) -> dict[str, Any]:
    return {"usage": usage([answer.request for answer in answers])}


def _delta(answer: Answer, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": answer.index, "delta": delta, "finish_reason": None}


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"
