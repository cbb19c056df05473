"""The JSON of ``POST /inference/v1/generate`` and ``/update_weights``, and their errors.

Unknown keys are ignored, as vLLM does; unsupported keys that change the distribution are refused:
otherwise the logprobs would belong to another distribution than the client expects. The engine
itself checks values such as a temperature.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from prime_rl import WeightsError
from prime_rl_broadcast.group import BroadcastGroup
from prime_rl_engine_kit.body import MAX_BODY_BYTES
from prime_rl_engine_kit.errors import RequestError
from prime_rl_engine_kit.model_files import check_inside

MAX_ALTERNATIVES = 20
MAX_CHOICES = 128
MAX_PROMPT_ENTRIES = 2**22
"""Tokens times alternatives of one scored prompt: a reply of some 200 MB."""
MAX_SAMPLED_ENTRIES = 2**22
"""Choices times sampled tokens times alternatives of one request: a reply of some 400 MB."""
MAX_ANSWERS = 4096
"""Prompts times choices of one request."""
MAX_UPDATE_BYTES = 2**20
"""Most bytes of a body of ``/update_weights``."""
MAX_VERSION = 2**31 - 1
"""Highest version of a policy: replies and streams keep versions as int32."""
LOWEST = -(2**63)
HIGHEST = 2**63 - 1
"""Of a number that an engine may keep in 64 bits."""
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "structured_outputs": (),
    "logits_processors": ([],),
    "response_format": ({"type": "text"},),
    "guided_decoding": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "thinking_token_budget": (),
    "use_beam_search": (False,),
    "typical_p": (1,),
}
"""Unsupported keys, and the values besides null without an effect."""

Body = TypeVar("Body")
Value = TypeVar("Value")


class SamplingFields(msgspec.Struct, kw_only=True):
    """The keys of every route that samples. None: not given."""

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
    response_format: Any = None
    guided_decoding: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    thinking_token_budget: Any = None
    use_beam_search: Any = None
    typical_p: Any = None


class GenerateSampling(SamplingFields, kw_only=True):
    """``sampling_params`` of ``/inference/v1/generate``."""

    logprobs: int | None = None
    """0 or 1: of the sampled token; k > 1: of the k most likely ones too."""
    prompt_logprobs: int | None = None
    stop: str | list[str] | None = None
    routed_experts_prompt_start: int | None = None
    """Leave out the routes of tokens before this one: the client has them from earlier turns."""


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
    meeting: BroadcastGroup | None = None
    """The group in which the trainer sends the weights from its memory; ``weight_dir`` is then
    empty."""


@dataclass(frozen=True)
class Limits:
    """The limits of the served model."""

    model_name: str
    max_model_len: int
    vocab_size: int

    @property
    def max_body_bytes(self) -> int:
        """Most bytes of a request with one prompt. Decoding holds the event loop, so what cannot
        fit the context is not decoded: a token takes a few bytes, as text or as a number."""
        return min(MAX_BODY_BYTES, 4 * 2**20 + 64 * self.max_model_len)


def decode(data: bytes, kind: type[Body]) -> Body:
    """JSON into a body. Raises ``RequestError`` with the key and the fault."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"bad request body: {error}") from error


def decode_update(data: bytes, roots: Sequence[Path] | None, num_workers: int = 1) -> UpdateBody:
    """The body of ``/update_weights``. Raises ``RequestError`` with the key and the fault.

    ``roots``: what it names lies in one of these folders; None: anywhere. ``num_workers``: of this
    engine.
    """
    body = decode(data, UpdateBody)
    if body.version is not None and not 0 <= body.version <= MAX_VERSION:
        raise RequestError(f"version is {body.version}; it must be in [0, {MAX_VERSION}]")
    if body.meeting is None:
        return body

    meeting = body.meeting
    last = meeting.world_size - num_workers
    if not 1 <= meeting.rank <= last:
        raise RequestError(
            f"meeting.rank is {meeting.rank} and meeting.world_size {meeting.world_size}; rank 0 "
            f"is the trainer's, and this engine has {num_workers} workers"
        )

    if not 0 < meeting.timeout < math.inf:
        raise RequestError(f"meeting.timeout is {meeting.timeout}; it must be finite and above 0")
    for key, folder in (("directory", meeting.directory), ("group", meeting.group)):
        try:
            check_inside(folder, roots)
        except WeightsError as error:
            raise RequestError(f"meeting.{key}: {error}") from error

    return body


