"""From a client's request to vLLM's parameters, and the keys that routes require."""

import asyncio
import json
import os
import signal
from types import SimpleNamespace

import pytest

from prime_rl.rundir.status import Status
from prime_rl_engine_kit.errors import RequestError
from prime_rl_engine_kit.keys import Keys
from prime_rl_engine_kit.requests import GenerateBody, GenerateSampling, Limits
from prime_rl_vllm import state as shared
from prime_rl_vllm.front import Front
from prime_rl_vllm.schema import plan
from prime_rl_vllm.state import State

LIMITS = Limits("tiny", max_model_len=8, vocab_size=100)


def planned(token_ids=(1, 2, 3), **sampling):
    return plan(
        GenerateBody(token_ids=list(token_ids), sampling_params=GenerateSampling(**sampling)),
        LIMITS,
    )


def refusal(**request):
    with pytest.raises(RequestError) as caught:
        planned(**request)
    return str(caught.value)


def test_missing_max_tokens_fill_the_context():
    assert planned().params["max_tokens"] == 5


def test_max_tokens_are_cut_to_the_room_left():
    assert planned(max_tokens=100).params["max_tokens"] == 5
    assert planned(max_tokens=2).params["max_tokens"] == 2


@pytest.mark.parametrize(("asked", "passed"), [(0, 0), (1, 0), (2, 2), (20, 20)])
def test_one_logprob_is_that_of_the_sampled_token(asked, passed):
    assert planned(logprobs=asked).params["logprobs"] == passed


def test_a_top_k_that_cuts_nothing_fits_the_messages_of_vllm():
    assert planned(top_k=2**70).params["top_k"] == 100
    assert planned(top_k=5).params["top_k"] == 5
    assert "top_k" not in planned().params


def test_no_logprobs_are_none():
    assert "logprobs" not in planned().params and planned().logprobs is None


def test_a_prompt_that_fills_the_context_can_be_scored_but_not_continued():
    full = range(1, 9)
    assert planned(full, max_tokens=1, prompt_logprobs=0).params["max_tokens"] == 1
    assert "at most 7 leave room" in refusal(token_ids=full, max_tokens=1)
    message = "the prompt to score has 9 tokens; max_model_len is 8"
    assert refusal(token_ids=range(1, 10), max_tokens=1, prompt_logprobs=0) == message


def test_keys_that_change_the_distribution_are_refused_unless_neutral():
    assert "presence_penalty is 0.5" in refusal(presence_penalty=0.5)
    for key in ("response_format", "guided_decoding", "guided_json", "thinking_token_budget"):
        assert f"{key} is 'x'" in refusal(**{key: "x"})
    assert "stop is ['x']" in refusal(stop=["x"])
    planned(presence_penalty=0.0, repetition_penalty=1.0, logit_bias={}, stop=[])


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"n": 0}, "n is 0; it must be in [1, 128]"),
        ({"logprobs": 21}, "logprobs is 21; it must be in [0, 20]"),
        ({"max_tokens": -1}, "max_tokens is -1; it must be at least 0"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1, unless"),
        ({"stop_token_ids": [100]}, "stop_token_ids holds 100; the vocabulary has ids 0 to 99"),
        ({"token_ids": [1, 100]}, "token_ids[1] is 100; the vocabulary has ids 0 to 99"),
        ({"token_ids": [-1]}, "token_ids[0] is -1"),
        ({"token_ids": []}, "token_ids is empty"),
    ],
)
def test_values_that_vllm_would_accept_or_drop_are_refused(sampling, message):
    assert message in refusal(**sampling)


def test_another_model_is_404():
    with pytest.raises(RequestError, match="this engine serves 'tiny'") as caught:
        plan(GenerateBody(token_ids=[1], model="other"), LIMITS)
    assert caught.value.status == 404


# -- keys -------------------------------------------------------------------------------


def engine(workers=1, replicas=1, device="cpu", servers=1):
    """A fake of vLLM's client."""
    parallel = SimpleNamespace(
        data_parallel_size=replicas, world_size=workers, local_engines_only=servers > 1
    )
    config = SimpleNamespace(
        parallel_config=parallel,
        device_config=SimpleNamespace(device_type=device),
        scheduler_config=SimpleNamespace(max_num_seqs=256),
    )
    return SimpleNamespace(check_health=_nothing, vllm_config=config)


def test_every_worker_receives_weights_unless_other_servers_have_some_of_them():
    state = State("tiny", "folder", 8, Keys("a", "s"), Status(None))
    state.engine = engine(workers=4)
    assert state.receives == {"workers": 4, "backends": ["gloo", "ipc"]}
    state.engine = engine(workers=2, device="cuda")
    assert state.receives == {"workers": 2, "backends": ["gloo", "nccl", "ipc"]}
    state.engine = engine(workers=2, replicas=3)
    assert state.receives == {"workers": 6, "backends": ["gloo", "ipc"]}
    state.engine = engine(workers=2, replicas=3, servers=3)
    assert state.receives is None


