"""The JSON that clients send, and its validation into the engine's own types.

Unknown keys are ignored, as vLLM does; keys that would change the distribution and aren't offered
are refused, because ignoring them would return logprobs of another distribution than the client
believes.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from prime_rl_embedded.errors import RequestError
from prime_rl_embedded.requests import Request, SamplingParams

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
}
"""Keys that aren't offered, and the values besides null at which they do nothing."""

Body = TypeVar("Body")
Value = TypeVar("Value")


class SamplingFields(msgspec.Struct, kw_only=True):
    """What every route that samples understands. None: not given."""

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
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    structured_outputs: Any = None
    logits_processors: Any = None


class GenerateSampling(SamplingFields, kw_only=True):
    """``sampling_params`` of ``/inference/v1/generate``."""

    logprobs: int | None = None
    """0 or 1: of the sampled token; k > 1: of the k most likely ones too."""
    prompt_logprobs: int | None = None
    stop: str | list[str] | None = None


class GenerateBody(msgspec.Struct, kw_only=True):
    """``POST /inference/v1/generate``."""

    token_ids: list[int]
    sampling_params: GenerateSampling = msgspec.field(default_factory=GenerateSampling)
    model: str | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    priority: int | None = None
    stream: bool | None = None
    features: Any = None
    content_parts: Any = None


class UpdateBody(msgspec.Struct, kw_only=True):
    """``POST /update_weights``."""

    weight_dir: str
    version: int | None = None
    """None: one more than the current version."""


@dataclass(frozen=True)
class Limits:
    """What the served model can take."""

    model_name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]


def decode(data: bytes, kind: type[Body]) -> Body:
    """JSON into a body. Raises ``RequestError`` that says where and what."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"bad request body: {error}") from error


def check_model(name: str | None, limits: Limits) -> None:
    if name is not None and name != limits.model_name:
        raise RequestError(
            f"the model {name!r} does not exist; this engine serves {limits.model_name!r}", 404
        )


def check_prompt(token_ids: Sequence[int], limits: Limits, *, scoring: bool = False) -> None:
    """Refuse prompts that are empty, too long, or out of the vocabulary.

    A prompt has to leave room for a token, unless it only is to be scored: what follows its last
    token can be sampled without ever being fed, so it needs no room.
    """
    length = len(token_ids)
    if length == 0:
        raise RequestError("token_ids is empty; a prompt has at least one token")
    if scoring and length > limits.max_model_len:
        raise RequestError(
            f"the prompt to score has {length} tokens; max_model_len is {limits.max_model_len}"
        )
    if not scoring and length >= limits.max_model_len:
        raise RequestError(
            f"the prompt has {length} tokens; at most {limits.max_model_len - 1} "
            f"leave room for one more (max_model_len is {limits.max_model_len})"
        )
    if min(token_ids) < 0 or max(token_ids) >= limits.vocab_size:
        position, token = next(
            (i, t) for i, t in enumerate(token_ids) if not 0 <= t < limits.vocab_size
        )
        raise RequestError(
            f"token_ids[{position}] is {token}; the vocabulary has ids 0 to {limits.vocab_size - 1}"
        )


def resolve_sampling(
    fields: SamplingFields,
    prompt_length: int,
    limits: Limits,
    *,
    top_logprobs: int = 0,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Parameters with every default filled in. Raises ``RequestError``: the key and its value."""
    room = max(limits.max_model_len - prompt_length, 1)
    _check_offered(fields)
    _check_values(fields, limits, top_logprobs, prompt_logprobs)
    if fields.max_tokens == 0 and prompt_logprobs is None:
        raise RequestError(
            "max_tokens is 0; it must be at least 1, unless prompt_logprobs are wanted"
        )
    stops = frozenset(fields.stop_token_ids or ())
    return SamplingParams(
        max_tokens=min(_given(fields.max_tokens, room), room),
        temperature=_given(fields.temperature, 1.0),
        top_p=_given(fields.top_p, 1.0),
        top_k=max(_given(fields.top_k, 0), 0),
        min_p=_given(fields.min_p, 0.0),
        stop_token_ids=stops if fields.ignore_eos else stops | limits.eos_token_ids,
        min_tokens=_given(fields.min_tokens, 0),
        seed=fields.seed,
        top_logprobs=top_logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _given(value: Value | None, default: Value) -> Value:
    return default if value is None else value


def _check_offered(fields: SamplingFields) -> None:
    for key, neutral in _NEUTRAL.items():
        value = getattr(fields, key)
        if value is not None and value not in neutral:
            raise RequestError(f"{key} is {value!r}; this engine doesn't offer it: leave it out")


def _check_values(
    fields: SamplingFields, limits: Limits, top_logprobs: int, prompt_logprobs: int | None
) -> None:
    """One row a rule: key, value, does it hold, what was expected. NaN fails comparisons."""
    temperature = _given(fields.temperature, 1.0)
    top_k, max_tokens = fields.top_k, fields.max_tokens
    rules = (
        ("temperature", temperature, 0 <= temperature < math.inf, "finite and at least 0"),
        ("top_p", fields.top_p, 0 < _given(fields.top_p, 1.0) <= 1, "in (0, 1]"),
        ("top_k", top_k, _given(top_k, 0) >= -1, "at least 1, or 0 or -1 for off"),
        ("min_p", fields.min_p, 0 <= _given(fields.min_p, 0.0) <= 1, "in [0, 1]"),
        ("max_tokens", max_tokens, _given(max_tokens, 1) >= 0, "at least 1"),
        ("min_tokens", fields.min_tokens, _given(fields.min_tokens, 0) >= 0, "at least 0"),
        ("n", fields.n, 1 <= _given(fields.n, 1) <= MAX_CHOICES, f"in [1, {MAX_CHOICES}]"),
        _alternatives_rule("logprobs", top_logprobs),
        _alternatives_rule("prompt_logprobs", prompt_logprobs or 0),
    )
    for key, value, holds, expected in rules:
        if not holds:
            raise RequestError(f"{key} is {value}; it must be {expected}")
    for token in fields.stop_token_ids or ():
        if not 0 <= token < limits.vocab_size:
            raise RequestError(
                f"stop_token_ids holds {token}; the vocabulary has ids 0 to {limits.vocab_size - 1}"
            )


def _alternatives_rule(key: str, count: int) -> tuple[str, int, bool, str]:
    return key, count, 0 <= count <= MAX_ALTERNATIVES, f"in [0, {MAX_ALTERNATIVES}]"


def generate_requests(body: GenerateBody, limits: Limits) -> list[Request]:
    """The ``n`` validated requests of a body. With a seed, choice i gets seed + i."""
    check_model(body.model, limits)
    fields = body.sampling_params
    scoring = fields.prompt_logprobs is not None and _given(fields.max_tokens, 2) <= 1
    check_prompt(body.token_ids, limits, scoring=scoring)
    if body.stream:
        raise RequestError("stream is true; this route answers whole completions only")
    if body.features is not None or body.content_parts is not None:
        raise RequestError("features and content_parts: this engine takes text tokens only")
    if fields.stop:
        raise RequestError("stop: this route knows tokens, not strings: use stop_token_ids")
    wanted = _given(fields.logprobs, 0)
    params = resolve_sampling(
        fields,
        len(body.token_ids),
        limits,
        top_logprobs=wanted if wanted > 1 or wanted < 0 else 0,
        prompt_logprobs=fields.prompt_logprobs,
    )
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
    """``count`` copies that differ in their seed, if one is given."""
    if params.seed is None:
        return [params] * count
    return [replace(params, seed=params.seed + i) for i in range(count)]
