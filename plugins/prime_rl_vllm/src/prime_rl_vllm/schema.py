"""The JSON that clients send, and what vLLM is asked for in its place.

Unknown keys are ignored, as vLLM does; keys that would change the distribution in ways that the
trainer cannot follow are refused, because their logprobs would be of another distribution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from prime_rl_vllm.errors import RequestError

MAX_ALTERNATIVES = 20
MAX_CHOICES = 128
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "structured_outputs": (),
    "logits_processors": ([],),
    "stop": ("", []),
}
"""Keys that aren't offered, and the values besides null at which they do nothing."""
_PASSED = ("temperature", "top_p", "top_k", "min_p", "min_tokens", "ignore_eos", "seed", "n")
"""Keys that vLLM gets as they come."""


class Sampling(msgspec.Struct, kw_only=True):
    """``sampling_params``. None: not given."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    n: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    structured_outputs: Any = None
    logits_processors: Any = None
    stop: str | list[str] | None = None


class GenerateBody(msgspec.Struct, kw_only=True):
    """``POST /inference/v1/generate``."""

    token_ids: list[int]
    sampling_params: Sampling = msgspec.field(default_factory=Sampling)
    model: str | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    priority: int | None = None
    stream: bool | None = None
    features: Any = None
    content_parts: Any = None


@dataclass(frozen=True)
class Limits:
    """What the served model can take."""

    model_name: str
    max_model_len: int
    vocab_size: int


@dataclass(frozen=True)
class Plan:
    """What to ask vLLM, and how to read its answer."""

    token_ids: Sequence[int]
    params: Mapping[str, Any]
    """Of vLLM's ``SamplingParams``."""
    logprobs: int | None
    """As asked for: 0 or 1 of the sampled token only."""
    prompt_logprobs: int | None
    nothing_wanted: bool = False
    """``max_tokens`` is 0: the token that has to be sampled is thrown away."""


def plan(body: GenerateBody, limits: Limits) -> Plan:
    """Every default filled in. Raises ``RequestError``: the key and its value."""
    _check_body(body, limits)
    fields, prompt = body.sampling_params, body.token_ids
    _check_values(fields, limits)
    scoring = fields.prompt_logprobs is not None and _given(fields.max_tokens, 2) <= 1
    _check_prompt(prompt, limits, scoring)
    params = {k: value for k in _PASSED if (value := getattr(fields, k)) is not None}
    room = max(limits.max_model_len - len(prompt), 1)
    params["max_tokens"] = max(min(_given(fields.max_tokens, room), room), 1)
    params["stop_token_ids"] = fields.stop_token_ids or []
    wanted = fields.logprobs
    if wanted is not None:
        params["logprobs"] = wanted if wanted > 1 else 0
    if fields.prompt_logprobs is not None:
        params["prompt_logprobs"] = fields.prompt_logprobs
    return Plan(prompt, params, wanted, fields.prompt_logprobs, fields.max_tokens == 0)


def _check_body(body: GenerateBody, limits: Limits) -> None:
    if body.model is not None and body.model != limits.model_name:
        raise RequestError(
            f"the model {body.model!r} does not exist; this engine serves {limits.model_name!r}",
            404,
        )
    if body.stream:
        raise RequestError("stream is true; this route answers whole completions only")
    if body.features is not None or body.content_parts is not None:
        raise RequestError("features and content_parts: this route takes text tokens only")


def _check_prompt(token_ids: Sequence[int], limits: Limits, scoring: bool) -> None:
    length, most = len(token_ids), limits.max_model_len
    if length == 0:
        raise RequestError("token_ids is empty; a prompt has at least one token")
    if scoring and length > most:
        raise RequestError(f"the prompt to score has {length} tokens; max_model_len is {most}")
    if not scoring and length >= most:
        raise RequestError(
            f"the prompt has {length} tokens; at most {most - 1} leave room for one more "
            f"(max_model_len is {most})"
        )
    if min(token_ids) < 0 or max(token_ids) >= limits.vocab_size:
        position, token = next(
            (i, t) for i, t in enumerate(token_ids) if not 0 <= t < limits.vocab_size
        )
        raise RequestError(
            f"token_ids[{position}] is {token}; the vocabulary has ids 0 to {limits.vocab_size - 1}"
        )


def _check_values(fields: Sampling, limits: Limits) -> None:
    """What vLLM would take, or refuse with another reason. The rest is vLLM's to check."""
    for key, neutral in _NEUTRAL.items():
        value = getattr(fields, key)
        if value is not None and value not in neutral:
            raise RequestError(f"{key} is {value!r}; this route doesn't offer it: leave it out")
    rules = (
        ("max_tokens", fields.max_tokens, 0, None),
        ("min_tokens", fields.min_tokens, 0, None),
        ("n", fields.n, 1, MAX_CHOICES),
        ("logprobs", fields.logprobs, 0, MAX_ALTERNATIVES),
        ("prompt_logprobs", fields.prompt_logprobs, 0, MAX_ALTERNATIVES),
    )
    for key, number, low, high in rules:
        if number is not None and (number < low or (high is not None and number > high)):
            expected = f"at least {low}" if high is None else f"in [{low}, {high}]"
            raise RequestError(f"{key} is {number}; it must be {expected}")
    if fields.max_tokens == 0 and fields.prompt_logprobs is None:
        raise RequestError(
            "max_tokens is 0; it must be at least 1, unless prompt_logprobs are wanted"
        )
    for token in fields.stop_token_ids or ():
        if not 0 <= token < limits.vocab_size:
            raise RequestError(
                f"stop_token_ids holds {token}; the vocabulary has ids 0 to {limits.vocab_size - 1}"
            )


def _given(value: int | None, default: int) -> int:
    return default if value is None else value
