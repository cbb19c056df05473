"""``auto`` chooses the renderer that gives the tokens of the model's own chat template."""

import logging
import socket
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import prime_rl_renderers
from prime_rl import ConfigError
from prime_rl_environments.tiny.tokenizer import build_tokenizer
from prime_rl_renderers import AutoRenderer, RendererSettings

QWEN3 = (Path(prime_rl_renderers.__file__).parent / "qwen3.jinja").read_text("utf-8")

LLAMA = """\
{%- if tools %}{{ raise_exception('this fine-tune has no tools') }}{% endif -%}
{{- bos_token + '<|start_header_id|>system<|end_header_id|>\n\n' -}}
{{- 'Cutting Knowledge Date: December 2023\nToday Date: ' -}}
{{- date_string | default(strftime_now('%d %b %Y')) + '\n\n' -}}
{%- if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% endif -%}
{{- '<|eot_id|>' -}}
{%- for message in messages if message.role != 'system' -%}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' -}}
{{- message.content | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif -%}
"""

GLM = """\
{%- if tools %}{{ raise_exception('no tools') }}{% endif -%}
{{- '[gMASK]<sop>' -}}
{%- set last = namespace(user=-1) -%}
{%- for m in messages if m.role == 'user' %}{% set last.user = messages.index(m) %}{% endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- set keeps = m.reasoning_content is defined and loop.index0 > last.user -%}
{{- '<|assistant|>\n<think>' + (m.reasoning_content | trim if keeps else '') + '</think>' -}}
{{- '\n' + m.content | trim -}}
{%- else -%}
{{- '<|' + m.role + '|>\n' + m.content -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif -%}
"""

CHATML = """\
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}
"""

TOKENS = {
    "llama": [
        "<|begin_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|end_of_text|>",
        "<|eom_id|>",
    ],
    "glm": [
        *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        *("<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>"),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ],
    "none": ["<s>", "</s>"],
}


def tokenizer_of(family, template):
    """A byte-level tokenizer with the special tokens of a family."""
    special = TOKENS[family]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: number for number, text in enumerate(special + letters)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token=special[0], eos_token=special[1], chat_template=template
    )


def qwen3(template=QWEN3):
    made = build_tokenizer()
    made.chat_template = template
    return made


def chosen(tokenizer, **fields):
    return AutoRenderer(RendererSettings(**fields)).build_for(lambda: tokenizer, "a/folder", fields)


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO, logger="prime_rl.renderers")
    return caplog


@pytest.mark.parametrize(
    ("tokenizer", "name"),
    [
        pytest.param(qwen3(), "qwen3", id="qwen3"),
        pytest.param(tokenizer_of("llama", LLAMA), "llama-3", id="llama"),
        pytest.param(tokenizer_of("glm", GLM), "glm-4.5", id="glm"),
    ],
)
def test_the_renderer_of_the_family_is_chosen_and_the_log_says_why(tokenizer, name, said):
    assert chosen(tokenizer).name == name
    [line] = said.messages
    assert line.startswith(f"renderer auto: {name}, as it gives the tokens of the model's chat")


def test_nothing_is_asked_of_a_network(monkeypatch):
    def refuse(*args, **settings):
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert chosen(qwen3()).name == "qwen3"
    assert chosen(tokenizer_of("none", CHATML)).name == "default"


def test_a_fine_tune_whose_template_does_not_think_gets_the_renderer_that_does_not():
    changed = "{%- set enable_thinking = enable_thinking | default(false) -%}\n" + QWEN3
    config = chosen(qwen3(changed))
    assert (config.name, config.enable_thinking) == ("qwen3", False)


def test_the_users_setting_is_a_variable_of_the_template_too():
    config = chosen(qwen3(), enable_thinking=False)
    assert (config.name, config.enable_thinking) == ("qwen3", False)


def test_a_changed_template_gets_default_with_the_difference_and_what_follows(said):
    changed = QWEN3.replace("<|im_start|>user", "<|im_start|>human")
    changed = changed.replace("'<|im_start|>' + message.role", "'<|im_start|>>' + message.role")
    assert changed != QWEN3
    assert chosen(qwen3(changed)).name == "default"
    [record] = said.records
    assert record.levelname == "WARNING"
    assert "renderer auto: default (closest was qwen3" in record.message
    assert "First difference, 'one turn': from token 1 the template has" in record.message
    assert "trains as a branch of its own" in record.message


def test_a_template_that_forgets_the_tools_is_not_proven(said):
    assert chosen(qwen3(CHATML)).name == "default"
    assert "First difference, 'tools'" in said.text or "thought" in said.text


def test_a_tokenizer_of_no_family_gets_default(said):
    assert chosen(tokenizer_of("none", CHATML)).name == "default"
    assert "no renderer takes this tokenizer" in said.text


def test_a_tokenizer_without_a_template_is_refused_with_a_way_out():
    with pytest.raises(ConfigError, match=r"'a/folder' has no chat template.*chat_template.jinja"):
        chosen(tokenizer_of("none", None))


def test_a_setting_that_only_another_renderer_has_is_refused():
    with pytest.raises(ConfigError, match=r"renderer\.date_string: no renderer with this setting"):
        chosen(qwen3(), date_string="1 Jan 2026")


def test_a_setting_that_no_renderer_has_is_refused_before_anything_starts():
    AutoRenderer(RendererSettings(enable_thinking=False)).check("a/folder")
    with pytest.raises(ConfigError, match=r"'auto'\)\.thinkin: unknown key"):
        AutoRenderer(RendererSettings(thinkin="all")).check("a/folder")


def test_a_hub_id_that_the_package_knows_needs_no_proof():
    loads: list[None] = []
    renderer = AutoRenderer(RendererSettings())
    config = renderer.build_for(lambda: loads.append(None), "Qwen/Qwen3-0.6B", {})
    assert loads == []
    assert config.name == "qwen3"


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ("{% for m in %}", "TemplateSyntaxError"),
        ("{{ raise_exception('no') }}", "TemplateError: no"),
        ("{{ unknown.name }}", "'unknown' is undefined"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("hello", "does not show what the user says"),
    ],
)
def test_a_template_that_gives_no_prompt_is_refused_with_its_error(template, fault):
    with pytest.raises(ConfigError, match=rf"gives no prompt: .*{fault}.*chat_template\.jinja"):
        chosen(qwen3(template))


def test_a_template_that_needs_a_system_prompt_gets_default():
    needs = "{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}" + CHATML
    assert chosen(qwen3(needs)).name == "default"
