"""The batch route answers what ``/inference/v1/generate`` answers, each request apart."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest

from prime_rl_embedded.testing import Served
from prime_rl_engine_kit.batch import (
    ABORT_ROUTE,
    ROUTE,
    Abort,
    Answer,
    BatchRequest,
    RequestBatch,
    bytes_to_ids,
    ids_to_bytes,
    logprobs_to_bytes,
    take_answers,
)


def ask(server: Served, *requests: BatchRequest) -> dict[int, Answer]:
    reply = server.http.post(ROUTE, content=msgspec.msgpack.encode(RequestBatch([*requests])))
    assert reply.status_code == 200, reply.text
    return {answer.index: answer for answer in take_answers(bytearray(reply.content))}


def test_answers_equal_those_of_single_requests(server: Served) -> None:
    prompts = [[5, 6, 7], [5, 6, 7], [9] * 20]
    wanted = [{"temperature": 1.0, "max_tokens": 4 + 6 * i, "seed": i} for i in range(3)]
    answers = ask(
        server,
        *(
            BatchRequest(request_id=f"same-{i}", token_ids=ids_to_bytes(ids), sampling_params=given)
            for i, (ids, given) in enumerate(zip(prompts, wanted, strict=True))
        ),
    )
    for i, (ids, given) in enumerate(zip(prompts, wanted, strict=True)):
        (choice,) = server.generate(ids, **given)["choices"]
        assert bytes_to_ids(answers[i].token_ids) == choice["token_ids"]
        assert answers[i].finish_reason == choice["finish_reason"] == "length"
        given_logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        found = np.frombuffer(answers[i].logprobs, "<f4")
        np.testing.assert_allclose(found, given_logprobs, atol=1e-5)
        spans = [(int(s["version"]), s["start"], s["end"]) for s in choice["weight_versions"]]
        assert answers[i].versions == spans


@pytest.mark.parametrize(
    ("sampling", "ids", "reason"),
    [
        ({"temperature": -1.0}, [5], "temperature is -1.0"),
        ({"max_tokens": "many"}, [5], "Expected `int"),
        ({"prompt_logprobs": 0}, [5], "use /inference/v1/generate"),
        ({}, [], "token_ids is empty"),
    ],
)
def test_a_bad_request_fails_alone(
    server: Served, sampling: dict[str, object], ids: list[int], reason: str
) -> None:
    bad = BatchRequest(request_id="bad", token_ids=ids_to_bytes(ids), sampling_params=sampling)
    fine = BatchRequest(
        request_id="fine", token_ids=ids_to_bytes([5]), sampling_params={"max_tokens": 2}
    )
    answers = ask(server, bad, fine)
    assert (answers[0].status, answers[1].status) == (400, 200)
    assert reason in answers[0].error
    assert len(bytes_to_ids(answers[1].token_ids)) == 2


@pytest.mark.parametrize("paused", [False, True], ids=["running", "waiting"])
def test_a_request_is_aborted_by_its_id(server: Served, paused: bool) -> None:
    """The abort can arrive before the batch: it is sent until the engine knows the request.
    A paused engine has sampled no token of it."""
    if paused:
        server.post("/pause", admin=True)
    long = BatchRequest(
        request_id=(name := f"long-{paused}"),
        token_ids=ids_to_bytes([5]),
        sampling_params={"max_tokens": 100_000, "ignore_eos": True},
    )
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(ask, server, long)
        aborted = 0
        while not aborted and not reply.done():
            body = msgspec.msgpack.encode(Abort([name]))
            aborted = server.http.post(ABORT_ROUTE, content=body).json()["aborted"]
        answer = reply.result()[0]
    assert answer.finish_reason in ("abort", "length")
    if paused:
        server.post("/resume", admin=True)
        assert (answer.finish_reason, answer.token_ids, answer.versions) == ("abort", b"", [])


def test_logprobs_keep_their_float32_bits() -> None:
    value = np.float32(-1.2345678)
    assert np.frombuffer(logprobs_to_bytes([float(value)]), "<f4")[0] == value
