"""Chat templates with a renderer's settings as defaults."""

import jinja2
import jinja2.meta
import pytest
from renderers import config_from_name

from prime_rl_renderers.templates import as_sampled, template_settings, templates, with_defaults

OWN = "{% if thinking %}T{% else %}F{% endif %} {{ date }}"

FAMILY = r"""
{%- set ns = namespace(last_query_index=2) %}
{%- for message in messages %}
    {%- set content, reasoning_content = message.content, message.reasoning_content or '' %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' }}
    {%- elif loop.index0 > ns.last_query_index %}
        {{- reasoning_content + content }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + content }}
    {%- endif %}
{%- endfor %}"""
"""How the templates of the Qwen3 family write history, without the rest."""
TALK = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
]


def render(template, **variables):
    return jinja2.Environment().from_string(template).render(variables)


@pytest.mark.parametrize("value", [True, 3, 0.5, "it's\n\"{%x%}", ["a", None], {"a": [True]}])
def test_a_default_is_written_as_jinja_reads_it(value):
    text = with_defaults("{{ date == wanted }}", {"date": value})
    assert render(text, wanted=value) == "True"


def test_a_caller_decides_over_a_default():
    text = with_defaults(OWN, {"thinking": False, "date": "today"})
    assert render(text) == "F today"
    assert render(text, thinking=True, date="then") == "T then"
    variables = jinja2.meta.find_undeclared_variables(jinja2.Environment().parse(text))
    assert variables == {"thinking", "date"}  # vLLM drops what the template does not ask for


def test_the_defaults_of_an_earlier_run_are_replaced():
    before = with_defaults(OWN, {"thinking": True, "date": "x"})
    assert with_defaults(before, {"thinking": False}) == with_defaults(OWN, {"thinking": False})
    assert with_defaults(before, {}) == OWN


def test_variables_that_a_template_does_not_read_are_left_out():
    assert with_defaults("{{ messages }}", {"thinking": False}) == "{{ messages }}"


def test_the_settings_are_those_the_template_shares():
    own = config_from_name("qwen3.5").model_copy(update={"enable_thinking": False})
    assert template_settings(own) == {"add_vision_id": False, "enable_thinking": False}
    assert template_settings(config_from_name("qwen3.5")) == {"add_vision_id": False}


def test_a_reply_sampled_without_a_thought_keeps_the_empty_one():
    text = with_defaults(as_sampled(FAMILY), {"enable_thinking": False})
    prompt = "<|im_start|>user\na<|im_end|><|im_start|>assistant\n{}b<|im_start|>user\nc<|im_end|>"
    assert render(text, messages=TALK) == prompt.format("<think>\n\n</think>\n\n")
    assert render(text, messages=TALK, enable_thinking=True) == prompt.format("")
    assert render(FAMILY, messages=TALK) == prompt.format("")
    assert as_sampled(as_sampled(FAMILY)) == as_sampled(FAMILY)


def test_a_thought_is_kept_where_the_renderer_retains_all():
    talk = [TALK[0], TALK[1] | {"reasoning_content": "hm "}, TALK[2]]
    text = with_defaults(as_sampled(FAMILY), {"thinking_retention": "all"})
    assert "hm b" in render(text, messages=talk)
    assert "hm" not in render(as_sampled(FAMILY), messages=talk)


def test_a_model_without_a_template_gets_the_one_made_for_the_renderer():
    (text,) = templates(None, config_from_name("qwen3"))
    assert "<|im_start|>" in text
    assert list(templates(None, config_from_name("llama-3"))) == []
