"""From a client's JSON to vLLM's sampling parameters. vLLM checks temperature and the like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prime_rl_engine_kit.requests import (
    GenerateBody,
    Limits,
    check_generate,
    check_sampling,
    given,
)

_PASSED = ("temperature", "top_p", "top_k", "min_p", "min_tokens", "ignore_eos", "seed", "n")
"""Keys that go to vLLM unchanged."""


@dataclass(frozen=True)
class Plan:
    """The request to vLLM, and how to read its answer."""

    token_ids: Sequence[int]
    params: Mapping[str, Any]
    """Arguments of vLLM's ``SamplingParams``."""
    logprobs: int | None
    """The client's value. 0 and 1 both mean the sampled token only."""
    prompt_logprobs: int | None
    nothing_wanted: bool = False
    """``max_tokens`` is 0. vLLM has to sample one token, which is dropped."""


def plan(body: GenerateBody, limits: Limits) -> Plan:
    """The request with every default filled in. Raises ``RequestError`` with the key and value."""
    check_generate(body, limits)
    fields = body.sampling_params
    prompt = body.token_ids
    wanted = body.sampling_params.logprobs
    check_sampling(fields, limits, wanted, fields.prompt_logprobs)
    params = {k: value for k in _PASSED if (value := getattr(fields, k)) is not None}
    room = max(limits.max_model_len - len(prompt), 1)
    params["max_tokens"] = max(min(given(fields.max_tokens, room), room), 1)
    params["stop_token_ids"] = fields.stop_token_ids or []
    if wanted is not None:
        params["logprobs"] = wanted if wanted > 1 else 0
    if fields.prompt_logprobs is not None:
        params["prompt_logprobs"] = fields.prompt_logprobs
    return Plan(prompt, params, wanted, fields.prompt_logprobs, fields.max_tokens == 0)
