"""What every server of the engine contract is made of."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
from pathlib import Path

import pytest
from disks import SharedDisk
from starlette.requests import Request

from prime_rl import ConfigError
from prime_rl.rundir.launch import ADMIN_KEY, ENGINE_KEY, READY
from prime_rl.rundir.status import Status
from prime_rl_engine_kit import process
from prime_rl_engine_kit.body import MAX_BODY_BYTES, ClientGone, read_body, while_wanted
from prime_rl_engine_kit.errors import RequestError
from prime_rl_engine_kit.keys import Keys
from prime_rl_engine_kit.requests import (
    GenerateBody,
    GenerateSampling,
    Limits,
    check_generate,
    check_sampling,
    decode,
)

LIMITS = Limits("tiny", max_model_len=8, vocab_size=100)


def status_of(check: object, *arguments: object) -> int:
    with pytest.raises(RequestError) as caught:
        check(*arguments)  # type: ignore[operator]
    return caught.value.status


@pytest.mark.parametrize(
    ("given", "admin", "sampling"),
    [
        ("", 401, 401),
        ("Bearer ", 401, 401),
        ("Basic a", 401, 401),
        ("Bearer x", 403, 401),
        ("Bearer s", 403, None),
        ("bearer a", None, None),
        ("Bearer \xe9", 403, 401),
    ],
)
def test_the_sampling_key_opens_sampling_and_the_admin_key_everything(
    given: str, admin: int | None, sampling: int | None
) -> None:
    keys = Keys("a", "s")
    for check, expected in ((keys.check_admin, admin), (keys.check_sampling, sampling)):
        if expected is None:
            check(given)
        else:
            assert status_of(check, given) == expected


def test_without_keys_sampling_is_open_and_administration_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (ADMIN_KEY, ENGINE_KEY):
        monkeypatch.delenv(name, raising=False)
    keys = Keys.of_environment()
    keys.check_sampling("")
    assert status_of(keys.check_admin, "Bearer ") == 403


def test_the_keys_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADMIN_KEY, "a")
    monkeypatch.setenv(ENGINE_KEY, "s")
    assert Keys.of_environment() == Keys("a", "s")


def generate(**more: object) -> None:
    fields = {"token_ids": [1, 2, 3]} | more
    body = decode(json.dumps(fields).encode(), GenerateBody)
    check_generate(body, LIMITS)
    sampling = body.sampling_params
    check_sampling(sampling, LIMITS, sampling.logprobs, sampling.prompt_logprobs)


@pytest.mark.parametrize(
    ("body", "reason", "status"),
    [
        ({"token_ids": "text"}, "bad request body: .*token_ids", 400),
        ({"model": "other"}, "'other' does not exist; this engine serves 'tiny'", 404),
        ({"token_ids": []}, "token_ids is empty", 400),
        ({"token_ids": [1] * 8}, "has 8 tokens; at most 7 leave room", 400),
        ({"token_ids": [1, 100]}, r"token_ids\[1\] is 100; .* 0 to 99", 400),
        ({"token_ids": [-1]}, r"token_ids\[0\] is -1", 400),
        ({"priority": 2**63}, r"priority is 9223372036854775808; it must be in \[-9223", 400),
        ({"sampling_params": {"seed": 2**64}}, "seed is 18446744073709551616; it must be in", 400),
        ({"sampling_params": {"seed": 2**63 - 3, "n": 4}}, r"in \[-922\d+, 922\d+804\]", 400),
        ({"sampling_params": {"seed": -(2**63) - 1}}, "seed is -9223372036854775809", 400),
        ({"stream": True}, "stream is true", 400),
        ({"features": {}}, "text tokens only", 400),
        ({"sampling_params": {"stop": ["x"]}}, r"stop is \['x'\]; .* use stop_token_ids", 400),
        ({"sampling_params": {"n": 0}}, r"n is 0; it must be in \[1, 128\]", 400),
        ({"sampling_params": {"logprobs": 21}}, r"logprobs is 21; .* in \[0, 20\]", 400),
        (
            {"sampling_params": {"prompt_logprobs": 101}},
            r"prompt_logprobs is 101; .* in \[0, 100\]",
            400,
        ),
        ({"sampling_params": {"min_tokens": -1}}, "min_tokens is -1; .* at least 0", 400),
        ({"sampling_params": {"max_tokens": 0}}, "unless prompt_logprobs are wanted", 400),
        ({"sampling_params": {"stop_token_ids": [100]}}, "stop_token_ids holds 100", 400),
        ({"sampling_params": {"logit_bias": {"1": 2}}}, "logit_bias is .* leave it out", 400),
    ],
)
def test_an_invalid_request_is_refused_with_the_reason(
    body: dict[str, object], reason: str, status: int
) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        generate(**body)
    assert caught.value.status == caught.value.body["error"]["code"] == status  # type: ignore[index]


def test_a_prompt_that_is_only_scored_may_fill_the_context() -> None:
    generate(token_ids=[1] * 8, sampling_params={"prompt_logprobs": 0, "max_tokens": 1})
    generate(token_ids=[1] * 8, sampling_params={"prompt_logprobs": 0, "max_tokens": 0})
    with pytest.raises(RequestError, match="to score has 9 tokens; max_model_len is 8"):
        generate(token_ids=[1] * 9, sampling_params={"prompt_logprobs": 0, "max_tokens": 1})


def test_values_without_effect_are_accepted() -> None:
    neutral = {"presence_penalty": 0, "repetition_penalty": 1, "bad_words": [], "stop": ""}
    generate(sampling_params=neutral, unknown_key=1)
    assert GenerateSampling().max_tokens is None  # not given: the context is filled


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process's signals and parent are left alone."""
    monkeypatch.setattr(process.signal, "signal", lambda *_: None)
    monkeypatch.setattr(process, "exit_with_parent", lambda: None)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("end", "code", "state"),
    [
        (SystemExit(0), 0, "stopped"),
        (KeyboardInterrupt(), 0, "stopped"),
        (SystemExit(3), 3, "failed"),
        (ConfigError("no such model"), 1, "failed: no such model"),
    ],
)
def test_the_status_has_every_end_of_a_server(
    end: BaseException, code: int, state: str, tmp_path: Path
) -> None:
    def serve(args: argparse.Namespace, status: object) -> int:
        raise end

    words = ["--model", "m", "--port", "1", "--max-model-len", "8", "--status-path"]
    args = process.command_line("x", None).parse_args([*words, str(tmp_path / "status.json")])
    assert process.run_server(args, serve) == code
    assert json.loads((tmp_path / "status.json").read_text())["state"] == state


