"""Score and sample tokens under a model behind HTTP: the live policy, or a frozen one.

    logprobs, top_logprobs, generate -> [slot] -> pool.ask -> POST /inference/v1/generate

Shapes: T = tokens of one sequence, C = tokens of a completion.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

import msgspec

from prime_rl import Completion, EngineError, OverlongError
from prime_rl.inference.client import EngineRefused
from prime_rl.inference.engine import Replica
from prime_rl.inference.pool import EnginePool
from prime_rl.inference.replies import Reply, read_completions, read_scores, read_top
from prime_rl.plugins.algorithm import Tokens
from prime_rl.streams import FloatColumn, IntColumn

ROUTE = "/inference/v1/generate"
SCORING = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
"""The API requires one sampled token, which is thrown away. 0: of the prompt's own tokens only."""
SAMPLING = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "logprobs": 1}
"""The whole distribution: what the trainer can reproduce."""
MOST_CHOICES = 128
TRIES = 10
"""Times a request is tried again at engines that are there and fail: over more than a minute. Its
failure ends the run."""
KEPT_PROMPTS = 65536
"""Prompts whose requests are counted, for their seeds."""

Sampling: TypeAlias = Mapping[str, Any]
T = TypeVar("T")


class PromptScorer:
    """A ``ReferenceModel`` over a pool. ``cache_salt`` is called at each request: the version of
    the live policy, None for a frozen model."""

    def __init__(
        self,
        pool: EnginePool,
        model: str,
        *,
        api_key: str | None = None,
        max_concurrency: int = 32,
        timeout: float | None = None,
        cache_salt: Callable[[], str | None] = lambda: None,
    ) -> None:
        """``timeout``: seconds for one answer. None: no limit, because the pool looks at its
        engines and ends the requests of one that is lost."""
        self.pool = pool
        self._model = model
        self._cache_salt = cache_salt
        self._slots = asyncio.Semaphore(max_concurrency)
        self._timeout = timeout
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._salt = ""
        self._asked = Counter[str]()
        self._stops: Callable[[], Sequence[int]] = tuple
        self._equal: dict[int, int] = {}

    def lend(
        self, salt: str, stops: Callable[[], Sequence[int]], asked: Counter[str]
    ) -> PromptScorer:
        """The same model for one env, under the same limits. ``salt``: what its seeds depend on.
        ``stops``: tokens that end a completion by default. ``asked`` counts requests and their
        tokens."""
        # A shallow copy shares the pool and the slots, so the limits hold for all.
        lent = copy.copy(self)
        lent._salt = salt
        lent._stops = stops
        lent._asked = asked
        lent._equal = {}
        return lent

    async def logprobs(self, token_ids: Tokens, *, group_id: int = 0) -> FloatColumn:
        """The log-probability of each token given those before it, at temperature 1: [T]; 0.0 for
        the first.

        Waits while no engine answers. Raises ``EngineError`` if one refuses, or fails on this
        request again and again.
        """
        ids = [int(token) for token in token_ids]
        return await self._ask(
            ids, sampling=SCORING, group_id=group_id, read=partial(read_scores, ids)
        )

    async def top_logprobs(
        self, token_ids: Tokens, k: int, *, group_id: int = 0
    ) -> tuple[IntColumn, FloatColumn]:
        """Ids and log-probabilities [T, k] of the most likely tokens. Waits and raises as
        ``logprobs``."""
        ids = [int(token) for token in token_ids]
        wanted = SCORING | {"prompt_logprobs": k}
        return await self._ask(
            ids, sampling=wanted, group_id=group_id, read=partial(read_top, ids, k)
        )

    async def generate(
        self,
        token_ids: Tokens,
        *,
        max_tokens: int,
        temperature: float = 1.0,
        stop_token_ids: Sequence[int] | None = None,
        n: int = 1,
        seed: int | None = None,
        group_id: int = 0,
    ) -> list[Completion]:
        """Sample ``n`` completions. Waits and raises as ``logprobs``."""
        ids = [int(token) for token in token_ids]

        stops = self._stops() if stop_token_ids is None else stop_token_ids
        asked = {
            **SAMPLING,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "n": n,
            "seed": self._seed(ids, group_id, seed),
            "stop_token_ids": [int(token) for token in stops],
        }

        read = partial(
            read_completions, ids, n=n, temperature=temperature, live=self._cache_salt() is not None
        )
        completions = await self._ask(ids, sampling=asked, group_id=group_id, read=read)
        self._asked["sampled_tokens"] += sum(len(each.token_ids) for each in completions)
        return completions

    def beside(self, max_concurrency: int) -> PromptScorer:
        """The same model, with a limit of requests in flight of its own."""
        other = copy.copy(self)
        other._slots = asyncio.Semaphore(max_concurrency)
        return other

    def _seed(self, ids: list[int], group_id: int, seed: int | None) -> int:
        """A seed that no other prompt, group, env or number has. Choice i gets the seed plus i, so
        every seed is a multiple of the greatest number of choices."""
        key = _digest([self._salt, group_id, ids, seed])
        if seed is None:
            number = self._equal.pop(key, 0)
            self._equal[key] = number + 1  # the newest
            if len(self._equal) > KEPT_PROMPTS:
                del self._equal[next(iter(self._equal))]
            key = _digest([key, number])
        return key * MOST_CHOICES

    async def _ask(
        self, ids: list[int], sampling: Sampling, group_id: int, read: Callable[[Reply], T]
    ) -> T:
        """The result of ``read`` for the answer."""
        if len(ids) < 2 and "prompt_logprobs" in sampling:  # nothing comes before the first
            return read(Reply(prompt_logprobs=[None] * len(ids)))

        async def post(engine: Replica) -> T:
            return await self._post(engine, ids, sampling=sampling, read=read)

        async with self._slots:
            answer = await self.pool.ask(group_id, post, tries=TRIES)
        self._asked.update(requests=1, prompt_tokens=len(ids))
        return answer

    async def _post(
        self, engine: Replica, ids: list[int], sampling: Sampling, read: Callable[[Reply], T]
    ) -> T:
        client = engine.client
        limit = engine.client.health.max_model_len
        # Sampling needs room for one more token. Some engines score a full context.
        sampled = "" if "prompt_logprobs" in sampling else ", before any is sampled"
        if limit is not None and len(ids) + bool(sampled) > limit:
            raise OverlongError(
                f"{client.label} takes {limit} tokens (its max_model_len), and this sequence has "
                f"{len(ids)}{sampled}. Serve it with more, or lower seq_len or "
                "max_completion_tokens."
            )

        body = {"model": self._model, "token_ids": ids, "sampling_params": sampling}
        # Prefixes that were cached under other weights must not be used.
        salt = self._cache_salt()
        if salt is not None:
            body["cache_salt"] = salt
        content = msgspec.json.encode(body)

        try:
            answer = await client.request(
                "POST", ROUTE, self._timeout, content=content, headers=self._headers
            )
            return read(msgspec.json.decode(answer.content, type=Reply))
        except EngineRefused as refusal:
            fix = refusal.fix
            if refusal.status == 404:
                try:
                    await client.look(self._model)
                except EngineRefused as other:  # it serves another model by now
                    raise EngineError(f"{other}. {other.fix}") from other

                fix = (
                    "It serves the model but not this route: a reference must give prompt_logprobs "
                    "(prime-rl serve, vLLM with --enable-scale-out)."
                )
            elif limit == len(ids) and not refusal.locked:
                fix = f"Serve it with a max_model_len of {limit + 1}: one token is sampled."

            raise EngineError(f"{refusal}. {fix}") from refusal
        except (msgspec.DecodeError, ValueError) as error:
            raise EngineError(f"{client.label}: {ROUTE}: {error}") from error


def _digest(value: object) -> int:
    """48 bits of a hash."""
    digest = hashlib.blake2b(msgspec.json.encode(value), digest_size=6).digest()
    return int.from_bytes(digest, "big")
