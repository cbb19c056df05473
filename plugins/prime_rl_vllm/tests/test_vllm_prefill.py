"""A real server with a prefill engine: two engine processes, and NIXL over loopback."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import PYTHON, SETTINGS
from waiting import LIMIT

from prime_rl_devkit.engines import CHECKS, EngineSubject, hold, started
from prime_rl_devkit.engines.checkpoints import changed
from prime_rl_devkit.engines.replies import read_reply
from prime_rl_devkit.engines.subject import GENERATE
from prime_rl_vllm import Vllm, VllmConfig

HAS_NIXL = any(PYTHON.parents[1].glob("lib/python*/site-packages/nixl"))
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not HAS_NIXL, reason="no nixl in .venv-vllm: `make setup-vllm` installs it"),
]

PULLED = "external_prefix_cache_hits"
"""Prompt tokens whose KV was taken over."""


def server_settings(**more: object) -> Vllm:
    return Vllm(VllmConfig.model_validate(SETTINGS | {"prefill_engines": 1} | more))


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineSubject]:
    folder = tmp_path_factory.mktemp("split")
    with started(server_settings(), folder, python=PYTHON) as subject:
        subject.meet()
        yield subject


def letters(count: int, seed: int) -> list[int]:
    """Ids of ordinary tokens."""
    return [9 + (seed * 7919 + position * 104729) % 251 for position in range(count)]


def test_tokens_and_logprobs_are_those_of_one_engine(
    split: EngineSubject, vllm: EngineSubject
) -> None:
    """Prompts of one token, of a block of 128 and around it, and of several."""
    lengths = (1, 2, 127, 128, 129, 300, 400)
    sampling: dict[str, Any] = {"max_tokens": 40, "temperature": 1.0}

    def answers(engine: EngineSubject) -> list[tuple[list[int], list[float]]]:
        bodies = [engine.body(letters(n, n), seed=n, **sampling) for n in lengths]
        choices = [reply.choices[0] for reply in engine.replies(bodies)]
        return [(choice.token_ids, choice.logprobs) for choice in choices]

    before = split.metric(PULLED)
    found = answers(split)
    expected = answers(vllm)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, ours), (_, theirs) in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
    assert split.metric(PULLED) - before == sum(lengths)


@pytest.mark.parametrize(
    "sampling", [{"n": 2}, {"prompt_logprobs": 0}], ids=["choices", "prompt logprobs"]
)
def test_what_needs_more_of_a_prompt_than_its_kv_is_computed_where_it_is_sampled(
    split: EngineSubject, sampling: dict[str, Any]
) -> None:
    before = split.metric(PULLED)
    split.reply(letters(200, 31), max_tokens=2, **sampling)
    assert split.metric(PULLED) == before


def test_text_routes_take_over_prompts_too(split: EngineSubject) -> None:
    body = {"model": split.model, "prompt": "a" * 200, "max_tokens": 2}
    # A client's own parameters would name the host of another engine.
    body["kv_transfer_params"] = {"do_remote_prefill": True, "remote_host": "10.0.0.1"}
    before = split.metric(PULLED)
    split.ok(split.http.post("/v1/completions", json=body, headers=split.headers()))
    assert split.metric(PULLED) - before >= 200


def test_a_second_turn_takes_over_what_the_engine_that_samples_does_not_have(
    split: EngineSubject,
) -> None:
    """It has the whole blocks of 128 of the first turn, its completion included."""
    prompt = letters(300, 77)
    first = split.choice(prompt, "turns", max_tokens=100, seed=1)
    longer = [*prompt, *first.token_ids, *letters(50, 3)]
    before = split.metric(PULLED)
    choice = split.choice(longer, "turns", max_tokens=30, seed=2)
    assert split.metric(PULLED) - before == 450 - 3 * 128
    assert split.reference().gap(longer, choice.token_ids, choice.logprobs) < 5e-4


def test_requests_go_on_while_the_weights_change_and_later_ones_have_the_new(
    split: EngineSubject, tmp_path: Path
) -> None:
    """Requests whose prompt is being computed, handed over or already decoded at an update."""
    folders = [split.model_folder, changed(split.model_folder, tmp_path / "new", 5)]
    prompts = [letters(150 + 10 * n, 100 + n) for n in range(24)]
    bodies = [split.body(prompt, max_tokens=60, seed=n) for n, prompt in enumerate(prompts)]
    first = split.version

    with ThreadPoolExecutor(len(bodies)) as pool:
        flights = [pool.submit(split.post, body) for body in bodies]
        updates = 0
        while updates < 2 or not all(flight.done() for flight in flights):
            updates += 1
            split.ok(split.load(folders[updates % 2]))
        replies = [
            read_reply(split.ok(flight.result()), body)
            for flight, body in zip(flights, bodies, strict=True)
        ]

    served = {str(first + number) for number in range(updates + 1)}
    for reply in replies:
        (choice,) = reply.choices
        assert {version for version, _, _ in choice.versions} <= served
        assert (choice.versions[0][1], choice.versions[-1][2]) == (0, 60)

    # The prompts again, under new weights: KV of older ones would show in the logprobs.
    split.update(folders[1])
    reference = split.reference(folders[1])
    for prompt in prompts[::6]:
        choice = split.choice(prompt, max_tokens=20, seed=1)
        assert reference.gap(prompt, choice.token_ids, choice.logprobs) < 5e-4
    split.restore()


def test_a_prompt_that_arrives_during_an_update_is_computed_with_the_new_weights(
    split: EngineSubject, tmp_path: Path
) -> None:
    folder = changed(split.model_folder, tmp_path / "new", 6)
    prompt = letters(300, 55)
    split.reply(prompt, salt="s", max_tokens=1)  # its KV is in both prefix caches
    split.pause()
    with split.held(split.body(prompt, salt="s", max_tokens=20, seed=6)) as waiting:
        split.wait(lambda: waiting.running(), "the request was not sent")
        split.ok(split.load(folder))
        split.resume()
        (choice,) = waiting.result().choices
    gap = split.reference(folder).gap(prompt, choice.token_ids, choice.logprobs)
    split.restore()
    assert gap < 5e-4


def test_clients_that_leave_take_no_memory_with_them(split: EngineSubject) -> None:
    """More prompts than the KV of either engine holds, each left by its client."""

    def leave(seed: int) -> None:
        body = split.body(letters(400, 1000 + seed), max_tokens=100, seed=seed)
        patience = 0.002 * (seed % 40)
        with suppress(httpx.TransportError):
            split.http.post(
                "/inference/v1/generate", json=body, headers=split.headers(), timeout=patience
            )

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(leave, range(600)))
    choices = split.replies([split.body(letters(400, n), max_tokens=4) for n in range(64)])
    assert len(choices) == 64
    split.wait(
        lambda: split.metric("kv_cache_usage_perc") == 0, "KV is held, and no request is running"
    )


def test_requests_that_are_refused_leave_no_kv_behind(split: EngineSubject) -> None:
    """The engine that samples refuses them when their prompt is computed. They are more than a
    prefill engine holds, which would compute no other prompt until its lease ends."""

    def refused(seed: int) -> int:
        body = {"model": split.model, "prompt": letters(400, 3000 + seed), "max_tokens": 2}
        body["logit_bias"] = {"999999": 1}
        answer = split.http.post("/v1/completions", json=body, headers=split.headers())
        return answer.status_code

    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(refused, range(600))) == {400}
    before = split.metric(PULLED)
    split.reply(letters(400, 4000), max_tokens=2)
    assert split.metric(PULLED) - before == 400


@pytest.mark.parametrize("check", CHECKS)
def test_a_divided_server_passes_the_engine_suite(split: EngineSubject, check: str) -> None:
    """The last check ends the server."""
    hold(split, check)


TAKES_PORTS = """
import os, socket, threading