def request(*events: dict[str, object]) -> Request:
    """A POST whose client sends ``events``, and then nothing more."""
    coming = list(events)

    async def receive() -> dict[str, object]:
        return coming.pop(0) if coming else await asyncio.get_running_loop().create_future()

    return Request({"type": "http", "method": "POST"}, receive)


def test_a_client_that_leaves_cancels_the_work_and_nothing_is_logged() -> None:
    """A ``gather`` that is cancelled and never awaited would end in the log as an error."""
    logged: list[object] = []
    cancelled: list[bool] = []

    async def piece() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def work() -> None:
        await asyncio.gather(piece(), piece())

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: logged.append(what))
        with pytest.raises(ClientGone):
            await while_wanted(request({"type": "http.disconnect"}), work())
        gc.collect()

    asyncio.run(main())
    assert cancelled == [True, True]
    assert not logged


def test_a_client_that_waits_gets_the_result() -> None:
    async def work() -> str:
        return "done"

    async def main() -> str:
        return await while_wanted(request(), work())

    assert asyncio.run(main()) == "done"


def test_a_body_over_the_limit_is_refused() -> None:
    half = {"type": "http.request", "body": bytes(MAX_BODY_BYTES // 2), "more_body": True}
    last = {"type": "http.request", "body": b"x"}
    with pytest.raises(RequestError, match="64 MiB") as caught:
        asyncio.run(read_body(request(half, half, last)))
    assert caught.value.status == 413


def test_the_alternatives_of_a_prompt_fit_an_answer() -> None:
    """2**22 entries: 524,288 of each of 8 tokens."""
    large = Limits("large", max_model_len=8, vocab_size=600_000)
    for wanted, fits in ((524_288, True), (524_289, False)):
        body = GenerateBody(
            token_ids=[1] * 8,
            sampling_params=GenerateSampling(prompt_logprobs=wanted, max_tokens=1),
        )
        if fits:
            check_generate(body, large)
        else:
            with pytest.raises(RequestError, match="is 524289; at most 524288 of each of 8 tokens"):
                check_generate(body, large)


def test_a_model_that_the_disk_refuses_to_show_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / READY).touch()
    (tmp_path / "config.json").touch()
    disk = SharedDisk(monkeypatch, tmp_path)
    with disk.refusing() as answer:
        monkeypatch.setattr(process.time, "sleep", lambda seconds: answer())
        process.wait_for_model(tmp_path, Status(None))
    assert disk.refused
