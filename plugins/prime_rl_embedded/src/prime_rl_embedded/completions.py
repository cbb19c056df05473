"""``/v1/completions`` for outside clients: text or tokens go on as they are, without a template.

With ``echo`` and ``logprobs`` the prompt is scored, which is how evaluation harnesses measure the
likelihood of a given text.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response, StreamingResponse

from prime_rl_embedded.answers import DONE, Answer, Texts, merged, sent_event
from prime_rl_embedded.generate import MIN_LOGPROB, usage, weight_versions
from prime_rl_embedded.requests import Request, TokenScore
from prime_rl_embedded.schema import choices_of, resolve_sampling
from prime_rl_engine_kit.body import read_body, while_wanted
from prime_rl_engine_kit.errors import RequestError
from prime_rl_engine_kit.requests import (
    MAX_ANSWERS,
    SamplingFields,
    check_choices,
    check_entries,
    check_model,
    check_prompt,
    decode,
)

MAX_TOKENS = 16
"""OpenAI's default."""


class CompletionBody(SamplingFields, kw_only=True):
    """``POST /v1/completions``: OpenAI's keys plus vLLM's."""

    prompt: str | list[str | int | list[int]]
    """A text, several texts, tokens, or several lists of tokens."""
    model: str | None = None
    echo: bool | None = None
    """The answer begins with the prompt."""
    logprobs: int | None = None
    """Report the logprob of each token, and those of this many of the likeliest tokens."""
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    suffix: str | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    priority: int | None = None


class Completions:
    """Runs every prompt ``n`` times and formats the answers: choice ``i * n + j`` is answer j to
    prompt i."""

    def __init__(self, texts: Texts) -> None:
        self.texts = texts
        self.limits = texts.limits

    async def completions(self, http: HTTPRequest) -> Response:
        body = decode(await read_body(http, self.limits.max_body_bytes), CompletionBody)
        check_model(body.model, self.limits)
        _check(body)
        answers = self._answers(body, await while_wanted(http, self._tokens(body)))
        head = {
            "id": body.request_id or f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.limits.model_name,
        }
        if body.stream:
            return StreamingResponse(
                self._stream(body, answers, head), media_type="text/event-stream"
            )

        await self.texts.run(http, answers)

        def response() -> Response:
            choices = [self._choice(body, answer) for answer in answers]
            reply = {**head, "choices": choices, "usage": _usage(answers, body.n or 1)}
            return JSONResponse(reply)

        return await self.texts.in_thread(response)

    async def _tokens(self, body: CompletionBody) -> list[list[int]]:
        """The tokens of each prompt. Raises ``RequestError``."""
        tokenizing = await self.texts.load_tokenizer()
        special = body.add_special_tokens is not False

        def tokens() -> list[list[int]]:
            pieces = []
            for prompt in _prompts(body.prompt):
                if isinstance(prompt, str):
                    ids = tokenizing.text(prompt, special=special)
                else:
                    ids = prompt
                check_prompt(ids, self.limits, scoring=body.max_tokens == 0)
                pieces.append(ids)

            return pieces

        return await self.texts.in_thread(tokens)

    def _answers(self, body: CompletionBody, prompts: Sequence[list[int]]) -> list[Answer]:
        n = body.n or 1
        if body.echo:
            check_entries(sum(map(len, prompts)), body.logprobs)
        body.max_tokens = MAX_TOKENS if body.max_tokens is None else body.max_tokens
        alternatives = body.logprobs or 0
        # Once, and not for each prompt: a body may have thousands of both prompts and stop tokens.
        shared = resolve_sampling(
            body,
            min(map(len, prompts)),
            self.limits,
            top_logprobs=alternatives,
            prompt_logprobs=body.logprobs if body.echo else None,
        )
        check_choices(n * len(prompts), shared.max_tokens, alternatives)
        answers: list[Answer] = []
        for ids in prompts:
            room = max(self.limits.max_model_len - len(ids), 1)
            params = replace(shared, max_tokens=min(shared.max_tokens, room))
            for choice in choices_of(params, n):
                request = Request(
                    ids,
                    choice,
                    request_id=body.request_id or "",
                    salt=body.cache_salt,
                    priority=body.priority or 0,
                )
                answers.append(
                    self.texts.answer(len(answers), request, body.stop, body.skip_special_tokens)
                )

        return answers

    async def _stream(
        self, body: CompletionBody, answers: list[Answer], head: dict[str, Any]
    ) -> AsyncIterator[str]:
        async for choice in merged([self._chunks(body, answer) for answer in answers]):
            yield sent_event(choice if "error" in choice else {**head, "choices": [choice]})
        if (body.stream_options or {}).get("include_usage"):
            yield sent_event({**head, "choices": [], "usage": _usage(answers, body.n or 1)})
        yield DONE

    async def _chunks(self, body: CompletionBody, answer: Answer) -> AsyncIterator[dict[str, Any]]:
        sent = 0
        before = await self.texts.in_thread(self._echo, body, answer)
        async for _ in self.texts.grow(answer):
            text = before + answer.text.text[sent : answer.text.shown]
            if text:
                yield _chunk(answer, text)
                sent = max(sent, answer.text.shown)
                before = ""

        yield _chunk(answer, answer.text.text[sent:]) | {"finish_reason": answer.finish_reason}

    def _echo(self, body: CompletionBody, answer: Answer) -> str:
        if not body.echo:
            return ""
        if isinstance(body.prompt, str):
            return body.prompt
        skip = body.skip_special_tokens is not False
        return str(self.texts.tokenizer.decode(answer.request.prompt, skip_special_tokens=skip))

    def _choice(self, body: CompletionBody, answer: Answer) -> dict[str, Any]:
        request = answer.request
        return {
            "index": answer.index,
            "text": self._echo(body, answer) + answer.text.text,
            "logprobs": None if body.logprobs is None else self._logprobs(body, request),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.text.stopped or request.stop_reason,
            "weight_versions": weight_versions(request),
        }

    def _logprobs(self, body: CompletionBody, request: Request) -> dict[str, list[Any]]:
        """Four lists with an entry per token; None for the first token of an echoed prompt, which
        nothing predicts."""
        rows: list[tuple[int, float | None, Sequence[TokenScore]]] = []
        if body.echo:
            rows.append((request.prompt[0], None, ()))
            rows += [(own.token_id, own.logprob, top) for own, *top in request.prompt_scores or ()]

        for i, (token, logprob) in enumerate(zip(request.token_ids, request.logprobs, strict=True)):
            rows.append((token, logprob, request.top_logprobs[i] if request.top_logprobs else ()))
        tokens = [self.texts.token(token) for token, _, _ in rows]
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(logprob) for _, logprob, _ in rows],
            "top_logprobs": [
                self._alternatives(text, logprob, top)
                for text, (_, logprob, top) in zip(tokens, rows, strict=True)
            ],
            "text_offset": list(accumulate(map(len, tokens[:-1]), initial=0)) if tokens else [],
        }

    def _alternatives(
        self, text: str, logprob: float | None, top: Sequence[TokenScore]
    ) -> dict[str, float] | None:
        """By text: the most likely tokens, and the token itself. If two tokens have the same text,
        the likelier one."""
        if logprob is None:
            return None
        logprobs: dict[str, float] = {}
        for name, value in [
            *((self.texts.token(s.token_id), s.logprob) for s in top),
            (text, logprob),
        ]:
            logprobs[name] = max(logprobs.get(name, MIN_LOGPROB), value)

        return logprobs


