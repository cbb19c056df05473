"""From a client's JSON to vLLM's sampling parameters. vLLM checks temperature and the like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prime_rl_engine_kit.requests import (
    GenerateBody,
    Limits,
    check_choices,
    check_generate,
    check_sampling,
    given,
)

_PASSED = ("temperature", "top_p", "top_k", "min_p", "min_tokens", "ignore_eos", "seed", "n")
"""Keys that go to vLLM unchanged."""


@dataclass(frozen=True)
class SamplingPlan:
    """The request to vLLM, and how to read its answer."""

    token_ids: Sequence[int]
    params: Mapping[str, Any]
    """Arguments of vLLM's ``SamplingParams``."""
    logprobs: int | None
    """The client's value. 0 and 1 both mean the sampled token only."""
    prompt_logprobs: int | None
    nothing_wanted: bool = False
    """``max_tokens`` is 0. vLLM has to sample one token, which is dropped."""
    routes_start: int = 0
    """The first position whose routes are reported."""


def plan(body: GenerateBody, limits: Limits) -> SamplingPlan:
    """The request with every default filled in. Raises ``RequestError`` with the key and value."""
    check_generate(body, limits)
    fields = body.sampling_params
    num_logprobs = fields.logprobs
    check_sampling(fields, limits, logprobs=num_logprobs, prompt_logprobs=fields.prompt_logprobs)

    params: dict[str, Any] = {}
    for key in _PASSED:
        value = getattr(fields, key)
        if value is not None:
            params[key] = value

    if fields.top_k is not None:
        # One that cuts nothing may be any number, and vLLM sends 64 bits to its engine.
        params["top_k"] = min(fields.top_k, limits.vocab_size)
    room = max(limits.max_model_len - len(body.token_ids), 1)
    max_tokens = min(given(fields.max_tokens, room), room)
    params["max_tokens"] = max(max_tokens, 1)  # vLLM refuses 0
    check_choices(given(fields.n, 1), params["max_tokens"], num_logprobs)
    params["stop_token_ids"] = fields.stop_token_ids or []

    if num_logprobs is not None:
        # vLLM always gives the sampled token, and counts the alternatives beside it.
        params["logprobs"] = num_logprobs if num_logprobs > 1 else 0
    if fields.prompt_logprobs is not None:
        params["prompt_logprobs"] = fields.prompt_logprobs

    return SamplingPlan(
        token_ids=body.token_ids,
        params=params,
        logprobs=num_logprobs,
        prompt_logprobs=fields.prompt_logprobs,
        nothing_wanted=fields.max_tokens == 0,
        routes_start=fields.routed_experts_prompt_start or 0,
    )
