"""The exported chat template renders what the run's renderer renders, or the run reports the
difference."""

import pytest
from renderers import Qwen3RendererConfig, create_renderer
from renderers.qwen3 import Qwen3Renderer
from transformers import AutoTokenizer

from prime_rl import ChatTemplate, ConfigError, PluginConfig
from prime_rl.rundir.chat_template import put_chat_template, write_chat_template
from prime_rl_environments.tasks import LOOKUP_SCHEMA
from prime_rl_environments.tiny.chat import build_chat_tokenizer
from prime_rl_environments.tiny.tokenizer import build_tokenizer
from prime_rl_renderers import register_renderers
from prime_rl_renderers.chat_template import choose

NO_THOUGHT = "<think>\n\n</think>\n\n"
TALK = [
    {"role": "system", "content": "Words\nbackwards."},
    {"role": "user", "content": "abc"},
    {"role": "assistant", "content": "cba"},
    {"role": "user", "content": "defg"},
    {"role": "assistant", "content": "gfed"},
    {"role": "user", "content": "hi"},
]
ARGUMENTS = {"path": "a", "name": "ü"}
CALL = {"id": "0", "type": "function", "function": {"name": "get", "arguments": ARGUMENTS}}
LOOKUP = [
    {"role": "user", "content": "look"},
    {"role": "assistant", "content": "I look.", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "b", "tool_call_id": "0"},
    {"role": "tool", "content": "c", "tool_call_id": "0"},
]


class ShoutingConfig(Qwen3RendererConfig):
    """Of ``Shouting``."""


class Shouting(Qwen3Renderer):
    """A renderer that no template matches: it ends every prompt in an exclamation mark."""

    config_class = ShoutingConfig

    def render_ids(self, messages, **settings):
        return [*super().render_ids(messages, **settings), *self._encode("!")]


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "run/configs").mkdir(parents=True)
    return tmp_path / "run"


def exported(run_dir, tokenizer, name, **fields):
    """The tokenizer of a model folder of a run with this renderer, and the run's choice."""
    weights = run_dir.parent / "weights"
    tokenizer.save_pretrained(weights)
    cls = next(cls for cls in register_renderers() if cls.name == name)
    offer = cls(PluginConfig())
    chosen = offer.chat_template(
        AutoTokenizer.from_pretrained(weights), offer.build(str(weights), fields)
    )
    write_chat_template(run_dir, chosen)
    put_chat_template(run_dir, weights)
    return AutoTokenizer.from_pretrained(weights), chosen


def by_template(tokenizer, messages, **settings):
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False, **settings
    )


def test_a_renderer_of_another_family_is_refused_with_the_token_that_is_missing(run_dir):
    """Of Qwen3.5, whose images have tokens that a tokenizer of Qwen3 lacks."""
    said = "'qwen3.5' does not fit the model's tokenizer: .*vision_start.* write \"auto\""
    with pytest.raises(ConfigError, match=said):
        exported(run_dir, build_tokenizer(), "qwen3.5")


@pytest.mark.parametrize("build", [build_tokenizer, build_chat_tokenizer])
@pytest.mark.parametrize("thinking", [False, True])
def test_the_exported_template_renders_what_the_qwen3_renderer_renders(run_dir, build, thinking):
    tokenizer, chosen = exported(run_dir, build(), name="qwen3", enable_thinking=thinking)
    assert chosen.difference is None and chosen.warning is None
    renderer = create_renderer(build(), Qwen3RendererConfig(enable_thinking=thinking))
    for messages in (TALK[1:2], TALK[:2], TALK[1:], TALK, LOOKUP[:1], LOOKUP):
        for tools in (None, [LOOKUP_SCHEMA]):
            wanted = renderer.render_ids(messages, tools=tools, add_generation_prompt=True)
            assert by_template(tokenizer, messages, tools=tools) == wanted


def test_without_thinking_the_prompt_of_a_six_letter_word_has_18_tokens(run_dir):
    tokenizer, _ = exported(run_dir, build_tokenizer(), name="qwen3", enable_thinking=False)
    ids = by_template(tokenizer, [{"role": "user", "content": "abcdef"}])
    start = "<|im_start|>"
    assert tokenizer.decode(ids) == (
        f"{start}user\nabcdef<|im_end|>\n{start}assistant\n{NO_THOUGHT}"
    )
    # 1 + 1 + 6 letters + 1 + 1, then 1 + 1, then a token each for two tags and four newlines
    assert len(ids) == 18


def test_a_client_can_still_request_thinking(run_dir):
    tokenizer, _ = exported(run_dir, build_tokenizer(), name="qwen3", enable_thinking=False)
    assert NO_THOUGHT in tokenizer.decode(by_template(tokenizer, TALK))
    thinks = tokenizer.decode(by_template(tokenizer, TALK, enable_thinking=True))
    assert "think" not in thinks


def test_a_thought_that_the_renderer_keeps_in_later_turns_stays_in_the_prompt(run_dir):
    table = {"name": "qwen3", "thinking_retention": "all"}
    tokenizer, chosen = exported(run_dir, build_tokenizer(), **table)
    assert chosen.difference is None
    talk = [dict(TALK[1]), {"role": "assistant", "content": "<think>\nx\n</think>\n\ncba"}, TALK[3]]
    assert "<think>\nx\n</think>\n\ncba<|im_end|>" in tokenizer.decode(by_template(tokenizer, talk))


def test_a_matching_template_is_kept(run_dir):
    tokenizer, chosen = exported(run_dir, build_tokenizer(), name="default")
    assert chosen == ChatTemplate(None, None)
    assert tokenizer.chat_template == build_tokenizer().chat_template


def test_the_settings_of_the_default_renderer_become_defaults_of_the_models_own_template(run_dir):
    own = build_tokenizer()
    own.chat_template = "{{ mood }}{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer, chosen = exported(run_dir, own, name="default", mood='"gl\nad" %}')
    assert chosen.difference is None
    assert tokenizer.decode(by_template(tokenizer, TALK[1:2])) == '"gl\nad" %}abc'


def test_a_renderer_without_a_matching_template_is_reported(run_dir):
    place = f"{__file__}:Shouting"
    _, chosen = exported(run_dir, build_tokenizer(), name="custom", import_path=place)
    assert chosen.difference.startswith("First difference, 'one turn': from token ")
    assert "the template has '' (" in chosen.difference
    assert "the renderer '!' (" in chosen.difference
    assert "no chat template renders what the run's renderer renders" in chosen.warning


def test_the_closest_of_differing_templates_is_exported_with_its_first_difference():
    tokenizer = build_tokenizer()
    renderer = create_renderer(tokenizer, Qwen3RendererConfig())
    best, difference = choose(
        tokenizer, renderer, ["{{ nothing.at.all }}", tokenizer.chat_template]
    )
    assert best == tokenizer.chat_template  # it offers no tools
    assert difference.startswith(
        "First difference, 'tools': from token 1 the template has 'user\\n"
    )
    assert choose(tokenizer, renderer, []) == (None, "The model has no chat template")
