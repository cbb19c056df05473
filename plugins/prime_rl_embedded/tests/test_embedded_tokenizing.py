"""From a client's messages and text to tokens: what templates get, and what is refused."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from prime_rl_embedded.answers import Texts
from prime_rl_embedded.api import make_app
from prime_rl_embedded.schema import Limits
from prime_rl_embedded.testing import Served
from prime_rl_embedded.tokenizing import Tokenizing, most_characters_per_token, plain_message
from prime_rl_engine_kit.errors import RequestError
from prime_rl_engine_kit.keys import Keys

LIMITS = Limits("tiny", max_model_len=64, vocab_size=400, eos_token_ids=frozenset())
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:{{ message.content }}"
    "{% for call in message.tool_calls %}"
    "{% for name, value in call.function.arguments.items() %}[{{ name }}={{ value }}]"
    "{% endfor %}{% endfor %}{% endfor %}{{ mood }}"
)
CORPUS = ["the theme of these     then", "e\u0301 \uac00 thesis"]


def tokenizer_of(**parts: Any) -> Any:
    """A trained tokenizer of bytes; ``parts`` are set on it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = TEMPLATE
    return fast


PLAIN = tokenizer_of()
COMPOSING = tokenizer_of(normalizer=normalizers.NFC())


def tokenizing(tokenizer: Any = PLAIN, limits: Limits = LIMITS) -> Tokenizing:
    return Tokenizing(tokenizer, Path("folder"), limits)


# -- template settings ------------------------------------------------------------------------

OWN = sorted(
    {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "messages"}
    - {"self", "documents", "kwargs"}
)


@pytest.mark.parametrize("key", OWN)
def test_a_request_cannot_set_options_of_the_tokenizer(server: Served, key: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {key: 1}}
    refused = server.post("/v1/chat/completions", body)
    assert refused.status_code == 400
    assert f"chat_template_kwargs: {key} cannot be set" in refused.json()["error"]["message"]


def test_variables_of_the_template_are_passed() -> None:
    ids = tokenizing().chat([{"role": "user", "content": "hi"}], None, {"mood": "glad"})
    assert PLAIN.decode(ids) == "user:higlad"


# -- messages ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": 1, "b": [null]}', {"a": 1, "b": [None]}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (None, {}),
        ("{not json", "{not json"),
        ("[1]", "[1]"),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_arguments_of_tool_calls_are_objects(arguments: Any, expected: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    plain = plain_message(0, message)
    assert plain["content"] == ""
    assert plain["tool_calls"][0]["function"] == {"name": "f", "arguments": expected}
    assert call["function"] == {"name": "f", "arguments": arguments}  # the client's is not changed


def test_a_conversation_as_the_openai_package_dumps_it_reaches_the_template() -> None:
    """With arguments as text, no content, and a null for every other key."""
    function = {"name": "f", "arguments": '{"x": 1}'}
    nothing = {"refusal": None, "audio": None, "function_call": None}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": function}], **nothing},
        {"role": "tool", "content": "2", "tool_calls": None},
        {"role": "assistant", "tool_calls": []},
    ]
    ids = tokenizing().chat(messages, None, {})
    assert PLAIN.decode(ids) == "user:abassistant:[x=1]tool:2assistant:"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"content": "x"}, r"messages\[3\]\.role is None"),
        ({"role": 1, "content": "x"}, r"messages\[3\]\.role is 1"),
        ({"role": "user", "content": 5}, r"messages\[3\]\.content is of type int"),
        ({"role": "user", "content": {"text": "x"}}, "is of type dict"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "'image_url'"),
        ({"role": "user", "content": ["x"]}, "a part of content is 'x'"),
        ({"role": "assistant", "tool_calls": "f"}, r"tool_calls: expected a list"),
        ({"role": "assistant", "tool_calls": [1]}, "expected objects with a function"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "expected objects with a"),
    ],
)
def test_other_shapes_are_refused(message: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        plain_message(3, message)


# -- length -----------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from("the \u00e9\u0301\u1100\u1161\u11a8\U0001f600\n"), max_size=60))
def test_no_text_that_fits_is_refused_for_its_characters(text: str) -> None:
    for tokenizer in (PLAIN, COMPOSING):
        num_tokens = len(tokenizer(text, add_special_tokens=False)["input_ids"])
        assert len(text) <= num_tokens * most_characters_per_token(tokenizer)


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": normalizers.Strip()},
        {"normalizer": normalizers.Replace("  ", " ")},
        {"normalizer": normalizers.Sequence([normalizers.NFC(), normalizers.StripAccents()])},
        {"pre_tokenizer": pre_tokenizers.Whitespace()},
        {"pre_tokenizer": pre_tokenizers.WhitespaceSplit()},
        {"pre_tokenizer": pre_tokenizers.Split(" ", "removed")},
    ],
)
def test_a_tokenizer_that_drops_characters_has_no_bound(parts: dict[str, Any]) -> None:
    assert most_characters_per_token(tokenizer_of(**parts)) == math.inf


def test_a_text_that_is_surely_too_long_is_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = max(map(len, PLAIN.get_vocab()))
    most = 64 * longest
    subject = tokenizing()
    with pytest.raises(RequestError, match=r"the prompt has \d+ tokens"):  # it may fit
        subject.chat([{"role": "user", "content": "x" * (most - len("user:"))}], None, {})
    monkeypatch.setattr(type(PLAIN), "__call__", None)
    for refused in (
        lambda: subject.chat([{"role": "user", "content": "x" * most}], None, {}),
        lambda: subject.text("x" * (most + 1), special=True),
    ):
        with pytest.raises(RequestError, match=r"characters, which are more than 64 tokens"):
            refused()


async def test_other_requests_are_answered_while_a_text_is_tokenized() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def long_work(*_: Any, **__: Any) -> Any:
        begun.set()
        go_on.wait(60)
        raise RequestError("ended")

    engine: Any = SimpleNamespace(closed=None, alive=True)
    texts = Texts(engine, LIMITS, Path("folder"))
    texts._tokenizing = SimpleNamespace(tokenizer=PLAIN, chat=long_work, text=long_work)  # type: ignore[assignment]
    app = make_app(engine, LIMITS, texts, Keys())
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as http:
        for route, body in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
            ("/v1/completions", {"prompt": "hi"}),
        ):
            begun.clear()
            go_on.clear()
            waiting = asyncio.create_task(http.post(route, json=body))
            await asyncio.to_thread(begun.wait, 60)
            assert (await http.get("/v1/models")).status_code == 200
            assert not waiting.done()
            go_on.set()
            assert (await waiting).json()["error"]["message"] == "ended"