def ask(method, path, key=None, *, admin="a", sampling="s", body=b"{}", heard=None):
    """The status of a request to ``Front`` with a fake vLLM behind it, which writes the body that
    it got into the list ``heard``."""
    shared.current = State("tiny", "folder", 8, Keys(admin, sampling), Status(None))
    shared.current.engine = engine()
    vllm = SimpleNamespace(matches=lambda scope: ("none", {}))
    sent = []

    async def behind(scope, receive, send):
        if heard is not None:
            heard.extend([(await receive())["body"], dict(scope["headers"])])
        await send({"type": "http.response.start", "status": 299, "headers": []})

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": b"",
        "headers": [(b"authorization", f"Bearer {key}".encode())] if key else [],
        "app": SimpleNamespace(routes=[vllm] if path != "/nowhere" else []),
    }
    try:
        asyncio.run(Front(behind)(scope, receive, send))
    finally:
        shared.current = None
    return sent[0]["status"]


async def _nothing(*args, **kwargs):
    return None


def test_a_server_that_cannot_be_prepared_ends(monkeypatch, caplog):
    """An exception alone would not end it: uvicorn takes it for an application without a start."""
    sent = []

    async def refuse(state, engine):
        raise RequestError("cannot check weight updates: no folder")

    async def receive():
        return {"type": "lifespan.startup"}

    async def application(scope, receive, send):
        await receive()

    shared.current = state = State("tiny", "folder", 8, Keys("a", ""), Status(None))
    monkeypatch.setattr("prime_rl_vllm.front._prepare", refuse)
    monkeypatch.setattr("os.kill", lambda *call: sent.append(call))
    app = SimpleNamespace(state=SimpleNamespace(engine_client=None))
    try:
        with pytest.raises(RequestError):
            asyncio.run(Front(application)({"type": "lifespan", "app": app}, receive, _nothing))
    finally:
        shared.current = None
    assert sent == [(os.getpid(), signal.SIGTERM)]
    assert state.died and state.ending
    assert "cannot check weight updates: no folder" in caplog.text


@pytest.mark.parametrize("route", ["/pause", "/resume", "/update_weights", "/sleep", "/wake_up"])
def test_admin_routes_need_the_admin_key(route):
    assert ask("POST", route) == 401
    assert ask("POST", route, "s") == 403
    assert ask("POST", route, "a", admin="") == 403


@pytest.mark.parametrize("route", ["/v1/completions", "/inference/v1/generate", "/tokenize"])
def test_sampling_needs_the_sampling_key_if_there_is_one(route):
    assert ask("POST", route) == 401
    assert ask("POST", route, "wrong") == 401
    assert ask("POST", route, "s") not in (401, 403)
    assert ask("POST", route, "a") not in (401, 403)
    assert ask("POST", route, sampling="") not in (401, 403)


def test_other_routes_of_vllm_need_the_admin_key():
    assert ask("POST", "/collective_rpc", "s") == 403
    assert ask("POST", "/collective_rpc", "a") == 299


def test_health_is_open_and_unknown_routes_are_404():
    assert ask("GET", "/health") == 200
    assert ask("GET", "/nowhere", "a") == 404


@pytest.mark.parametrize(
    ("body", "salt"),
    [
        (b"{}", "0:"),
        (b'{"cache_salt": null, "a": 1.50}', "0:"),
        (b'{"a": [{"b": "\\u00e9"}], "cache_salt": "mine"}', "0:mine"),
        (b'{"cache\\u005fsalt": "mine"}', "0:mine"),
        (b'{"cache_salt": "first", "cache_salt": "last"}', "0:last"),
    ],
)
def test_a_text_for_vllm_gets_our_salt_and_keeps_its_other_values(body, salt):
    heard = []
    assert ask("POST", "/v1/chat/completions", "s", body=body, heard=heard) == 299
    data, headers = heard
    assert json.loads(data) == {**json.loads(body), "cache_salt": salt}
    assert data.count(b"salt") == 1
    assert headers[b"content-length"] == str(len(data)).encode()


@pytest.mark.parametrize(
    "body",
    [b"[]", b"", b"null", b'{"a": NaN}', b'{"cache_salt": 3}', b"[" * 99999, b"\xef\xbb\xbf{}",
     '{"cache_salt": "x"}'.encode("utf-16"), b'{"a": 1} {}', b'{"a": "\\ud800"}'],
)  # fmt: skip
def test_what_cannot_be_salted_does_not_reach_vllm(body):
    heard = []
    assert ask("POST", "/v1/completions", "s", body=body, heard=heard) == 400
    assert heard == []