def take():
    taken = set()
    while True:
        port = os.environ.get("VLLM_NIXL_SIDE_CHANNEL_PORT", "5600")
        if port not in taken:
            taken.add(port)
            try:
                listener = socket.create_server(("127.0.0.1", int(port)))
            except OSError:  # another process has it already
                continue
            print("taken:", port, listener.fileno(), flush=True)
            kept.append(listener)
        ended.wait(0.001)

kept = []
ended = threading.Event()
threading.Thread(target=take, daemon=True).start()
"""
"""Stands in for another process: it takes vLLM's own port, and one that the server has chosen."""


def test_a_port_that_is_taken_while_an_engine_loads_is_not_used(tmp_path: Path) -> None:
    """An engine whose port is taken waits for ever."""
    (tmp_path / "sitecustomize.py").write_text(TAKES_PORTS)
    env = {"PYTHONPATH": str(tmp_path)}
    with started(server_settings(), tmp_path / "engine", python=PYTHON, env=env) as subject:
        subject.meet()
        subject.reply(letters(300, 8), max_tokens=2)
        assert subject.metric(PULLED) == 300
    assert "taken: 5600" in (tmp_path / "engine" / "engine.log").read_text()


def test_a_server_whose_prefill_engine_is_killed_ends_with_the_reason(tmp_path: Path) -> None:
    """The run starts it again, with both. Its clients are patient, and are answered."""
    with started(server_settings(), tmp_path, python=PYTHON) as subject:
        subject.meet()
        log = tmp_path / "engine.log"
        first_started = re.search(r"EngineCore pid=(\d+)", log.read_text())
        assert first_started and subject.process
        client = httpx.Client(base_url=subject.url, timeout=LIMIT, trust_env=False)
        ask = partial(client.post, GENERATE, headers=subject.headers())
        with client, ThreadPoolExecutor(8) as pool:
            bodies = [subject.body(letters(100, n), max_tokens=400) for n in range(8)]
            flights = [pool.submit(ask, json=body) for body in bodies]
            subject.wait(
                lambda: subject.metric("num_requests_running") > 0, "no token is being sampled"
            )
            subject.pause()  # what is in flight gets no further token
            os.kill(int(first_started[1]), signal.SIGKILL)
            assert subject.process.wait(LIMIT) == 1
            answers = [flight.result() for flight in flights]
    refused = [answer for answer in answers if answer.status_code != 200]
    assert refused and {answer.status_code for answer in refused} == {503}
    assert all("the engine has ended" in answer.text for answer in refused)
    assert "a prefill engine has died, so the server ends" in log.read_text()
