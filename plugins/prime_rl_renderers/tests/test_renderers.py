"""Held against the installed renderers package."""

from typing import get_args

import pytest

import prime_rl_renderers
from prime_rl import ConfigError, PluginConfig
from prime_rl_renderers import AutoRenderer, RendererSettings, register_renderers


def offer(name):
    cls = next(cls for cls in register_renderers() if cls.name == name)
    return cls(PluginConfig())


def test_the_list_is_what_the_package_ships():
    from renderers import RendererConfig

    configs = get_args(get_args(RendererConfig)[0])
    names = {config.model_fields["name"].default for config in configs} - {"auto"}
    assert set(prime_rl_renderers.NAMES) == names


def test_a_named_renderer_takes_its_own_fields():
    config = offer("qwen3").build("x", {"thinking_retention": "all"})
    assert (config.name, config.thinking_retention) == ("qwen3", "all")


def test_an_unknown_field_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"renderer \(renderer 'qwen3'\)\.thinkin: unknown"):
        offer("qwen3").build("x", {"thinkin": "all"})
    with pytest.raises(ConfigError, match="enable_thinkin: unknown key; did you mean 'enable_thin"):
        offer("qwen3").build("x", {"enable_thinkin": False})
    with pytest.raises(ConfigError, match=r"known here: .*enable_thinking, .*name"):
        offer("qwen3").build("x", {"zzz": 1})


def test_an_unknown_field_is_refused_before_anything_starts():
    renderer = type(offer("qwen3"))
    renderer(RendererSettings()).check("x")
    with pytest.raises(ConfigError, match="thinkin: unknown key"):
        renderer(RendererSettings(thinkin="all")).check("x")


def test_auto_knows_a_model_by_its_exact_id():
    config = AutoRenderer(PluginConfig()).build("Qwen/Qwen3-0.6B", {"enable_thinking": False})
    assert (config.name, config.enable_thinking) == ("qwen3", False)


def test_auto_refuses_a_field_its_renderer_does_not_have():
    with pytest.raises(ConfigError, match=r"'qwen3'\)\.bogus: unknown key"):
        AutoRenderer(PluginConfig()).build("Qwen/Qwen3-0.6B", {"bogus": 1})


def test_auto_refuses_an_unknown_id_without_a_tokenizer_and_says_what_to_do():
    with pytest.raises(ConfigError, match=r"chooses by the tokenizer.*Name a renderer: one of"):
        AutoRenderer(PluginConfig()).build("mine/finetune", {})


@pytest.mark.parametrize("model", ["tiny-reverse", ".", "mine/finetune"])
def test_auto_takes_any_model_and_chooses_when_the_tokenizer_is_there(model):
    AutoRenderer(RendererSettings()).check(model)
