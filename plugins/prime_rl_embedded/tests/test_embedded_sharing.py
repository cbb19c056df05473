"""Identical prompts are prefilled once, unless their salt or weights differ."""

from __future__ import annotations

from typing import Any

import pytest

from prime_rl_embedded.testing import Served


def shared_tokens(server: Served, bodies: list[dict[str, Any]]) -> tuple[int, list[dict[str, Any]]]:
    """The number of copied tokens when these requests arrive together, and the replies in order."""
    from concurrent.futures import ThreadPoolExecutor

    before = server.metric("vllm:prefix_cache_hits_total")
    with ThreadPoolExecutor(len(bodies)) as pool:
        server.post("/pause", admin=True)
        waiting = server.metric("prime_rl:requests_received_total")
        futures = [pool.submit(server.post, "/inference/v1/generate", body) for body in bodies]
        server.wait_for("prime_rl:requests_received_total", waiting + len(bodies))
        server.post("/resume", admin=True)
        replies = [future.result().json() for future in futures]
    return int(server.metric("vllm:prefix_cache_hits_total") - before), replies


def body(prompt: list[int], salt: str | None = None, **params: Any) -> dict[str, Any]:
    params = {"max_tokens": 12, "logprobs": 1, "seed": 5} | params
    return {"token_ids": prompt, "sampling_params": params, "cache_salt": salt}


def test_a_group_is_prefilled_once_and_answers_as_if_alone(server: Served) -> None:
    """4 prompts of 40 tokens: 3 requests copy 39 and feed the last token again for its logits."""
    prompt = list(range(40))
    bodies = [body(prompt, "a", seed=seed) for seed in range(4)]
    alone = [
        server.post("/inference/v1/generate", b | {"cache_salt": f"alone {n}"}).json()
        for n, b in enumerate(bodies)
    ]
    copied, together = shared_tokens(server, bodies)
    assert copied == 3 * 39
    details = [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in together]
    assert sorted(details) == [0, 39, 39, 39]
    for one, other in zip(alone, together, strict=True):
        first, second = one["choices"][0], other["choices"][0]
        assert first["token_ids"] == second["token_ids"]
        assert logprobs(first) == pytest.approx(logprobs(second), abs=1e-5)


def logprobs(choice: dict[str, Any]) -> list[float]:
    return [entry["logprob"] for entry in choice["logprobs"]["content"]]


def test_another_salt_or_another_prompt_shares_nothing(server: Served) -> None:
    prompt = [9, *range(39)]
    bodies = [body(prompt, "a"), body(prompt, "b"), body(prompt), body([*prompt, 1], "a")]
    copied, replies = shared_tokens(server, bodies)
    assert copied == 0
    tokens = [reply["choices"][0]["token_ids"] for reply in replies]
    assert tokens[0] == tokens[1] == tokens[2]


def test_a_request_that_scores_its_prompt_computes_it(server: Served) -> None:
    bodies = [body([1, 2, 3, 4], "s"), body([1, 2, 3, 4], "s", prompt_logprobs=0)]
    copied, replies = shared_tokens(server, bodies)
    assert copied in (0, 3)  # 3 if the scoring request came first
    assert len(replies[1]["prompt_logprobs"]) == 4


def test_a_prompt_of_one_token_can_be_shared(server: Served) -> None:
    copied, replies = shared_tokens(server, [body([7]), body([7])])
    assert copied == 0
    assert replies[0]["choices"][0]["token_ids"] == replies[1]["choices"][0]["token_ids"]