def given(value: Value | None, default: Value) -> Value:
    """The value, or its default."""
    return default if value is None else value


def check_generate(body: GenerateBody, limits: Limits) -> None:
    """Check a body except its sampling parameters. Raises ``RequestError``."""
    check_model(body.model, limits)
    fields = body.sampling_params
    scoring = fields.prompt_logprobs is not None and given(fields.max_tokens, 2) <= 1
    check_prompt(body.token_ids, limits, scoring=scoring)
    check_entries(len(body.token_ids), fields.prompt_logprobs, key="prompt_logprobs")
    if not LOWEST <= given(body.priority, 0) <= HIGHEST:
        raise RequestError(f"priority is {body.priority}; it must be in [{LOWEST}, {HIGHEST}]")
    if body.stream:
        raise RequestError("stream is true; this route answers whole completions only")
    if body.features is not None or body.content_parts is not None:
        raise RequestError("features and content_parts: this engine takes text tokens only")
    if fields.stop:
        raise RequestError(
            f"stop is {reprlib.repr(fields.stop)}; this route knows tokens, not strings: "
            "use stop_token_ids"
        )


def check_entries(num_tokens: int, alternatives: int | None, key: str = "logprobs") -> None:
    """Refuse a prompt whose scores are too large for an answer. Raises ``RequestError``."""
    most = MAX_PROMPT_ENTRIES // num_tokens
    if given(alternatives, 0) > most:
        raise RequestError(
            f"{key} is {alternatives}; at most {most} of each of {num_tokens} tokens fit an answer"
        )


def check_choices(num_choices: int, max_tokens: int, alternatives: int | None) -> None:
    """Refuse more alternatives per token than an answer can hold. ``max_tokens``: the limit of
    each choice. Raises ``RequestError``."""
    entries = num_choices * max_tokens * given(alternatives, 0)
    if entries > MAX_SAMPLED_ENTRIES:
        raise RequestError(
            f"{num_choices} choices of up to {max_tokens} tokens with {alternatives} alternatives "
            f"each are {entries:,} entries; at most {MAX_SAMPLED_ENTRIES:,} fit an answer. Lower "
            "max_tokens, n or the number of logprobs"
        )


def check_model(name: str | None, limits: Limits) -> None:
    """Raises ``RequestError`` (404) for any model but the served one."""
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
    most = limits.max_model_len
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


def check_sampling(
    fields: SamplingFields, limits: Limits, logprobs: int | None, prompt_logprobs: int | None
) -> None:
    """Refuse unsupported keys and integers out of bounds. Raises ``RequestError``."""
    for key, neutral in _NEUTRAL.items():
        value = getattr(fields, key)
        if value is not None and value not in neutral:
            shown = reprlib.repr(value)
            raise RequestError(f"{key} is {shown}; this engine doesn't offer it: leave it out")

    rules = (
        ("max_tokens", fields.max_tokens, 0, None),
        ("min_tokens", fields.min_tokens, 0, None),
        ("n", fields.n, 1, MAX_CHOICES),
        ("logprobs", logprobs, 0, MAX_ALTERNATIVES),
        ("prompt_logprobs", prompt_logprobs, 0, limits.vocab_size),
        # Choice i gets the seed plus i.
        ("seed", fields.seed, LOWEST, HIGHEST - given(fields.n, 1) + 1),
    )
    for key, number, low, high in rules:
        if number is not None and (number < low or (high is not None and number > high)):
            expected = f"at least {low}" if high is None else f"in [{low}, {high}]"
            raise RequestError(f"{key} is {number}; it must be {expected}")

    if fields.max_tokens == 0 and prompt_logprobs is None:
        raise RequestError(
            "max_tokens is 0; it must be at least 1, unless prompt_logprobs are wanted"
        )

    start = getattr(fields, "routed_experts_prompt_start", None)
    if start is not None and start < 0:
        raise RequestError(f"routed_experts_prompt_start is {start}; it must be at least 0")

    stops = fields.stop_token_ids or ()
    if len(stops) > limits.vocab_size:
        raise RequestError(
            f"stop_token_ids has {len(stops)} tokens; the vocabulary has {limits.vocab_size}"
        )

    for token in (min(stops, default=0), max(stops, default=0)):
        if not 0 <= token < limits.vocab_size:
            raise RequestError(
                f"stop_token_ids holds {token}; the vocabulary has ids 0 to {limits.vocab_size - 1}"
            )
