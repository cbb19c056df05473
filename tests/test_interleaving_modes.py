"""What breaks a prefix in practice (modes a to f of the renderers' write-up), through our pipeline.

Each mode runs twice: with a renderer that bridges turns, token by token, and with one that renders
the whole conversation anew with a chat template. A broken prefix costs a sample and nothing else:
in both, what trains is exactly what the engine sampled.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from interleaving import (
    END,
    Ask,
    Engine,
    Message,
    Studio,
    assert_faithful,
    interleaved,
    samples_of,
)
from interleaving import settings as env_settings
from renderers import DefaultRendererConfig, Qwen3RendererConfig

from prime_rl.env.environment import Environment
from prime_rl_environments.tiny.tokenizer import build_tokenizer

PHRASE = "jsonp"
TOKENIZER = build_tokenizer([PHRASE])
TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\n' }}
{%- if thoughts and message.reasoning_content -%}
{{ '<think>\n' + message.reasoning_content.strip() + '\n</think>\n\n' }}
{%- endif -%}
{{ (message.content or '').lstrip() }}
{%- for call in message.tool_calls or [] -%}
{{ '<tool_call>\n{"name": "' + call.function.name + '", "arguments": {' }}
{%- for key, value in call.function.arguments.items() -%}
{{ '"' + key + '": ' + value|string }}
{%- endfor -%}
{{ '}}\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}
"""
"""A template like many: it writes tool calls from their parsed values. With ``thoughts``, it keeps
what was thought."""

BRIDGING = Qwen3RendererConfig(thinking_retention="all")
STRIPPING = Qwen3RendererConfig()
ANEW = DefaultRendererConfig(tool_parser="qwen3", reasoning_parser="think", thoughts=True)
ANEW_STRIPPING = DefaultRendererConfig(tool_parser="qwen3", reasoning_parser="think")


def ids(text: str) -> list[int]:
    tokens: list[int] = TOKENIZER.encode(text, add_special_tokens=False)
    return [*tokens, END]


def spelled(text: str) -> list[int]:
    """The text letter by letter, whatever the tokenizer would make of it."""
    return [token for letter in text for token in ids(letter)[:-1]]


def call(arguments: str) -> list[int]:
    return ids(f'<tool_call>\n{{"name": "run", "arguments": {arguments}}}\n</tool_call>')


TOOL: Message = {"role": "tool", "tool_call_id": "1", "content": "ok"}
USER: Message = {"role": "user", "content": "go on"}


def as_it_is(reply: Message) -> Message:
    return reply


def renamed(reply: Message) -> Message:
    """A scaffold that replaces a call it does not know."""
    (made,) = reply["tool_calls"]
    function = {"name": "invalid", "arguments": json.dumps({"tool": made["function"]["name"]})}
    return {**reply, "tool_calls": [{**made, "function": function}]}


@pytest.fixture
def played(tmp_path: Path) -> Callable[..., Awaitable[Any]]:
    """Two turns, and what the scaffold makes of the first reply: samples and the engine's calls."""

    async def play(renderer: Any, reply: list[int], word: Message, scaffold: Any = as_it_is) -> Any:
        async def plan(ask: Ask) -> None:
            talk: list[Message] = [{"role": "user", "content": "hi"}]
            talk.append(scaffold(await ask(talk)))
            await ask([*talk, word])

        engine = Engine()
        server = await engine.start()
        tokenizer = {"phrases": [PHRASE], "chat_template": TEMPLATE}
        where = env_settings(renderer, tmp_path / "t", **tokenizer)
        async with Environment(where) as environment:
            studio = Studio(environment, engine)
            results = await studio.play([plan], [reply, ids("done")])
        await server.cleanup()
        assert all(each.ok for each in results), results[0].error
        return samples_of(results), engine.calls

    return play


@pytest.mark.parametrize(
    ("reply", "word", "scaffold", "bridging", "anew"),
    [
        pytest.param(call('{"n": 3}'), TOOL, as_it_is, 1, 1, id="nothing breaks"),
        pytest.param(call('{"dry_run": false}'), TOOL, as_it_is, 1, 2, id="a: false is False"),
        pytest.param([*spelled("a jsonp b"), END], USER, as_it_is, 1, 2, id="b: other tokens"),
        pytest.param(call('{"n":  3 }'), TOOL, as_it_is, 1, 2, id="c: a call's structure"),
        pytest.param(spelled("a jsonp"), USER, as_it_is, 1, 2, id="e: cut off, then b"),
        pytest.param(call('{"n": 3}'), TOOL, renamed, 2, 2, id="f: the scaffold rewrites"),
    ],
)
@pytest.mark.parametrize("renderer", ["bridging", "anew"])
async def test_a_bridge_removes_every_mode_but_a_rewritten_history(
    played: Any,
    renderer: str,
    reply: list[int],
    word: Message,
    scaffold: Any,
    bridging: int,
    anew: int,
) -> None:
    config, expected = (BRIDGING, bridging) if renderer == "bridging" else (ANEW, anew)
    samples, calls = await played(config, reply, word, scaffold)
    assert len(samples) == len(interleaved(calls)) == expected
    assert_faithful(samples, calls)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param(BRIDGING, 1, id="bridging, thoughts kept"),
        pytest.param(STRIPPING, 2, id="bridging, the template's own rule"),
        pytest.param(ANEW, 1, id="anew, thoughts kept"),
        pytest.param(ANEW_STRIPPING, 2, id="anew, stripped"),
    ],
)
async def test_mode_d_a_stripped_thought_starts_a_sample_where_the_renderer_lets_it_go(
    played: Any, config: Any, expected: int
) -> None:
    samples, calls = await played(config, ids("<think>\nhm\n</think>\n\nyes"), USER)
    assert len(samples) == len(interleaved(calls)) == expected
    assert_faithful(samples, calls)


async def test_a_tool_response_keeps_the_thoughts_even_under_the_template_s_own_rule(
    played: Any,
) -> None:
    reply = [*ids("<think>\nhm\n</think>\n\n")[:-1], *call('{"n": 3}')]
    samples, calls = await played(STRIPPING, reply, TOOL)
    assert len(samples) == 1
    assert_faithful(samples, calls)


async def test_mode_e_a_reply_that_was_cut_off_is_closed_by_a_token_that_does_not_train(
    played: Any,
) -> None:
    (sample,), (first, second) = await played(BRIDGING, spelled("cut o"), USER)
    end = len(first.prompt) + len(first.completion)
    assert second.prompt[end] == END  # the renderer wrote it; the policy did not
    assert sample.token_ids[end] == END and not sample.loss_mask[end]
    assert sample.num_trainable_tokens == len(first.completion) + len(second.completion)
