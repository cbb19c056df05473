"""Bad requests are refused with the reason, and a client that disconnects frees its slot."""

from __future__ import annotations

import json
import select
import socket
from typing import Any

import pytest

from prime_rl_embedded.testing import Served


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ({"token_ids": []}, 400, "token_ids is empty"),
        ({"token_ids": [1] * 512}, 400, "the prompt has 512 tokens; at most 511 leave room"),
        ({"token_ids": [1, 265]}, 400, "token_ids[1] is 265; the vocabulary has ids 0 to 264"),
        ({"token_ids": [-1]}, 400, "token_ids[0] is -1"),
        ({"token_ids": "hello"}, 400, "Expected `array`, got `str` - at `$.token_ids`"),
        ({"token_ids": [1.5]}, 400, "Expected `int`, got `float` - at `$.token_ids"),
        ({}, 400, "missing required field `token_ids`"),
        ([], 400, "Expected `object`, got `array`"),
        ({"token_ids": [1], "model": "other"}, 404, "the model 'other' does not exist"),
        ({"token_ids": [1], "stream": True}, 400, "stream is true"),
        ({"token_ids": [1], "features": {}}, 400, "text tokens only"),
        ({"token_ids": [1], "sampling_params": []}, 400, "$.sampling_params"),
        ({"temperature": -0.5}, 400, "temperature is -0.5; it must be finite and at least 0"),
        ({"temperature": "hot"}, 400, "Expected `float | null`, got `str`"),
        ({"top_p": 0}, 400, "top_p is 0.0; it must be in (0, 1]"),
        ({"top_p": 1.1}, 400, "top_p is 1.1"),
        ({"top_k": -2}, 400, "top_k is -2; it must be at least 1, or 0 or -1 for off"),
        ({"top_k": 1.5}, 400, "Expected `int | null`, got `float`"),
        ({"min_p": 2}, 400, "min_p is 2.0; it must be in [0, 1]"),
        ({"max_tokens": 0}, 400, "max_tokens is 0; it must be at least 1"),
        ({"min_tokens": -1}, 400, "min_tokens is -1"),
        ({"n": 0}, 400, "n is 0; it must be in [1, 128]"),
        ({"stop_token_ids": [999]}, 400, "stop_token_ids holds 999"),
        ({"logprobs": 21}, 400, "logprobs is 21; it must be in [0, 20]"),
        ({"prompt_logprobs": -1}, 400, "prompt_logprobs is -1"),
        ({"stop": ["x"]}, 400, "use stop_token_ids"),
        ({"repetition_penalty": 1.2}, 400, "repetition_penalty is 1.2; this engine doesn't offer"),
        ({"logit_bias": {"5": 1}}, 400, "logit_bias is {'5': 1}"),
    ],
)
def test_bad_requests_are_refused_with_the_reason(
    server: Served, body: Any, status: int, reason: str
) -> None:
    if isinstance(body, dict) and body and not body.keys() & {"token_ids", "sampling_params"}:
        body = {"token_ids": [1], "sampling_params": body}
    answer = server.post("/inference/v1/generate", body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert reason in error["message"] and error["code"] == status
    assert error["type"] in ("BadRequestError", "NotFoundError")


def test_unsupported_keys_are_accepted_at_their_neutral_value(server: Served) -> None:
    server.generate(
        [1],
        max_tokens=1,
        repetition_penalty=1.0,
        presence_penalty=0,
        logit_bias={},
        top_k=-1,
        stop=[],
    )


def test_a_top_k_above_the_vocabulary_is_off(server: Served) -> None:
    whole, large = (server.generate([1], max_tokens=8, seed=1, top_k=k) for k in (0, 2**63))
    assert large["choices"][0]["token_ids"] == whole["choices"][0]["token_ids"]


def test_deep_nesting_is_refused(server: Served) -> None:
    data = b'{"token_ids": [1], "features": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    answer = server.http.post("/inference/v1/generate", content=data)
    assert answer.status_code == 400
    assert "bad request body" in answer.json()["error"]["message"]


@pytest.mark.parametrize("data", [b"{", b"\xff\xfe", b'{"token_ids": [1], "sampling_params": NaN}'])
def test_broken_json_is_refused(server: Served, data: bytes) -> None:
    answer = server.http.post("/inference/v1/generate", content=data)
    assert answer.status_code == 400
    assert "bad request body" in answer.json()["error"]["message"]


def test_a_client_that_disconnects_frees_its_slot(server: Served) -> None:
    aborted = server.metric("vllm:request_success_total", 'finished_reason="abort"')
    leave_early(server, {"max_tokens": 500}, running=1, waiting=0)
    server.wait_for("vllm:request_success_total", aborted + 1, 'finished_reason="abort"')
    assert server.metric("vllm:num_requests_running") == 0


def test_a_waiting_request_is_dropped_when_its_client_disconnects(server: Served) -> None:
    """8 slots and 12 choices: 4 of them wait in the queue."""
    aborted = server.metric("vllm:request_success_total", 'finished_reason="abort"')
    leave_early(server, {"max_tokens": 500, "n": 12}, running=8, waiting=4)
    server.wait_for("vllm:request_success_total", aborted + 12, 'finished_reason="abort"')
    assert server.metric("vllm:num_requests_waiting") == 0


def leave_early(server: Served, params: dict[str, Any], running: int, waiting: int) -> None:
    body = json.dumps({"token_ids": [1, 2], "sampling_params": params}).encode()
    head = f"POST /inference/v1/generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    host, port = server.url.removeprefix("http://").split(":")

    def send() -> socket.socket:
        connection = socket.create_connection((host, int(port)))
        connection.sendall(head.encode() + body)
        while not select.select([connection], [], [], 0)[0]:
            if server.metric("vllm:num_requests_running"):
                break
        return connection

    server.leave_early(send, running, waiting)


def test_unknown_routes_and_methods_do_not_reach_the_engine(server: Served) -> None:
    assert server.http.get("/nope").status_code == 404
    assert server.http.get("/inference/v1/generate").status_code == 405


def test_an_unknown_route_answers_as_json(server: Served) -> None:
    answer = server.post("/v1/nothing", {})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "POST /v1/nothing: no such route"