def _check(body: CompletionBody) -> None:
    """Refuse keys that this route does not offer. Raises ``RequestError``."""
    if body.suffix:
        raise RequestError("suffix: this engine does not fill in the middle; leave it out")
    if body.best_of not in (None, body.n or 1):
        raise RequestError(f"best_of is {body.best_of}; expected n ({body.n or 1}): leave it out")
    if body.stream and body.logprobs is not None:
        raise RequestError("logprobs: not with stream; leave one of them out")
    if body.max_tokens == 0 and not (body.echo and body.logprobs is not None):
        raise RequestError("max_tokens is 0; expected at least 1, or echo with logprobs")
    num_prompts = 1
    if isinstance(body.prompt, list) and not all(isinstance(part, int) for part in body.prompt):
        num_prompts = len(body.prompt)
    if num_prompts * (body.n or 1) > MAX_ANSWERS:
        raise RequestError(
            f"{num_prompts} prompts with n = {body.n or 1} are {num_prompts * (body.n or 1)} "
            f"answers; expected at most {MAX_ANSWERS} per request"
        )


def _prompts(prompt: str | list[str | int | list[int]]) -> Iterator[str | list[int]]:
    """The prompts one by one. Raises ``RequestError`` for none, or a list of mixed kinds."""
    if isinstance(prompt, str):
        yield prompt
        return

    kinds = {type(part) for part in prompt}
    if len(kinds) != 1:
        raise RequestError(
            "prompt: expected a text, a list of texts, a list of tokens, or a list of such lists"
        )

    if kinds == {int}:
        yield [part for part in prompt if isinstance(part, int)]
        return

    for part in prompt:
        if not isinstance(part, int):
            yield part


def _chunk(answer: Answer, text: str) -> dict[str, Any]:
    return {"index": answer.index, "text": text, "logprobs": None, "finish_reason": None}


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, MIN_LOGPROB)


def _usage(answers: list[Answer], n: int) -> dict[str, object]:
    """The sum over prompts; each counts once, whatever ``n``."""
    requests = [answer.request for answer in answers]
    parts = [usage(requests[i : i + n]) for i in range(0, len(requests), n)]
    keys = ("prompt_tokens", "completion_tokens", "total_tokens")
    return {key: sum(int(str(part[key])) for part in parts) for key in keys}
