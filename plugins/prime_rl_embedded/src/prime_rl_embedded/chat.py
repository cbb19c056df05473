"""``/v1/chat/completions`` for outside clients, with the tokenizer's own chat template.

Text in, text out. What a call of a tool looks like in tokens depends on the model's family, and the
engine does not know it: ``tools`` are refused, since calls would be lost in the text. Rollouts use
``/inference/v1/generate`` instead, where the run's renderer parses calls.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse

from prime_rl_embedded.answers import DONE, Answer, Texts, merged, sent_event
from prime_rl_embedded.generate import usage, weight_versions
from prime_rl_embedded.requests import Request
from prime_rl_embedded.schema import choices_of, resolve_sampling
from prime_rl_engine_kit.body import read_body, while_wanted
from prime_rl_engine_kit.errors import RequestError
from prime_rl_engine_kit.requests import SamplingFields, check_model, decode


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
    functions: list[dict[str, Any]] | None = None
    """The older name of ``tools``."""
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    priority: int | None = None


class Chat:
    """Renders the prompt, runs it and formats the answer."""

    def __init__(self, texts: Texts) -> None:
        self.texts = texts
        self.limits = texts.limits

    async def completions(self, http: HTTPRequest) -> Response:
        body = decode(await read_body(http, self.limits.max_body_bytes), ChatBody)
        check_model(body.model, self.limits)
        kind = (body.response_format or {}).get("type", "text")
        if kind != "text":
            raise RequestError(
                f"response_format.type is {kind!r}; this engine does not constrain its output: "
                "leave response_format out, and ask for the format in the prompt"
            )

        name = "tools" if body.tools else "functions"
        tools = body.tools or body.functions
        if tools:
            raise RequestError(
                f"{name} has {len(tools)} entries; this route parses no tool calls, so every "
                "call of the model would be lost as text. Evaluate with the renderer of a run "
                "(prime-rl eval RUN_DIR --base-url ...), or send tokens to /inference/v1/generate "
                "and parse the reply with the model's renderer"
            )

        answers = self._answers(body, await while_wanted(http, self._render(body)))
        head = _head(answers[0].request, self.limits.model_name)
        if body.stream:
            return StreamingResponse(
                self._stream(body, answers, head), media_type="text/event-stream"
            )

        await self.texts.run(http, answers)

        def response() -> Response:
            choices = [self._choice(body, answer) for answer in answers]
            reply = {**head, "object": "chat.completion", "choices": choices}
            return JSONResponse(reply | _usage(answers) | self._prompt_ids(body, answers))

        return await self.texts.in_thread(response)

    # -- from messages to requests --------------------------------------------------

    async def _render(self, body: ChatBody) -> list[int]:
        tokenizing = await self.texts.load_tokenizer()
        settings = body.chat_template_kwargs or {}
        return await self.texts.in_thread(tokenizing.chat, body.messages, body.tools, settings)

    def _answers(self, body: ChatBody, prompt: list[int]) -> list[Answer]:
        if body.max_tokens is None:
            body.max_tokens = body.max_completion_tokens
        alternatives = (body.top_logprobs or 0) if body.logprobs else 0
        params = resolve_sampling(body, len(prompt), self.limits, top_logprobs=alternatives)
        request_id = body.request_id or f"chatcmpl-{uuid.uuid4().hex}"
        return [
            self.texts.answer(
                index,
                Request(
                    prompt,
                    choice,
                    request_id=request_id,
                    salt=body.cache_salt,
                    priority=body.priority or 0,
                ),
                body.stop,
                body.skip_special_tokens,
            )
            for index, choice in enumerate(choices_of(params, body.n or 1))
        ]

    # -- streaming -------------------------------------------------------------------

    async def _stream(
        self, body: ChatBody, answers: list[Answer], head: dict[str, Any]
    ) -> AsyncIterator[str]:
        head = {**head, "object": "chat.completion.chunk"}
        async for choice in merged([self._deltas(body, answer) for answer in answers]):
            yield sent_event(choice if "error" in choice else {**head, "choices": [choice]})
        if (body.stream_options or {}).get("include_usage"):
            yield sent_event({**head, "choices": [], **_usage(answers)})
        yield DONE

    async def _deltas(self, body: ChatBody, answer: Answer) -> AsyncIterator[dict[str, Any]]:
        """One answer's chunks."""
        sent = 0
        counted = 0
        yield _delta(answer, {"role": "assistant", "content": ""})
        async for _ in self.texts.grow(answer):
            shown = answer.text.shown
            count = len(answer.request.token_ids)
            if shown > sent or (body.logprobs and count > counted):
                chunk = _delta(answer, {"content": answer.text.text[sent:shown]})
                if body.logprobs:
                    chunk["logprobs"] = {"content": self._entries(answer, counted, count)}
                yield chunk
                sent = max(sent, shown)
                counted = count

        rest = answer.text.text[sent:]
        last = _delta(answer, {"content": rest} if rest else {})
        yield last | {"finish_reason": answer.finish_reason}

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
            entry = self._entry(request.token_ids[i], request.logprobs[i])
            entries.append(entry | {"top_logprobs": alternatives})
        return entries

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self.texts.token(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    def _prompt_ids(self, body: ChatBody, answers: list[Answer]) -> dict[str, Any]:
        return {"prompt_token_ids": answers[0].request.prompt} if body.return_token_ids else {}


def _head(request: Request, model: str) -> dict[str, Any]:
    return {"id": request.request_id, "created": int(time.time()), "model": model}


def _usage(answers: list[Answer]) -> dict[str, Any]:
    return {"usage": usage([answer.request for answer in answers])}


def _delta(answer: Answer, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": answer.index, "delta": delta, "finish_reason": None}
