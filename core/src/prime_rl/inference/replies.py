"""Read what an engine answers on ``/inference/v1/generate``.

Shapes: T = tokens of the prompt, K = alternatives.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from prime_rl import Completion
from prime_rl.streams import FloatColumn, IntColumn

IMPOSSIBLE = -9999.0
"""What engines write for a log-probability of minus infinity: JSON has none."""


class _Entry(msgspec.Struct):
    logprob: float | None = None


class _Content(msgspec.Struct):
    content: list[_Entry]


class _Span(msgspec.Struct):
    version: str | int
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int]
    finish_reason: str
    logprobs: _Content | None = None
    weight_versions: list[_Span] | None = None


class Reply(msgspec.Struct):
    """The part that is read. ``prompt_logprobs``: None for the first token, then entries by token
    id."""

    prompt_logprobs: list[dict[str, _Entry] | None] | None = None
    choices: list[_Choice] = []


def read_scores(ids: list[int], reply: Reply) -> FloatColumn:
    """The log-probabilities [T] of the prompt's tokens. Raises ``ValueError`` naming the first
    position that has none."""
    column = np.zeros(len(ids), np.float32)
    entries = _entries(reply, ids)

    for position, (token, entry) in enumerate(zip(ids[1:], entries[1:], strict=True), start=1):
        logprob_entry = (entry or {}).get(str(token))
        logprob = None if logprob_entry is None else logprob_entry.logprob
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


def _entries(reply: Reply, ids: list[int]) -> list[dict[str, _Entry] | None]:
    entries = reply.prompt_logprobs
    if entries is None:
        raise ValueError("no prompt_logprobs in the answer; a reference must give them")
    if len(entries) != len(ids):
        raise ValueError(f"got {len(entries)} prompt_logprobs, expected {len(ids)}")
    return entries


def read_top(ids: list[int], k: int, reply: Reply) -> tuple[IntColumn, FloatColumn]:
    """Ids and log-probabilities [T, K] of the most likely tokens. Raises ``ValueError`` naming the
    first position that has fewer."""
    tokens = np.zeros((len(ids), k), np.int32)
    column = np.zeros((len(ids), k), np.float32)

    for position, entry in enumerate(_entries(reply, ids)[1:], start=1):
        pairs = ((e.logprob, int(token)) for token, e in (entry or {}).items())
        # Ties go to the lowest id: the order within the answer must not decide.
        likeliest = sorted((-logprob, token) for logprob, token in pairs if logprob is not None)[:k]
        if len(likeliest) < k:
            text = f"{len(likeliest)} alternatives, expected {k}"
            raise ValueError(f"position {position} of {len(ids)}: got {text}")

        tokens[position] = [token for _, token in likeliest]
        column[position] = [-negative for negative, _ in likeliest]

    return tokens, column


def read_completions(
    ids: list[int], reply: Reply, *, n: int, temperature: float, live: bool
) -> list[Completion]:
    """The ``n`` completions of a prompt. ``live``: the policy's. Raises ``ValueError`` if a
    completion or a logprob is missing."""
    if len(reply.choices) != n:
        raise ValueError(f"got {len(reply.choices)} choices, expected {n}")

    completions = []
    for choice in reply.choices:
        entries = choice.logprobs.content if choice.logprobs else []
        values = [math.nan if entry.logprob is None else entry.logprob for entry in entries]
        logprobs = np.array(values, np.float32)
        if len(logprobs) != len(choice.token_ids) or not np.isfinite(logprobs).all():
            known = int(np.isfinite(logprobs).sum())
            size = len(choice.token_ids)
            raise ValueError(f"got {known} finite logprobs of {size} sampled tokens")

        versions = np.full(len(logprobs), -1, np.int32)
        for span in choice.weight_versions or ():
            versions[span.start : span.end] = int(span.version)

        completion = Completion(
            prompt_ids=np.array(ids, np.int32),
            token_ids=np.array(choice.token_ids, np.int32),
            logprobs=logprobs,
            finish_reason=choice.finish_reason,
            temperature=temperature,
            policy_versions=versions if live else None,
        )
        completions.append(completion)

    return completions
