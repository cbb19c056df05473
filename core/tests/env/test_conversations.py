"""Demonstrations train exactly the tokens that the policy would have sampled."""

import pytest
from renderers import Qwen3RendererConfig, config_from_name

from prime_rl import ConfigError
from prime_rl.env.conversations import Rendering
from prime_rl.rollout import ROLES
from prime_rl_environments.tiny.tokenizer import build_tokenizer

CHAT = [
    {"role": "user", "content": "ab"},
    {"role": "assistant", "content": "ba"},
    {"role": "user", "content": "cd"},
    {"role": "assistant", "content": "dc"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def trained(sample, tokenizer):
    return tokenizer.decode(sample.token_ids[sample.loss_mask])


@pytest.mark.parametrize("turns", [2, 4])
def test_an_empty_thought_that_the_prompt_holds_is_not_trained(folder, tokenizer, turns):
    rendering = Rendering(folder, Qwen3RendererConfig(enable_thinking=False))
    sample = rendering.supervised_sample(CHAT[:turns])
    assert trained(sample, tokenizer) == "ba<|im_end|>dc<|im_end|>"[: 12 * turns // 2]


def test_the_tokens_before_the_first_trained_one_are_the_prompt_of_a_rollout(folder):
    rendering = Rendering(folder, Qwen3RendererConfig(enable_thinking=False))
    sample = rendering.supervised_sample(CHAT[:2])
    first = int(sample.loss_mask.argmax())
    prompt = rendering.ids(CHAT[:1], add_generation_prompt=True)
    assert sample.token_ids[:first].tolist() == prompt


def test_roles_and_bodies_are_set(folder, tokenizer):
    rendering = Rendering(folder, Qwen3RendererConfig(enable_thinking=False))
    sample = rendering.supervised_sample(CHAT[:2])
    user = sample.token_ids[(sample.roles == ROLES.index("user")) & sample.is_content]
    assert tokenizer.decode(user) == "ab"


def test_a_renderer_that_does_not_mark_the_assistants_tokens_is_refused(folder):
    rendering = Rendering(folder, config_from_name("default"))
    with pytest.raises(ConfigError, match="'default' does not mark the assistant's tokens"):
        rendering.supervised_sample(CHAT)


def test_a_system_message_alone_renders_without_a_generation_prompt(folder, tokenizer):
    rendering = Rendering(folder, Qwen3RendererConfig(enable_thinking=False))
    ids = rendering.ids([{"role": "system", "content": "hint"}])
    assert tokenizer.decode(ids) == "<|im_start|>system\nhint<|im_end|>\n"
