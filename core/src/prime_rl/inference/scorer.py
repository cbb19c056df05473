"""Score tokens under a model behind HTTP: the live policy, or a frozen one.

    logprobs(tokens) -> [slot] -> pool.ask -> POST /inference/v1/generate {prompt_logprobs: 0}

Shapes: T = tokens of one sequence.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from prime_rl.errors import EngineError, OverlongError
from prime_rl.inference import timing
from prime_rl.inference.client import EngineRefused
from prime_rl.inference.engine import Engine
from prime_rl.inference.pool import EnginePool
from prime_rl.streams import FloatColumn

ROUTE = "/inference/v1/generate"
SCORING = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
"""One token has to be sampled, and is thrown away. 0: of the prompt's own tokens only."""
IMPOSSIBLE = -9999.0
"""What engines write for a log-probability of minus infinity: JSON has none."""


class _Entry(msgspec.Struct):
    logprob: float | None = None


class _Scores(msgspec.Struct):
    """The part of the reply that is read: None for the first token, then entries by token id."""

    prompt_logprobs: list[dict[str, _Entry] | None] | None = None


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
        timeout: float = 600.0,
        cache_salt: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.pool, self._model, self._cache_salt = pool, model, cache_salt
        self._slots = asyncio.Semaphore(max_concurrency)
        self._timeout = timeout
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def logprobs(
        self, token_ids: Sequence[int] | np.ndarray, *, group_id: int = 0
    ) -> FloatColumn:
        """The log-probability of each token given those before it, at temperature 1: [T]; 0.0 for
        the first.

        Waits while no engine answers. Raises ``EngineError`` if one refuses, or fails on this
        request again and again.
        """
        ids = [int(token) for token in token_ids]
        if len(ids) < 2:  # nothing comes before the first
            return np.zeros(len(ids), np.float32)

        async def work(engine: Engine) -> FloatColumn:
            return await self._score(engine, ids)

        async with self._slots:
            return await self.pool.ask(group_id, work, tries=timing.SCORE_TRIES)

    async def _score(self, engine: Engine, ids: list[int]) -> FloatColumn:
        client, limit = engine.client, engine.client.health.max_model_len
        if limit is not None and len(ids) > limit:
            raise OverlongError(
                f"{client.label} takes {limit} tokens (its max_model_len), and this sequence has "
                f"{len(ids)}. Serve it with more, or lower seq_len or max_completion_tokens."
            )
        body = {"model": self._model, "token_ids": ids, "sampling_params": SCORING}
        if (salt := self._cache_salt()) is not None:
            body["cache_salt"] = salt
        content = msgspec.json.encode(body)
        try:
            answer = await client.request(
                "POST", ROUTE, self._timeout, content=content, headers=self._headers
            )
            return read_scores(msgspec.json.decode(answer.content, type=_Scores), ids)
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


def read_scores(scores: _Scores, ids: list[int]) -> FloatColumn:
    """The log-probabilities [T] of a reply. Raises ``ValueError`` naming the first position that
    has none."""
    entries = scores.prompt_logprobs
    if entries is None:
        raise ValueError("no prompt_logprobs in the answer; a reference must give them")
    if len(entries) != len(ids):
        raise ValueError(f"got {len(entries)} prompt_logprobs, expected {len(ids)}")
    column = np.zeros(len(ids), np.float32)
    for position, (token, entry) in enumerate(zip(ids[1:], entries[1:], strict=True), start=1):
        found = (entry or {}).get(str(token))
        logprob = None if found is None else found.logprob
        if logprob is None or not math.isfinite(logprob):
            raise ValueError(f"position {position} of {len(ids)}: no logprob of token {token}")
        if logprob <= IMPOSSIBLE:
            raise ValueError(
                f"position {position} of {len(ids)}: token {token} is impossible to this model "
                f"(logprob {logprob:g}): no finite signal leads towards it. Use a reference whose "
                "vocabulary is the policy's"
            )
        column[position] = logprob
    return column
