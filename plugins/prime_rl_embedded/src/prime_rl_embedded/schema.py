"""From a client's JSON to the engine's own types."""

from __future__ import annotations

import math
import uuid
from dataclasses import dataclass, replace

from prime_rl_embedded.requests import Request, SamplingParams
from prime_rl_engine_kit import requests as contract
from prime_rl_engine_kit.errors import RequestError
from prime_rl_engine_kit.requests import (
    GenerateBody,
    SamplingFields,
    check_choices,
    check_generate,
    check_sampling,
    given,
)


@dataclass(frozen=True)
class Limits(contract.Limits):
    """The limits of the served model, and its end-of-sequence tokens."""

    eos_token_ids: frozenset[int]


def resolve_sampling(
    fields: SamplingFields,
    prompt_length: int,
    limits: Limits,
    *,
    top_logprobs: int = 0,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Parameters with every default filled in. Raises ``RequestError`` with the key and value."""
    room = max(limits.max_model_len - prompt_length, 1)
    check_sampling(fields, limits, logprobs=top_logprobs, prompt_logprobs=prompt_logprobs)
    _check_distribution(fields)
    max_tokens = min(given(fields.max_tokens, room), room)
    check_choices(given(fields.n, 1), max_tokens, top_logprobs)
    stops = frozenset(fields.stop_token_ids or ())
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=given(fields.temperature, 1.0),
        top_p=given(fields.top_p, 1.0),
        top_k=min(max(given(fields.top_k, 0), 0), limits.vocab_size),
        min_p=given(fields.min_p, 0.0),
        stop_token_ids=stops if fields.ignore_eos else stops | limits.eos_token_ids,
        min_tokens=given(fields.min_tokens, 0),
        seed=fields.seed,
        top_logprobs=top_logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _check_distribution(fields: SamplingFields) -> None:
    """One rule per row: key, value, whether it is valid, expected range. NaN fails every rule."""
    temperature = given(fields.temperature, 1.0)
    top_k = fields.top_k
    rules = (
        ("temperature", temperature, 0 <= temperature < math.inf, "finite and at least 0"),
        ("top_p", fields.top_p, 0 < given(fields.top_p, 1.0) <= 1, "in (0, 1]"),
        ("top_k", top_k, given(top_k, 0) >= -1, "at least 1, or 0 or -1 for off"),
        ("min_p", fields.min_p, 0 <= given(fields.min_p, 0.0) <= 1, "in [0, 1]"),
    )
    for key, value, valid, expected in rules:
        if not valid:
            raise RequestError(f"{key} is {value}; it must be {expected}")


def generate_requests(body: GenerateBody, limits: Limits) -> list[Request]:
    """The ``n`` validated requests of a body."""
    check_generate(body, limits)
    fields = body.sampling_params
    wanted = given(fields.logprobs, 0)
    params = resolve_sampling(
        fields,
        len(body.token_ids),
        limits,
        top_logprobs=wanted if wanted > 1 or wanted < 0 else 0,
        prompt_logprobs=fields.prompt_logprobs,
    )
    params = replace(params, routes_start=fields.routed_experts_prompt_start or 0)
    return [
        Request(
            prompt=body.token_ids,
            params=choice,
            request_id=body.request_id or f"generate-{uuid.uuid4().hex}",
            salt=body.cache_salt,
            priority=body.priority or 0,
        )
        for choice in choices_of(params, fields.n or 1)
    ]


def choices_of(params: SamplingParams, count: int) -> list[SamplingParams]:
    """``count`` copies. With a seed, copy i gets seed + i."""
    if params.seed is None:
        return [params] * count
    return [replace(params, seed=params.seed + i) for i in range(count)]
