"""Tokens and logprobs, compared with transformers' own forward and ``generate``."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from prime_rl_embedded.testing import VOCAB_SIZE, Served

Score = Callable[[list[int]], torch.Tensor]


def prompts(count: int, seed: int, longest: int = 60) -> list[list[int]]:
    rng = random.Random(seed)
    return [
        [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, longest))] for _ in range(count)
    ]


def test_greedy_tokens_equal_transformers_generate_while_rows_come_and_go(
    server: Served, reference: Any
) -> None:
    """30 requests over 8 slots, prompts of 1 to 60 and answers of 1 to 40 tokens."""
    lengths = [1 + (7 * i) % 40 for i in range(30)]
    questions = prompts(30, seed=1)

    def ask(i: int) -> list[int]:
        reply = server.generate(questions[i], temperature=0, max_tokens=lengths[i])
        ids: list[int] = reply["choices"][0]["token_ids"]
        return ids

    with ThreadPoolExecutor(30) as pool:
        answers = list(pool.map(ask, range(30)))
    for question, length, answer in zip(questions, lengths, answers, strict=True):
        expected = reference.generate(
            torch.tensor([question]),
            attention_mask=torch.ones(1, len(question), dtype=torch.long),
            do_sample=False,
            max_new_tokens=length,
            pad_token_id=0,
        )
        assert answer == expected[0, len(question) :].tolist()


def test_logprobs_are_those_of_a_forward_over_the_whole_sequence(
    server: Served, score: Score
) -> None:
    for prompt in prompts(4, seed=2):
        choice = server.generate(prompt, max_tokens=50, seed=5)["choices"][0]
        tokens = choice["token_ids"]
        expected = score(prompt + tokens)[len(prompt) - 1 : -1]
        for i, entry in enumerate(choice["logprobs"]["content"]):
            assert entry["token"] == f"token_id:{tokens[i]}"
            assert entry["token_id"] == tokens[i]
            assert entry["logprob"] == pytest.approx(float(expected[i, tokens[i]]), abs=1e-5)


@pytest.mark.parametrize(
    ("params", "temperature", "top_k"),
    [({"temperature": 0.7}, 0.7, 0), ({"temperature": 1.5, "top_k": 5}, 1.5, 5)],
)
def test_logprobs_follow_temperature_and_top_k(
    server: Served, score: Score, params: dict[str, float], temperature: float, top_k: int
) -> None:
    choice = server.generate([1, 2, 3], max_tokens=20, seed=1, **params)["choices"][0]
    tokens = choice["token_ids"]
    logits = score([1, 2, 3, *tokens])[2:-1] / temperature
    if top_k:
        logits[logits < logits.topk(top_k).values[:, -1:]] = -math.inf
    expected = logits.log_softmax(-1)
    for i, entry in enumerate(choice["logprobs"]["content"]):
        assert entry["logprob"] == pytest.approx(float(expected[i, tokens[i]]), abs=1e-5)


def test_greedy_logprobs_are_of_the_distribution_at_temperature_one(
    server: Served, score: Score
) -> None:
    choice = server.generate([9, 8], temperature=0, max_tokens=3, top_p=0.1)["choices"][0]
    expected = score([9, 8, *choice["token_ids"]])[1:-1].max(-1).values
    found = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert found == pytest.approx(expected.tolist(), abs=1e-5)


def test_a_stop_token_ends_the_answer_and_is_part_of_it(server: Served) -> None:
    free = server.generate([5, 6, 7], temperature=0, max_tokens=30)["choices"][0]
    assert free["finish_reason"] == "length" and free["stop_reason"] is None
    stop = free["token_ids"][10]
    first = free["token_ids"].index(stop)
    choice = server.generate([5, 6, 7], temperature=0, max_tokens=30, stop_token_ids=[stop])
    choice = choice["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == stop
    assert choice["token_ids"] == free["token_ids"][: first + 1]
    assert len(choice["logprobs"]["content"]) == first + 1


def test_min_tokens_keeps_stop_tokens_from_being_sampled(server: Served) -> None:
    every_other = list(range(0, VOCAB_SIZE, 2))
    choice = server.generate([5], max_tokens=40, min_tokens=12, stop_token_ids=every_other, seed=3)[
        "choices"
    ][0]
    assert all(token % 2 == 1 for token in choice["token_ids"][:12])
    assert choice["token_ids"][-1] % 2 == 0 and choice["finish_reason"] == "stop"


def test_without_max_tokens_the_answer_fills_the_context(server: Served) -> None:
    reply = server.generate([1] * 500)
    assert reply["usage"]["completion_tokens"] == 12
    assert reply["usage"]["total_tokens"] == 512
    assert server.generate([1] * 500, max_tokens=9999)["usage"]["completion_tokens"] == 12


def test_prompt_logprobs_have_the_token_itself_first_and_null_at_the_start(
    server: Served, score: Score
) -> None:
    prompt = prompts(1, seed=4)[0]
    reply = server.generate(prompt, max_tokens=1, prompt_logprobs=1)
    found, expected = reply["prompt_logprobs"], score(prompt)
    assert len(found) == len(prompt) and found[0] is None
    for i in range(1, len(prompt)):
        own = found[i][str(prompt[i])]
        assert next(iter(found[i])) == str(prompt[i])
        assert own["logprob"] == pytest.approx(float(expected[i - 1, prompt[i]]), abs=1e-5)
        assert own["rank"] == 1 + int((expected[i - 1] > expected[i - 1, prompt[i]]).sum())
        assert str(int(expected[i - 1].argmax())) in found[i]


def test_prompt_logprobs_zero_reports_the_prompts_own_tokens_only(server: Served) -> None:
    entries = server.generate([3, 4, 5], max_tokens=1, prompt_logprobs=0)["prompt_logprobs"]
    assert [None if e is None else list(e) for e in entries] == [None, ["4"], ["5"]]
    assert server.generate([3, 4, 5], max_tokens=1)["prompt_logprobs"] is None
    assert server.generate([3], max_tokens=1, prompt_logprobs=1)["prompt_logprobs"] == [None]


def test_more_than_one_logprob_reports_the_likeliest_tokens(server: Served, score: Score) -> None:
    choice = server.generate([3, 4, 5], max_tokens=1, logprobs=3)["choices"][0]
    top = choice["logprobs"]["content"][0]["top_logprobs"]
    expected = score([3, 4, 5])[-1].topk(3)
    assert [entry["token_id"] for entry in top] == expected.indices.tolist()
    assert [entry["logprob"] for entry in top] == pytest.approx(expected.values.tolist(), abs=1e-5)


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(server: Served) -> None:
    prompt = [10, 20, 30]
    alone = server.generate(prompt, max_tokens=30, seed=42)["choices"][0]["token_ids"]
    crowd = prompts(20, seed=6)

    def ask(i: int) -> list[int]:
        other = crowd[i] if i % 5 else prompt
        ids: list[int] = server.generate(other, max_tokens=30, seed=42)["choices"][0]["token_ids"]
        return ids

    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(ask, range(20)))
    assert [answers[i] == alone for i in range(0, 20, 5)] == [True] * 4
    assert server.generate(prompt, max_tokens=30, seed=43)["choices"][0]["token_ids"] != alone


def test_n_choices_differ_and_choice_i_has_seed_plus_i(server: Served) -> None:
    reply = server.generate([10, 20], max_tokens=20, seed=7, n=3)
    answers = [choice["token_ids"] for choice in reply["choices"]]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert len({tuple(answer) for answer in answers}) == 3
    assert answers[2] == server.generate([10, 20], max_tokens=20, seed=9)["choices"][0]["token_ids"]
    assert reply["usage"]["completion_tokens"] == 60


def test_the_reply_has_the_shape_that_clients_check(server: Served) -> None:
    body = {
        "model": "tiny",
        "token_ids": [1, 2, 3],
        "sampling_params": {"max_tokens": 4, "logprobs": 1, "skip_special_tokens": False, "x": 1},
        "cache_salt": "v0",
        "request_id": "mine",
        "priority": 3,
    }
    reply = server.post("/inference/v1/generate", body).json()
    assert reply["request_id"] == "mine" and reply["model"] == "tiny"
    choice = reply["choices"][0]
    assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": 4}]
    assert all(math.isfinite(entry["logprob"]) for entry in choice["logprobs"]["content"])
    assert reply["usage"] | {"prompt_tokens_details": None} == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": None,
    }
    without = server.post("/inference/v1/generate", body | {"sampling_params": {"max_tokens": 1}})
    assert without.json()["choices"][0]["logprobs"] is None


def test_64_requests_at_once_are_all_answered_over_8_slots(server: Served) -> None:
    before = server.metric("vllm:generation_tokens_total")
    questions = prompts(64, seed=8)

    def ask(prompt: list[int]) -> int:
        tokens: int = server.generate(prompt, max_tokens=10)["usage"]["completion_tokens"]
        return tokens

    with ThreadPoolExecutor(64) as pool:
        assert list(pool.map(ask, questions)) == [10] * 64
    assert server.metric("vllm:generation_tokens_total") - before == 640
