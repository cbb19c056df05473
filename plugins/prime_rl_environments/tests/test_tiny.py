"""The tiny policy: its tokenizer, its determinism, and its accuracy."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl import RunError
from prime_rl_environments import register_models
from prime_rl_environments.tiny import Recipe, TinyChat, TinyReverse, TinyReverseConfig
from prime_rl_environments.tiny.tokenizer import build_tokenizer
from prime_rl_environments.words import position_score, words

SMALL = Recipe(hidden_size=16, intermediate_size=16, head_dim=4, warmup_max_steps=3)
QUICK = TinyReverseConfig(warmup_exact=0.01)


class Small(TinyReverse):
    recipe = SMALL


TOKENIZER = build_tokenizer()


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def ignore(state: str, share: float) -> None:
    """Ignores progress."""


@pytest.fixture(scope="module")
def renderer() -> Any:
    from renderers import Qwen3RendererConfig, create_renderer

    return create_renderer(TOKENIZER, Qwen3RendererConfig(thinking_retention="all"))


def test_the_hook_returns_the_makers() -> None:
    assert list(register_models()) == [TinyReverse, TinyChat]
    assert (TinyReverse.name, TinyChat.name) == ("tiny-reverse", "tiny-chat")


def test_importing_the_plugin_imports_nothing_heavy() -> None:
    code = (
        "import sys, prime_rl_environments;"
        "heavy = ('torch', 'transformers', 'verifiers', 'renderers');"
        "print([name for name in heavy if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@given(st.text())
def test_any_text_round_trips_through_the_tokenizer(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert TOKENIZER.decode(ids, clean_up_tokenization_spaces=False) == text


def test_the_vocabulary_is_bytes_specials_and_role_lines() -> None:
    assert len(TOKENIZER) == 9 + 3 + 256
    assert TOKENIZER.encode("assistant\n", add_special_tokens=False) == [11]
    assert len(TOKENIZER.encode("assistant", add_special_tokens=False)) == 9


@pytest.mark.parametrize(("thinking", "extra"), [(True, 6), (False, 12)])
def test_the_warm_up_has_the_tokens_of_a_rollout(thinking: bool, extra: int) -> None:
    from renderers import Qwen3RendererConfig, create_renderer

    from prime_rl_environments.tiny.make import encode_pair

    renderer = create_renderer(TOKENIZER, Qwen3RendererConfig(enable_thinking=thinking))
    prompt, answer = encode_pair(TOKENIZER, "hello", thinking)
    messages = [{"role": "user", "content": "hello"}]
    assert prompt == renderer.render_ids(messages, add_generation_prompt=True)
    assert len(prompt) == len("hello") + extra
    assert renderer.parse_response(answer).content == "olleh"
    assert answer[-1] in renderer.get_stop_token_ids()


def test_the_renderer_separates_a_word_from_the_template(renderer: Any) -> None:
    rendered = renderer.render([{"role": "user", "content": "hello"}], add_generation_prompt=True)
    assert rendered.is_content == [False] * 2 + [True] * 5 + [False] * 4


def test_the_chat_template_gives_the_renderers_tokens(renderer: Any) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    ids = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == renderer.render_ids(messages, add_generation_prompt=True)


def test_labels_are_only_the_answer_shifted_by_one() -> None:
    from prime_rl_environments.tiny.make import encode_batch

    ids, labels = encode_batch(TOKENIZER, ["ab", "abc"])
    a, b, c = TOKENIZER.encode("abc", add_special_tokens=False)
    (newline,) = TOKENIZER.encode("\n", add_special_tokens=False)
    start, end, user, assistant, think, unthink = 1, 2, 10, 11, 7, 8
    thought = [think, newline, newline, unthink, newline, newline]
    short = [start, user, a, b, end, newline, start, assistant, b, a, end]
    long = [start, user, a, b, c, end, newline, start, assistant, *thought, c, b, a]
    assert ids.tolist() == [short + [0] * 7, long]
    no = [-100]
    assert labels.tolist() == [no * 7 + [b, a, end] + no * 8, no * 14 + [c, b, a, end]]


def test_equal_seeds_give_equal_weights_and_other_seeds_others(tmp_path: Path) -> None:
    class Untrained(TinyReverse):
        recipe = replace(SMALL, warmup_max_steps=6)

    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        Untrained(TinyReverseConfig(warmup_exact=0.0)).make(tmp_path / name, seed, ignore)
    a, b, c = (digest(tmp_path / name / "model.safetensors") for name in "abc")
    assert a == b != c


def test_progress_is_half_steps_and_half_accuracy() -> None:
    from prime_rl_environments.tiny.make import share_done

    assert [share_done(*each) for each in ((0, 0, 0.9), (0.5, 0, 0.9), (2, 0.45, 0.9))] == [
        0,
        0.25,
        0.75,
    ]
    assert share_done(9, 1, 0.9) == 0.99


@pytest.mark.slow
def test_a_longer_warm_up_makes_a_teacher(tmp_path: Path) -> None:
    TinyReverse(TinyReverseConfig(warmup_exact=0.9)).make(tmp_path / "m", 0, ignore)
    report = json.loads((tmp_path / "m" / "warmup.json").read_text())
    assert report["exact"] >= 0.9 and report["steps"] < 500
    assert list(tmp_path.iterdir()) == [tmp_path / "m"]  # no temporary folder stays


def test_a_warm_up_that_misses_its_target_fails_and_leaves_no_files(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"after 3 supervised steps 0\.00 .* expected 0\.01"):
        Small(QUICK).make(tmp_path / "m", 0, ignore)
    assert not (tmp_path / "m").exists()


@pytest.mark.slow  # the model is trained
def test_the_folder_is_complete_and_marked_ready(tiny_reverse: Path) -> None:
    assert {
        ".ready",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    } <= {file.name for file in tiny_reverse.iterdir()}
    config = json.loads((tiny_reverse / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]


@pytest.mark.slow
def test_it_reverses_about_half_of_unseen_words(tiny_reverse: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_reverse)
    model = AutoModelForCausalLM.from_pretrained(tiny_reverse)
    assert model.dtype == torch.float32
    assert 300_000 < model.num_parameters() < 400_000
    scores: list[float] = []
    sampled: list[float] = []
    torch.manual_seed(0)
    held_out = list(islice(words(0, "held_out", 6, 6), 64))  # equal lengths, so no padding
    prompts = [f"<|im_start|>user\n{w}<|im_end|>\n<|im_start|>assistant\n" for w in held_out]
    ids = tokenizer(prompts, return_tensors="pt", add_special_tokens=False)
    for sample, column in ((False, scores), (True, sampled)):
        options = (
            {"temperature": 1.0, "top_k": 0} if sample else {"temperature": None, "top_k": None}
        )
        out = model.generate(**ids, do_sample=sample, max_new_tokens=9, **options)
        replies = tokenizer.batch_decode(
            out[:, ids["input_ids"].shape[1] :], skip_special_tokens=True
        )
        column += [position_score(r, w[::-1]) for r, w in zip(replies, held_out, strict=True)]
    assert sum(scores) / 64 >= 0.5
    assert any(score == 1.0 for score in scores)
    assert 0.3 <= sum(sampled) / 64 <= 0.7  # good enough to learn from, with room to learn


def test_a_role_line_is_not_a_special_token() -> None:
    ids = TOKENIZER.encode("user\nhi", add_special_tokens=False)
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "user\nhi"
