"""`[inference]`: engines of the run, or running engines, never both."""

import pytest
from pydantic import ValidationError

from prime_rl.config.inference import InferenceConfig


def test_one_url_or_several_with_or_without_v1():
    assert InferenceConfig(base_url="http://a:1/v1").base_url == ("http://a:1",)
    both = InferenceConfig(base_url=["http://a:1", "https://b/x/v1/"])
    assert both.base_url == ("http://a:1", "https://b/x")


@pytest.mark.parametrize("urls", ["a:1", "ftp://a", "http://", [], [3]])
def test_what_is_no_url_is_refused(urls):
    with pytest.raises(ValidationError):
        InferenceConfig(base_url=urls)


def test_the_error_says_what_a_url_looks_like():
    with pytest.raises(ValidationError) as caught:
        InferenceConfig(base_url=["http://a", "a:1"])
    said = str(caught.value)
    assert "'a:1' is no URL of an engine: expected http:// or https://, a host" in said
    assert "pattern" not in said and "^" not in said


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"replicas": 2}, "replicas says how to start an engine"),
        ({"engine": "vllm"}, "engine says how to start an engine"),
        ({"port": 8000}, "port says how to start an engine"),
        ({"hang_timeout": 60.0}, "hang_timeout says how to start an engine"),
        ({"embedded": {"num_slots": 4}}, "embedded says how to start an engine"),
    ],
)
def test_start_settings_are_refused_with_running_engines(more, said):
    with pytest.raises(ValidationError, match=said):
        InferenceConfig(base_url="http://a:1", **more)


def test_an_engine_named_twice_and_a_key_for_none_are_refused():
    with pytest.raises(ValidationError, match="names an engine twice"):
        InferenceConfig(base_url=["http://a:1", "http://a:1/v1"])
    with pytest.raises(ValidationError, match="base_url names none"):
        InferenceConfig(admin_key_var="KEY")


@pytest.mark.parametrize("table", [{}, {"replicas": 3}, {"base_url": "http://a:1"}])
def test_a_written_config_reads_back(table):
    config = InferenceConfig(**table)
    assert InferenceConfig.model_validate_json(config.model_dump_json()) == config


def test_headers_are_for_engines_that_run_already():
    url = "http://10.0.0.5:8000/v1"
    made = InferenceConfig(base_url=url, headers={"X-Team": "a"}, headers_from_env={"X-P": "P"})
    assert made.headers == {"X-Team": "a"} and made.headers_from_env == {"X-P": "P"}
    for key, value in (("headers", {"X-Team": "a"}), ("headers_from_env", {"X-P": "P"})):
        with pytest.raises(ValidationError, match=f"{key} are for engines that are running"):
            InferenceConfig(**{key: value})
    with pytest.raises(ValidationError, match="env_vars says how to start an engine"):
        InferenceConfig(base_url=url, env_vars={"A": "b"})
