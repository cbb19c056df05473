"""Replies of an engine, read as strictly as the clients of rollouts do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prime_rl_devkit.verdicts import Broken

SENTINEL = -9999.0
"""vLLM's stand-in for minus infinity; clients refuse it among the sampled tokens."""


@dataclass(frozen=True)
class Choice:
    """One completion."""

    token_ids: list[int]
    logprobs: list[float]
    """Empty if none were requested."""
    top: list[dict[int, float]]
    """The most likely tokens of each position, in the order given; empty if none were requested."""
    finish_reason: str
    stop_reason: int | None
    versions: list[tuple[str, int, int]]
    """(policy version, start, end)."""


@dataclass(frozen=True)
class Reply:
    """The whole answer of one generate request."""

    choices: list[Choice]
    prompt_logprobs: list[dict[int, float]] | None
    """For each prompt token but the first, its own entry first."""
    cached_tokens: int | None


def read_reply(data: Any, body: Mapping[str, Any]) -> Reply:
    """Raises ``Broken`` with the invalid field."""
    params = body["sampling_params"]
    choices = _of(data, "choices", kind=list, where="the reply")
    wanted = params.get("n") or 1
    if len(choices) != wanted:
        raise Broken(f"n is {wanted} and the reply has {len(choices)} choices")
    read = [_choice(raw, i, params) for i, raw in enumerate(choices)]
    _usage(data, body, read)
    details = data["usage"].get("prompt_tokens_details") or {}
    scores = data.get("prompt_logprobs")
    return Reply(
        choices=sorted(read, key=lambda c: choices[read.index(c)]["index"]),
        prompt_logprobs=None if scores is None else _scores(scores, body["token_ids"]),
        cached_tokens=details.get("cached_tokens"),
    )


def _of(data: Any, key: str, kind: type, where: str) -> Any:
    value = data.get(key) if isinstance(data, Mapping) else None
    if not isinstance(value, kind):
        raise Broken(f"{where}: {key} is {value!r:.100}, expected a {kind.__name__}")
    return value


def _choice(raw: Any, place: int, params: Mapping[str, Any]) -> Choice:
    where = f"choices[{place}]"
    token_ids = _of(raw, "token_ids", kind=list, where=where)
    if raw.get("index") != place:
        raise Broken(f"{where}.index is {raw.get('index')!r}")
    finish = raw.get("finish_reason")
    if finish not in ("stop", "length"):
        raise Broken(f"{where}.finish_reason is {finish!r}, expected 'stop' or 'length'")
    logprobs, top = _logprobs(raw, token_ids, asked=params.get("logprobs"), where=where)
    return Choice(
        token_ids,
        logprobs,
        top=top,
        finish_reason=finish,
        stop_reason=raw.get("stop_reason"),
        versions=_versions(raw, token_ids, where),
    )


def _logprobs(
    raw: Mapping[str, Any], token_ids: Sequence[int], asked: int | None, where: str
) -> tuple[list[float], list[dict[int, float]]]:
    if asked is None:
        if raw.get("logprobs") is not None:
            raise Broken(f"{where}.logprobs is there without a request; expected null")
        return [], []

    content = _of(
        _of(raw, "logprobs", kind=dict, where=where),
        "content",
        kind=list,
        where=f"{where}.logprobs",
    )
    if len(content) != len(token_ids):
        raise Broken(f"{where} has {len(token_ids)} tokens and {len(content)} logprobs")
    for i, (entry, token) in enumerate(zip(content, token_ids, strict=True)):
        place = f"{where}.logprobs.content[{i}]"
        if entry.get("token") != f"token_id:{token}" or entry.get("token_id", token) != token:
            raise Broken(
                f"{place} is of {entry.get('token')!r} (token_id {entry.get('token_id')}), "
                f"expected 'token_id:{token}': clients match them to token_ids"
            )
        _finite(entry.get("logprob"), place)

    tops = [entry.get("top_logprobs") or [] for entry in content] if asked > 1 else []
    return (
        [float(entry["logprob"]) for entry in content],
        [{int(t["token_id"]): float(t["logprob"]) for t in row} for row in tops],
    )


def _finite(value: Any, place: str) -> None:
    sound = isinstance(value, int | float) and math.isfinite(value) and value != SENTINEL
    if not sound or value > 1e-4:
        raise Broken(f"{place}.logprob is {value!r}, expected a finite number, at most 0")


def _versions(raw: Any, token_ids: Sequence[int], where: str) -> list[tuple[str, int, int]]:
    spans = _of(raw, "weight_versions", kind=list, where=where)
    try:
        versions = [(str(s["version"]), int(s["start"]), int(s["end"])) for s in spans]
    except (KeyError, TypeError, ValueError) as error:
        raise Broken(
            f"{where}.weight_versions is {spans}; expected spans "
            '{"version": "3", "start": 0, "end": 5}'
        ) from error

    edges = [0, *(end for _, _, end in versions)]
    if [start for _, start, _ in versions] != edges[:-1] or edges[-1] != len(token_ids):
        raise Broken(
            f"{where}.weight_versions is {spans}; expected spans [start, end) that cover all "
            f"{len(token_ids)} tokens without gaps"
        )

    return versions


def _usage(data: Mapping[str, Any], body: Mapping[str, Any], choices: Sequence[Choice]) -> None:
    usage = _of(data, "usage", kind=dict, where="the reply")
    prompt = len(body["token_ids"])
    sampled = sum(len(c.token_ids) for c in choices)
    expected = {"prompt_tokens": prompt, "completion_tokens": sampled}
    reported = {key: usage.get(key) for key in expected}
    if reported != expected:
        raise Broken(f"usage is {reported}, expected {expected}")


def _scores(scores: Any, prompt: Sequence[int]) -> list[dict[int, float]]:
    """Without the first entry, which has to be null."""
    if not isinstance(scores, list) or len(scores) != len(prompt):
        shown = f"{len(scores)} entries" if isinstance(scores, list) else repr(scores)[:100]
        raise Broken(f"prompt_logprobs: {shown}, expected one for each of {len(prompt)} tokens")

    if scores[0] is not None:
        raise Broken(f"prompt_logprobs[0] is {scores[0]}; nothing comes before it: expected null")
    read = []
    for place, (entry, token) in enumerate(zip(scores[1:], prompt[1:], strict=True), start=1):
        ids = [*entry] if isinstance(entry, Mapping) else []
        if not ids or ids[0] != str(token):
            raise Broken(
                f"prompt_logprobs[{place}] has the keys {ids}; the prompt's own token "
                f"{str(token)!r} comes first"
            )
        read.append({int(key): float(value["logprob"]) for key, value in entry.items()})

    return read
