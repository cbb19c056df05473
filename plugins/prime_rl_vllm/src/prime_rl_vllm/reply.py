"""The reply of ``/inference/v1/generate``, in the format of ``renderers``."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from prime_rl_engine_kit.routes import Routes, joined, routes_entry

if TYPE_CHECKING:
    from prime_rl_vllm.generate import Done

MIN_LOGPROB = -9999.0
"""Replaces -inf in ``prompt_logprobs``: JSON has no infinities."""

Row = Mapping[int, Any]
"""One position: vLLM's ``Logprob`` by token id, the position's own token first."""


def reply(done: Done) -> bytes:
    output = done.output
    plan = done.plan
    choices = [_choice(each, done) for each in output.outputs]
    num_prompt = len(plan.token_ids)
    num_completion = sum(len(choice["token_ids"]) for choice in choices)
    return msgspec.json.encode(
        {
            "request_id": done.request_id,
            "model": done.model,
            "created": int(time.time()),
            "choices": choices,
            "prompt_logprobs": _prompt_logprobs(done),
            "usage": {
                "prompt_tokens": num_prompt,
                "completion_tokens": num_completion,
                "total_tokens": num_prompt + num_completion,
                "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens or 0},
            },
        }
    )


def _choice(choice: Any, done: Done) -> dict[str, Any]:
    logprobs = done.plan.logprobs
    nothing_wanted = done.plan.nothing_wanted
    token_ids = [] if nothing_wanted else list(choice.token_ids)
    reason = "length" if nothing_wanted else choice.finish_reason
    stop = choice.stop_reason
    if reason == "stop" and stop is None:  # the model's own end of sequence
        stop = token_ids[-1]
    spans = [] if nothing_wanted else choice.weight_versions or []
    return {
        "index": choice.index,
        "finish_reason": reason,
        "stop_reason": stop if reason == "stop" else None,
        "token_ids": token_ids,
        "logprobs": None
        if logprobs is None
        else {"content": _content(token_ids, choice.logprobs or (), logprobs)},
        "weight_versions": [
            {"version": span.version, "start": span.start, "end": span.end} for span in spans
        ],
        "routed_experts": None
        if nothing_wanted
        else routes_entry(_routes(choice, done.output), done.plan.routes_start),
    }


def _routes(choice: Any, output: Any) -> Routes | None:
    """[N, layers, k] of prompt and completion. vLLM has them where it was started with
    ``enable_return_routed_experts``: of both in the choice, or those of the prompt in the output.
    """
    routes = getattr(choice, "routed_experts", None)
    if routes is None:
        return None
    return joined(getattr(output, "prompt_routed_experts", None), routes)


def _content(
    token_ids: Sequence[int], rows: Sequence[Row], alternatives: int
) -> list[dict[str, Any]]:
    entries = []
    for token, row in zip(token_ids, rows, strict=False):
        top = _top(row, alternatives) if alternatives > 1 else None
        entries.append(_entry(token, row[token]) | {"top_logprobs": top})
    return entries


def _top(row: Row, count: int) -> list[dict[str, Any]]:
    likely = sorted(row.items(), key=lambda item: item[1].rank)[:count]
    return [_entry(token, score) for token, score in likely if math.isfinite(score.logprob)]


def _entry(token: int, score: Any) -> dict[str, Any]:
    return {"token": f"token_id:{token}", "token_id": token, "logprob": score.logprob}


def _prompt_logprobs(done: Done) -> list[dict[str, Any] | None] | None:
    """None for the first token, then entries keyed by token id."""
    if done.plan.prompt_logprobs is None:
        return None
    rows = done.output.prompt_logprobs or [None]
    return [None, *({str(t): _score(s) for t, s in row.items()} for row in rows[1:])]


def _score(score: Any) -> dict[str, Any]:
    return {"logprob": max(score.logprob, MIN_LOGPROB), "rank": score.rank}
