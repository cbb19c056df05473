"""The reply of ``/inference/v1/generate``, in the JSON format of vLLM and renderers."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import msgspec

from prime_rl_embedded.requests import Request, TokenScore
from prime_rl_engine_kit.routes import routes_entry

MIN_LOGPROB = -9999.0
"""Replaces -inf in ``prompt_logprobs``: JSON has no infinities."""


class TokenEntry(msgspec.Struct, omit_defaults=True):
    """One position of ``logprobs.content``."""

    token: str
    token_id: int
    logprob: float
    top_logprobs: list[TokenEntry] | None = None


def generate_response(requests: Sequence[Request], model: str, with_logprobs: bool) -> bytes:
    """The JSON for finished requests that share a prompt, one choice each.

    Encoded piece by piece: one call holds the interpreter until it returns, and the scores of a
    prompt can be hundreds of megabytes.
    """
    first = requests[0]
    scores = prompt_logprobs(first)
    return msgspec.json.encode(
        {
            "request_id": first.request_id,
            "model": model,
            "created": int(time.time()),
            "choices": [_encoded(_choice(i, r, with_logprobs)) for i, r in enumerate(requests)],
            "prompt_logprobs": None if scores is None else [_encoded(row) for row in scores],
            "usage": usage(requests),
        }
    )


def _encoded(part: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(part))


def usage(requests: Sequence[Request]) -> dict[str, object]:
    """Token counts as OpenAI reports them."""
    prompt = len(requests[0].prompt)
    completion = sum(len(r.token_ids) for r in requests)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": requests[0].cached_tokens},
    }


def weight_versions(request: Request) -> list[dict[str, object]]:
    """The policy version of each sampled token, as spans [start, end) without gaps."""
    return [
        {"version": str(version), "start": start, "end": end}
        for version, start, end in request.version_spans()
    ]


def prompt_logprobs(request: Request) -> list[dict[str, dict[str, float]] | None] | None:
    """None for the first token, then entries keyed by token id, the prompt's own token first."""
    if request.params.prompt_logprobs is None:
        return None
    return [
        None,
        *({str(s.token_id): _score(s) for s in row} for row in request.prompt_scores or ()),
    ]


def _score(score: TokenScore) -> dict[str, float]:
    return {"logprob": max(score.logprob, MIN_LOGPROB), "rank": score.rank}


def _choice(index: int, request: Request, with_logprobs: bool) -> dict[str, object]:
    return {
        "index": index,
        "finish_reason": request.finish_reason,
        "stop_reason": request.stop_reason,
        "token_ids": request.token_ids,
        "logprobs": {"content": _content(request)} if with_logprobs else None,
        "weight_versions": weight_versions(request),
        "routed_experts": routes_entry(request.routes, request.params.routes_start),
    }


def _content(request: Request) -> list[TokenEntry]:
    entries = [
        TokenEntry(f"token_id:{token}", token, logprob)
        for token, logprob in zip(request.token_ids, request.logprobs, strict=True)
    ]
    for entry, row in zip(entries, request.top_logprobs, strict=False):
        entry.top_logprobs = [
            TokenEntry(f"token_id:{s.token_id}", s.token_id, s.logprob)
            for s in row
            if math.isfinite(s.logprob)
        ]

    return entries
