"""Checks of the routes: health, keys, and the format of errors."""

from __future__ import annotations

from typing import Any

import httpx

from prime_rl_devkit.engines.prompts import prompt_of
from prime_rl_devkit.engines.subject import GENERATE, EngineSubject
from prime_rl_devkit.verdicts import Broken, NotApplicable


def alive(engine: EngineSubject) -> None:
    """``/health`` has the current policy version; ``/v1/models`` has the model and its context
    length."""
    engine.meet()


def reply_shape(engine: EngineSubject) -> str:
    """A reply has the fields that rollouts read: a finite logprob for each token, version spans
    without gaps, and usage. It has no logprobs if none were requested."""
    sampled = engine.choice(prompt_of(engine, 5), max_tokens=4, seed=0)
    if len(sampled.token_ids) != 4:
        raise Broken(f"max_tokens is 4, end-of-sequence is ignored, and {sampled.token_ids} came")
    spans = [(str(engine.version), 0, 4)]
    if sampled.versions != spans:
        raise Broken(f"weight_versions are {sampled.versions}, expected {spans} by /health")
    engine.choice(prompt_of(engine, 5), max_tokens=1, logprobs=None)
    return f"serves {engine.model!r} with max_model_len {engine.max_model_len}"


def bad_requests(engine: EngineSubject) -> None:
    """An invalid request is refused with JSON that gives the reason, and other requests are not
    affected."""
    good = engine.body([1, 2, 3], max_tokens=1)
    sampling = good["sampling_params"]
    wrong: list[tuple[str, dict[str, Any], tuple[int, ...], str]] = [
        ("no token_ids", {"token_ids": ...}, (400, 422), "token_ids"),
        ("text for token_ids", {"token_ids": "abc"}, (400, 422), "token_ids"),
        ("an empty prompt", {"token_ids": []}, (400,), ""),
        ("a token id of 10^8", {"token_ids": [1, 10**8]}, (400,), str(10**8)),
        ("another model", {"model": "nobody"}, (404,), "nobody"),
        ("temperature -1", {"sampling_params": sampling | {"temperature": -1.0}}, (400,), "temp"),
        ("top_p 1.5", {"sampling_params": sampling | {"top_p": 1.5}}, (400,), "top_p"),
        ("a seed of 2^64", {"sampling_params": sampling | {"seed": 2**64}}, (400, 422), "seed"),
        ("max_tokens -1", {"sampling_params": sampling | {"max_tokens": -1}}, (400,), "max_tokens"),
    ]
    for what, change, statuses, word in wrong:
        body = {key: value for key, value in (good | change).items() if value is not ...}
        refused(engine.post(body), what, statuses=statuses, word=word)

    text = engine.http.post(GENERATE, content=b"{", headers=engine.headers())
    refused(text, "a body that is no JSON", statuses=(400, 422), word="")
    engine.reply([1, 2, 3], max_tokens=1)


def refused(answer: httpx.Response, what: str, statuses: tuple[int, ...], word: str) -> str:
    """The reason of a refusal. Raises ``Broken`` for any other answer."""
    place = f"{answer.request.url.path} with {what}"
    if answer.status_code not in statuses:
        expected = " or ".join(map(str, statuses))
        raise Broken(
            f"{place} answers {answer.status_code} {answer.text[:200]!r}, expected {expected}"
        )

    try:
        message = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError) as error:
        raise Broken(
            f"{place} answers {answer.status_code} {answer.text[:200]!r}; expected "
            '{"error": {"message": <the reason>, "type": ..., "code": ...}}'
        ) from error

    if not isinstance(message, str) or not message or word.lower() not in message.lower():
        raise Broken(
            f"{place} is refused with {message!r}; the reason should name {word or 'something'!r}"
        )

    return message


def overlong_prompt(engine: EngineSubject) -> None:
    """A prompt that fills the context is a 400 that names the lengths. Otherwise a completion may
    fill the rest, and does so without ``max_tokens``."""
    room = engine.max_model_len
    for length in (room, room + 10):
        body = engine.body(prompt_of(engine, length), max_tokens=1)
        refused(engine.post(body), f"{length} tokens", statuses=(400,), word=str(room))

    cases: list[tuple[int, dict[str, Any]]] = [(1, {}), (40, {}), (5, {"max_tokens": room})]
    for left, asked in cases:
        choice = engine.choice(prompt_of(engine, room - left), **asked)
        if len(choice.token_ids) != left or choice.finish_reason != "length":
            raise Broken(
                f"a prompt of {room - left} of {room} tokens, with {asked or 'no max_tokens'}: "
                f"{len(choice.token_ids)} tokens and {choice.finish_reason!r}, expected {left} and "
                "'length'"
            )


ADMIN_ROUTES = ("/pause", "/update_weights", "/resume")


def admin_key(engine: EngineSubject) -> None:
    """Pausing an engine or changing its weights needs the run's admin key."""
    engine.need_admin()
    routes = ADMIN_ROUTES if "sleep" in engine.lacks else (*ADMIN_ROUTES, "/sleep", "/wake_up")
    keys = [("no key", "", (401, 403)), ("a wrong key", "Bearer wrong", (401, 403))]
    if engine.api_key:
        keys.append(("the sampling key", f"Bearer {engine.api_key}", (401, 403)))
    for route in routes:
        for what, value, statuses in keys:
            headers = {"Authorization": value} if value else {}
            body = {"weight_dir": str(engine.model_folder), "version": engine.version + 1}
            answer = engine.http.post(route, json=body, headers=headers)
            engine.moved |= answer.is_success
            refused(answer, what, statuses=statuses, word="")

    engine.reply([1, 2], max_tokens=1)  # not paused
    before = engine.version
    engine.meet()
    if engine.version != before:
        raise Broken(f"a refused update has moved the version from {before} to {engine.version}")


def sampling_key(engine: EngineSubject) -> None:
    """An engine that was started with a sampling key refuses requests without it."""
    if not engine.api_key:
        raise NotApplicable("the engine was started without PRIME_RL_ENGINE_API_KEY")
    body = engine.body([1, 2], max_tokens=1)
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        what = "a wrong key" if headers else "no key"
        answer = engine.http.post(GENERATE, json=body, headers=headers)
        refused(answer, what, statuses=(401, 403), word="")


def command_line(engine: EngineSubject) -> None:
    """No key is on the command line, which every user of the machine can read."""
    if not engine.argv:
        raise NotApplicable("the kit did not start this engine")
    for name, key in (("admin", engine.admin_key), ("sampling", engine.api_key)):
        if key and any(key in word for word in engine.argv):
            raise Broken(f"the {name} key is in argv. Pass it by EngineCommand.env.")
