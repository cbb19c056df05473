"""``/v1/completions`` through the ``openai`` package, compared with a Hugging Face forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoTokenizer

from prime_rl_embedded.testing import Served

PROMPT = "hello"


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def tokens(model_folder: Path) -> list[int]:
    """The prompt's, one per character."""
    ids = AutoTokenizer.from_pretrained(model_folder).encode(PROMPT)
    return [int(each) for each in ids]


def ask(client: openai.OpenAI, prompt: Any = PROMPT, **options: Any) -> Any:
    defaults = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "seed": 1}
    return client.completions.create(**defaults | options)


def test_text_and_its_tokens_give_what_generate_gives(
    server: Served, client: openai.OpenAI, tokens: list[int]
) -> None:
    prompt = ask(client, echo=True, max_tokens=1, logprobs=0).choices[0].logprobs.tokens[:-1]
    assert "".join(prompt) == PROMPT
    ids = server.generate(tokens, max_tokens=12, seed=1)["choices"][0]["logprobs"]["content"]
    by_text, by_tokens = (ask(client, each, logprobs=0) for each in (PROMPT, tokens))
    assert by_text.choices[0].text == by_tokens.choices[0].text
    found = by_text.choices[0].logprobs.token_logprobs
    assert found == pytest.approx([entry["logprob"] for entry in ids], abs=1e-5)
    assert by_text.object == "text_completion" and by_text.choices[0].finish_reason == "length"


def test_an_echoed_prompt_is_scored_as_the_model_scores_it(
    client: openai.OpenAI, score: Callable[[list[int]], torch.Tensor], tokens: list[int]
) -> None:
    """What harnesses read: the likelihood of a text, and whether it is the greedy one."""
    reply = ask(client, [tokens], echo=True, logprobs=1, max_tokens=1, temperature=0)
    (choice,) = reply.choices
    given = choice.logprobs
    logprobs = score(tokens)
    expected = [logprobs[i, token].item() for i, token in enumerate(tokens[1:])]
    assert given.token_logprobs[0] is None and given.top_logprobs[0] is None
    assert given.token_logprobs[1:-1] == pytest.approx(expected, abs=1e-4)
    best = [max(top.values()) for top in given.top_logprobs[1:]]
    assert best == pytest.approx(logprobs.max(-1).values.tolist(), abs=1e-4)
    assert given.token_logprobs[-1] == best[-1]  # the sampled token, greedily
    assert choice.text.startswith(PROMPT)
    assert given.text_offset == [sum(map(len, given.tokens[:i])) for i in range(6)]


def test_a_prompt_is_scored_without_sampling(client: openai.OpenAI) -> None:
    (choice,) = ask(client, echo=True, logprobs=0, max_tokens=0).choices
    assert choice.text == PROMPT and len(choice.logprobs.token_logprobs) == len(PROMPT)


def test_several_prompts_are_answered_in_order_and_counted(client: openai.OpenAI) -> None:
    prompts = ["ab", "hello", "xyz"]
    alone = [choice.text for each in prompts for choice in ask(client, each, n=2).choices]
    together = ask(client, prompts, n=2)
    assert [choice.index for choice in together.choices] == list(range(6))
    assert [choice.text for choice in together.choices] == alone
    assert together.usage.prompt_tokens == 2 + 5 + 3
    assert together.usage.completion_tokens == 6 * 12


@pytest.mark.parametrize("echo", [False, True])
def test_a_stream_gives_the_same_text(client: openai.OpenAI, echo: bool) -> None:
    whole = ask(client, echo=echo).choices[0].text
    chunks = list(ask(client, echo=echo, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 12


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    free = ask(client, max_tokens=60).choices[0].text
    (choice,) = ask(client, max_tokens=60, stop=[free[7:10]]).choices
    assert choice.text == free[: free.index(free[7:10])] and choice.finish_reason == "stop"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"prompt": ["a", 1]}, "a list of texts"),
        ({"prompt": []}, "a list of texts"),
        ({"suffix": "x"}, "suffix: this engine does not fill"),
        ({"best_of": 3}, r"best_of is 3; expected n \(1\)"),
        ({"stream": True, "logprobs": 1}, "not with stream"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"logprobs": 21}, "logprobs is 21"),
        ({"stop": ""}, "empty string"),
    ],
)
def test_bad_requests_are_refused_with_the_reason(
    client: openai.OpenAI, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=reason):
        ask(client, **options)
