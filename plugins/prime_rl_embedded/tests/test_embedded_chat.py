"""``/v1/chat/completions`` through the ``openai`` package."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from prime_rl_embedded.testing import Served

LOOKUP: Any = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}},
}
QUESTION: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, **options: Any) -> Any:
    defaults = {"model": "tiny", "messages": QUESTION, "max_tokens": 24, "seed": 1}
    return client.chat.completions.create(**defaults | options)


def test_an_answer_equals_generate_on_the_rendered_prompt(
    server: Served, client: openai.OpenAI
) -> None:
    reply = ask(client, extra_body={"return_token_ids": True}, logprobs=True)
    prompt, choice = reply.prompt_token_ids, reply.choices[0]
    # <|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n, one token per byte
    assert len(prompt) == 1 + len("user\nhello") + 1 + 1 + 1 + len("assistant\n")
    same = server.generate(prompt, max_tokens=24, seed=1)["choices"][0]
    assert choice.token_ids == same["token_ids"]
    assert choice.finish_reason == "length" and choice.message.role == "assistant"
    found = [entry.logprob for entry in choice.logprobs.content]
    assert found == pytest.approx([e["logprob"] for e in same["logprobs"]["content"]], abs=1e-5)
    assert reply.usage.prompt_tokens == len(prompt) and reply.usage.completion_tokens == 24
    assert reply.model == "tiny" and reply.object == "chat.completion"


def test_a_stream_gives_the_same_answer(client: openai.OpenAI) -> None:
    whole = ask(client)
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons[-1] == "length" and set(reasons[:-1]) == {None}
    assert chunks[-1].usage.completion_tokens == 24


def test_streamed_logprobs_cover_every_token(client: openai.OpenAI) -> None:
    whole = ask(client, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    chunks = list(ask(client, stream=True, logprobs=True, top_logprobs=2))
    entries = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert [e.token for e in entries] == [e.token for e in whole]
    assert all(len(e.top_logprobs) == 2 for e in entries)
    assert [e.logprob for e in entries] == pytest.approx([e.logprob for e in whole], abs=1e-5)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_before_it(
    server: Served, client: openai.OpenAI, stream: bool
) -> None:
    before = server.metric("vllm:request_success_total", 'finished_reason="abort"')
    free = ask(client, max_tokens=200).choices[0].message.content
    start = next(i for i in range(10, len(free)) if free[i : i + 2].isascii())
    stop = free[start : start + 2]
    reply = ask(client, max_tokens=480, stop=[stop, "never there"], stream=stream)
    if stream:
        chunks = list(reply)
        text = "".join(c.choices[0].delta.content or "" for c in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        text, reason = reply.choices[0].message.content, reply.choices[0].finish_reason
    assert text == free[: free.index(stop)] and reason == "stop"
    server.wait_for("vllm:request_success_total", before + 1, 'finished_reason="abort"')


def test_chunks_of_one_stream_have_the_index_of_their_choice(client: openai.OpenAI) -> None:
    whole = [choice.message.content for choice in ask(client, n=3).choices]
    assert len(set(whole)) == 3
    texts = ["", "", ""]
    for chunk in ask(client, n=3, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == whole


def test_a_client_that_disconnects_from_a_stream_frees_its_slot(
    server: Served, client: openai.OpenAI
) -> None:
    before = server.metric("vllm:request_success_total", 'finished_reason="abort"')

    def first_chunk() -> openai.Stream[Any]:
        stream = ask(client, stream=True, max_tokens=480)
        next(iter(stream))
        return stream

    server.leave_early(first_chunk)
    server.wait_for("vllm:request_success_total", before + 1, 'finished_reason="abort"')


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "the prompt has 6"),
        ({"temperature": -1}, "temperature is -1"),
        ({"presence_penalty": 1.0}, "presence_penalty is 1.0"),
        ({"response_format": {"type": "json_object"}}, "does not constrain its output"),
        ({"tools": [LOOKUP]}, "tools has 1 entries; this route parses no tool calls"),
        ({"tools": [LOOKUP], "stream": True}, "this route parses no tool calls"),
        ({"functions": [LOOKUP["function"]]}, "functions has 1 entries; this route parses no too"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "'image_url'"),
        ({"stop": ""}, "empty string"),
        ({"logprobs": True, "top_logprobs": 21}, "logprobs is 21"),
    ],
)
def test_bad_requests_are_refused_with_the_reason(
    client: openai.OpenAI, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=reason):
        ask(client, **options)


def test_text_parts_are_one_text(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    message: Any = [{"role": "user", "content": parts}]
    assert ask(client, messages=message).choices == ask(client).choices


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="this engine serves 'tiny'"):
        ask(client, model="gpt")


def test_models_lists_the_name_and_the_context(server: Served, client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny"
    assert server.http.get("/v1/models").json()["data"][0]["max_model_len"] == 512
    assert client.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError, match="this engine serves 'tiny'"):
        client.models.retrieve("owner/gpt")
