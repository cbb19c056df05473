"""Demonstrations train exactly the tokens that the policy would have sampled."""

import pytest
from renderers import Qwen3RendererConfig, config_from_name
from small_tokenizer import build_tokenizer

from prime_rl import ConfigError
from prime_rl.env.conversations import Rendering
from prime_rl.rollout import ROLES

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


def test_where_a_renderer_marks_no_tokens_a_reply_trains_up_to_the_one_that_ends_it(
    folder, tokenizer
):
    rendering = Rendering(folder, config_from_name("default"))
    sample = rendering.supervised_sample(CHAT[:2])
    trained = tokenizer.decode(sample.token_ids[sample.loss_mask])
    assert trained == CHAT[1]["content"] + "<|im_end|>"
    assert sample.loss_mask[-1]


def test_a_system_message_alone_renders_without_a_generation_prompt(folder, tokenizer):
    rendering = Rendering(folder, Qwen3RendererConfig(enable_thinking=False))
    ids = rendering.ids([{"role": "system", "content": "hint"}])
    assert tokenizer.decode(ids) == "<|im_start|>system\nhint<|im_end|>\n"


THOUGHT = {"reasoning_content": "hm"}
FUNCTION = {"name": "f", "arguments": {"a": 1}}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "0", "type": "function", "function": FUNCTION}],
}
RESULT = {"role": "tool", "tool_call_id": "0", "content": "7"}
PARAMETERS = {"type": "object", "properties": {}}
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "x", "parameters": PARAMETERS}}
]


def replies(samples, tokenizer):
    return [trained(sample, tokenizer) for sample in samples]


def test_several_turns_with_thoughts_are_a_sample_each_where_the_renderer_strips_them(
    folder, tokenizer
):
    rendering = Rendering(folder, Qwen3RendererConfig())
    chat = [m | THOUGHT if m["role"] == "assistant" else m for m in CHAT]
    samples = rendering.supervised_samples(chat)
    assert replies(samples, tokenizer) == [
        "<think>\nhm\n</think>\n\nba<|im_end|>",
        "<think>\nhm\n</think>\n\ndc<|im_end|>",
    ]
    for sample, turns in zip(samples, (1, 3), strict=True):
        first = int(sample.loss_mask.argmax())
        prompt = rendering.ids(chat[:turns], add_generation_prompt=True)
        assert sample.token_ids[:first].tolist() == prompt
        assert sample.loss_mask[first:].all()
    with pytest.raises(ConfigError, match="4 messages is 2 samples"):
        rendering.supervised_sample(chat)


def test_a_call_trains_after_the_tools_and_its_thought_stays_for_the_next_turn(folder, tokenizer):
    rendering = Rendering(folder, Qwen3RendererConfig())
    chat = [CHAT[0], CALL | THOUGHT, RESULT, CHAT[1] | THOUGHT]
    (sample,) = rendering.supervised_samples(chat, TOOLS)
    thought = "<think>\nhm\n</think>\n\n"
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    assert trained(sample, tokenizer) == thought + call + thought + "ba<|im_end|>"
    assert '"description": "x"' in tokenizer.decode(sample.token_ids)
    result = sample.token_ids[(sample.roles == ROLES.index("tool")) & sample.is_content]
    assert tokenizer.decode(result) == "7"


def test_a_thought_that_no_rollout_could_sample_is_refused(folder):
    rendering = Rendering(folder, Qwen3RendererConfig(enable_thinking=False))
    with pytest.raises(ConfigError, match="message 1 of a demonstration could not be sampled"):
        rendering.supervised_samples([CHAT[0], CHAT[1] | THOUGHT])


@pytest.mark.parametrize("content", ["", "I look it up."])
def test_calls_that_the_template_leaves_out_are_refused(folder, content):
    """Else the policy would learn an empty reply where it should call a tool."""
    rendering = Rendering(folder, config_from_name("default"))
    chat = [CHAT[0], CALL | {"content": content}]
    with pytest.raises(ConfigError, match=r"message 1 .* calls tools, and the renderer 'default'"):
        rendering.supervised_samples(chat, TOOLS)
    assert rendering.supervised_samples([CHAT[0], CHAT[1] | {"content": content}], TOOLS)
