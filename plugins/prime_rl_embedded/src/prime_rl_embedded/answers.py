"""Text answers, for both routes of outside clients: tokens in, text out, whole or streamed.

Work that grows with a text runs in threads, so that the event loop goes on with other requests.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import Request as HTTPRequest

from prime_rl_embedded.detokenize import TextStream
from prime_rl_embedded.frontend import complete, stream_tokens
from prime_rl_embedded.loop import EngineLoop
from prime_rl_embedded.requests import Request
from prime_rl_embedded.schema import Limits
from prime_rl_embedded.tokenizing import Tokenizing
from prime_rl_engine_kit.body import while_wanted
from prime_rl_engine_kit.errors import RequestError

TEXT_THREADS = 2
"""So that a short text does not wait for a long one. More would take the model's cores."""
MAX_STOPS = 32
MAX_STOP_LENGTH = 256
"""Stop strings and their characters: each is looked for after every token."""

Result = TypeVar("Result")


@dataclass
class Answer:
    """A request and its text so far."""

    index: int
    request: Request
    text: TextStream

    @property
    def finish_reason(self) -> str | None:
        return "stop" if self.text.stopped is not None else self.request.finish_reason


class Texts:
    """Runs requests and decodes their tokens. The first request loads the tokenizer."""

    def __init__(self, engine: EngineLoop, limits: Limits, model_path: Path) -> None:
        self.engine = engine
        self.limits = limits
        self.path = model_path
        self.tokenizer: Any = None
        self._tokenizing: Tokenizing | None = None
        self._token_texts: dict[int, str] = {}
        self._loading = asyncio.Lock()
        # Not the loop's own threads: those read the files of weight updates.
        self._threads = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="text")

    async def load_tokenizer(self) -> Tokenizing:
        """The model's tokenizer, for all later requests too. Raises ``RequestError``."""
        async with self._loading:
            if self._tokenizing is None:
                self._tokenizing = await self.in_thread(self._load)
                self.tokenizer = self._tokenizing.tokenizer
        return self._tokenizing

    def _load(self) -> Tokenizing:
        return Tokenizing(_load_tokenizer(self.path), self.path, self.limits)

    async def in_thread(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Run blocking work beside the event loop. Cancelled before it begins, it does not run."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, work, *arguments)

    def token(self, token_id: int) -> str:
        """The text of one token."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = str(self.tokenizer.decode([token_id], skip_special_tokens=False))
            self._token_texts[token_id] = text
        return text

    def answer(
        self, index: int, request: Request, stop: str | list[str] | None, skip_special: bool | None
    ) -> Answer:
        """An answer without text yet. ``skip_special``: None for true."""
        stops = [stop] if isinstance(stop, str) else stop or []
        if "" in stops:
            raise RequestError("stop contains an empty string, which matches everywhere")
        if len(stops) > MAX_STOPS or max(map(len, stops), default=0) > MAX_STOP_LENGTH:
            raise RequestError(
                f"stop has {len(stops)} strings of up to {max(map(len, stops))} characters; "
                f"expected at most {MAX_STOPS} of at most {MAX_STOP_LENGTH}"
            )

        return Answer(index, request, TextStream(self.tokenizer, stops, skip_special is not False))

    async def run(self, http: HTTPRequest, answers: list[Answer]) -> None:
        """Run to the end. The text is decoded while it grows only if there are stop strings."""
        if answers[0].text.has_stops:
            await self._follow(http, answers)
            return
        await complete(self.engine, http, [answer.request for answer in answers])
        await self.in_thread(_decode_all, answers)

    async def _follow(self, http: HTTPRequest, answers: list[Answer]) -> None:
        async def drain(answer: Answer) -> None:
            async for _ in self.grow(answer):
                pass

        async def drain_all() -> None:
            await asyncio.gather(*map(drain, answers))

        await while_wanted(http, drain_all())

    async def grow(self, answer: Answer) -> AsyncIterator[None]:
        """Yield whenever the text may have grown, until the request ends or a stop string."""
        request = answer.request
        seen = 0
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


def _decode_all(answers: Sequence[Answer]) -> None:
    for answer in answers:
        answer.text.push(answer.request.token_ids)
        answer.text.finish()


async def merged(streams: Sequence[AsyncIterator[dict[str, Any]]]) -> AsyncIterator[dict[str, Any]]:
    """What the streams yield, as it comes. A failure is an event: the 200 is already sent."""
    events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    async def follow(stream: AsyncIterator[dict[str, Any]]) -> None:
        try:
            async for event in stream:
                events.put_nowait(event)
        except RequestError as error:
            events.put_nowait(error.body)
        finally:
            events.put_nowait(None)

    tasks = [asyncio.ensure_future(follow(stream)) for stream in streams]
    left = len(tasks)
    try:
        while left:
            event = await events.get()
            if event is None:
                left -= 1
            else:
                yield event
    finally:
        for task in tasks:
            task.cancel()


def sent_event(body: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(body)}\n\n"


DONE = "data: [DONE]\n\n"
"""The last event of a stream."""


def _load_tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=path.is_dir())
    except Exception as error:
        raise RequestError(f"{path}: no usable tokenizer, so no text: {error}") from error
