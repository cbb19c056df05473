"""``tiny-chat``: it learns a rollout's tokens, and can partly do its tasks."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from renderers import Qwen3RendererConfig, create_renderer

from prime_rl import RunError
from prime_rl_environments.tasks import LOOKUP_SCHEMA
from prime_rl_environments.tiny import Recipe, TinyChat, TinyChatConfig
from prime_rl_environments.tiny.chat import (
    build_chat_tokenizer,
    encode,
    pad,
    supervised_step,
    target_of,
    timetable,
    tools_block,
)
from prime_rl_environments.tiny.lessons import LESSONS, Conversation, Message, lessons
from prime_rl_environments.tiny.make import build_model, build_optimizer

TOKENIZER = build_chat_tokenizer()
TOOLS = "".join(tools_block())
SMALL = Recipe(hidden_size=16, intermediate_size=16, head_dim=4)


def ids_of(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False)
    return ids


def rolled_out(talk: Conversation, thinking: bool) -> list[tuple[int, bool]]:
    """The tokens of the conversation in a rollout: a rendered first prompt, sampled replies, and
    later prompts bridged."""
    config = Qwen3RendererConfig(enable_thinking=thinking, thinking_retention="all")
    renderer: Any = create_renderer(TOKENIZER, config)
    tools = [LOOKUP_SCHEMA] if talk.tools else None
    turns: list[list[Message]] = [[]]
    column: list[tuple[int, bool]] = []
    prompt: list[int] = []
    reply: list[int] = []
    for message in talk.messages:
        if message.role != "assistant":
            turns[-1].append(message)
            continue
        wire = [{"role": m.role, "content": m.text, "tool_call_id": "1"} for m in turns[-1]]
        if column:
            prompt = renderer.bridge_to_next_turn(prompt, reply, wire, tools=tools).token_ids
        else:
            prompt = renderer.render_ids(wire, tools=tools, add_generation_prompt=True)
        assert [token for token, _ in column] == prompt[: len(column)]
        column += [(token, False) for token in prompt[len(column) :]]
        reply = ids_of(f"{message.text}<|im_end|>")
        column += [(token, message.trained) for token in reply]
        turns.append([])
    return column


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("kind", LESSONS)
def test_the_warm_up_has_the_tokens_of_a_rollout(kind: Any, thinking: bool) -> None:
    for talk in islice(lessons(kind, 0), 20):
        by_thinking = dict(zip((True, False), encode(TOKENIZER, [talk, talk], TOOLS), strict=True))
        assert by_thinking[thinking] == rolled_out(talk, thinking)


def test_a_tool_call_parses_and_has_few_tokens() -> None:
    renderer: Any = create_renderer(TOKENIZER, Qwen3RendererConfig())
    call = next(lessons("lookup", 0)).messages[1].text
    (parsed,) = renderer.parse_response(ids_of(call)).tool_calls
    assert (parsed.name, list(parsed.arguments), parsed.status.value) == ("get", ["k"], "ok")
    assert len(ids_of(call)) == 13
    plain = renderer.render_ids([{"role": "user", "content": "abc"}])
    told = renderer.render_ids([{"role": "user", "content": "abc"}], tools=[LOOKUP_SCHEMA])
    assert len(told) - len(plain) == 7


@given(st.text())
def test_any_text_round_trips_through_the_tokenizer(text: str) -> None:
    assert TOKENIZER.decode(ids_of(text), clean_up_tokenization_spaces=False) == text


def test_padding_shifts_the_labels_and_trains_nothing_else() -> None:
    ids, labels = pad([[(5, False), (6, True), (7, True)], [(8, False), (9, True)]], padding=0)
    assert ids.tolist() == [[5, 6], [8, 9]]
    assert labels.tolist() == [[6, 7], [9, -100]]


def test_a_batch_in_parts_gives_the_step_of_the_whole_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    talks = [next(lessons(kind, seed)) for seed in range(2) for kind in LESSONS]
    columns = encode(TOKENIZER, talks, TOOLS)
    weights = []
    for chunks in (1, 3):
        monkeypatch.setattr("prime_rl_environments.tiny.chat.CHUNKS", chunks)
        model = build_model(SMALL, TOKENIZER, 0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        assert supervised_step(model, optimizer, columns) == [False] * len(talks)
        weights.append(torch.cat([parameter.flatten() for parameter in model.parameters()]))
    before = torch.cat([p.flatten() for p in build_model(SMALL, TOKENIZER, 0).parameters()])
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-6)
    assert (weights[0] - before).abs().max() > 1e-3


def test_correct_rows_are_reported_in_the_order_of_the_batch() -> None:
    torch.set_num_threads(1)
    recipe = replace(SMALL, warmup_lr=2e-2, warmup_ramp_steps=0)
    model = build_model(recipe, TOKENIZER, 0)
    optimizer = build_optimizer(model, recipe)
    known = Conversation([Message("user", "ab"), Message("assistant", "cd", trained=True)])
    other = Conversation([Message("user", "x"), Message("assistant", "yz", trained=True)])
    for _ in range(30):
        supervised_step(model, optimizer, encode(TOKENIZER, [known] * 2, TOOLS))
    columns = encode(TOKENIZER, [other, known, other, known], TOOLS)
    assert supervised_step(model, optimizer, columns) == [False, True, False, True]


def test_learned_and_open_ended_lessons_get_every_fourth_turn() -> None:
    exact: dict[Any, float] = {"reverse": 0.5, "retry": 0.0, "propose": 0.0}
    targets = {name: target_of(name, 0.12) for name in exact}
    assert targets == {"reverse": 0.12, "retry": 0.12, "propose": 0.0}
    assert target_of("hint", 0.12) == 0.95  # its minimum
    names = list(islice(timetable(exact, targets), 12))
    assert names == ["reverse", "retry", "propose", "retry", "retry", "retry"] * 2


def test_a_warm_up_that_misses_its_target_names_the_lessons(tmp_path: Path) -> None:
    class Short(TinyChat):
        recipe = replace(SMALL, warmup_max_steps=3)

    config = TinyChatConfig(lessons=["reverse", "propose"])
    with pytest.raises(
        RunError, match=r"after 3 supervised steps .*'reverse': 0\.0.*'reverse': 0\.12"
    ):
        Short(config).make(tmp_path / "m", 0, lambda state, share: None)
    assert not (tmp_path / "m").exists()


@pytest.mark.slow
def test_it_can_partly_do_every_lesson(tmp_path: Path) -> None:
    TinyChat(TinyChatConfig()).make(tmp_path / "m", 0, lambda state, share: None)
    report = json.loads((tmp_path / "m" / "warmup.json").read_text())
    exact = report["lessons"]
    assert all(0.1 < exact[name] < 0.8 for name in LESSONS if name not in ("hint", "propose"))
    assert report["steps"] < 300
