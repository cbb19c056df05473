"""Programs of the tests, and what their rollouts have to be."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from scripted_replies import ScriptedEngine

from prime_rl.env.episode import RolloutResult
from prime_rl.env.traces import build_samples

Play = Callable[..., Awaitable[RolloutResult]]

ASK = """
import json, os, sys, urllib.request, urllib.error

def post(path, body, key=os.environ["OPENAI_API_KEY"], **headers):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + path,
        json.dumps(body).encode(),
        {"Authorization": "Bearer " + key, "Content-Type": "application/json", **headers},
    )
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)

def chat(messages, **more):
    body = {"model": "gpt-4o", "messages": messages, **more}
    return post("/chat/completions", body)["choices"][0]["message"]

def user(text):
    return {"role": "user", "content": text}
"""
"""A client without a package, so that a test takes a tenth of a second."""


def info_of(result: RolloutResult) -> dict[str, Any]:
    found: dict[str, Any] = result.info["program"]
    return found


def engine_calls(engine: ScriptedEngine) -> list[tuple[list[int], list[int]]]:
    """``(prompt ids, reply ids)`` of each request, as the engine saw and answered them."""
    calls = []
    for body in engine.bodies:
        prompt = body["token_ids"]
        reply = engine._choice(prompt)["token_ids"]
        calls.append((prompt, reply))
    return calls


def check_tokens(result: RolloutResult, engine: ScriptedEngine) -> int:
    """What would train is what the engine sampled, in the context in which it did, once. Computed
    from the engine's log alone. Returns the number of samples."""
    calls = engine_calls(engine)
    samples = build_samples(result.branches, 1.0)
    whole = [prompt + reply for prompt, reply in calls]
    expected = {tuple(context) for context in whole if not is_extended(context, whole)}
    assert {tuple(sample.token_ids) for sample in samples} == expected
    assert len(samples) == len(expected)

    trained = 0
    for sample in samples:
        ids = list(sample.token_ids)
        mask = [False] * len(ids)
        logprobs = [0.0] * len(ids)
        for prompt, reply in calls:
            if ids[: len(prompt) + len(reply)] == prompt + reply:
                for place in range(len(reply)):
                    mask[len(prompt) + place] = True
                    logprobs[len(prompt) + place] = -0.25 * (place + 1)
        repeats = sample.is_repeat if sample.is_repeat is not None else [False] * len(ids)
        both = [own or again for own, again in zip(sample.loss_mask, repeats, strict=True)]
        assert all(mine for mine, sampled in zip(both, mask, strict=True) if sampled)
        assert not any(own and not s for own, s in zip(sample.loss_mask, mask, strict=True))
        for place, own in enumerate(sample.loss_mask):
            assert not own or sample.inference_logprobs[place] == logprobs[place]
        trained += int(sample.loss_mask.sum())

    assert trained == sum(len(reply) for _, reply in calls)
    return len(samples)


def is_extended(context: list[int], others: list[list[int]]) -> bool:
    """Whether a later request continues this one, token by token."""
    return any(len(o) > len(context) and o[: len(context)] == context for o in others)
