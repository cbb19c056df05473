"""`[inference]`: engines of the run, or running engines, never both."""

import pytest
from pydantic import ValidationError

from prime_rl import ConfigError
from prime_rl.config.inference import InferenceConfig
from prime_rl.config.run import DeploymentConfig, RunConfig
from prime_rl_app.resolve import Resolved, check_engine


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


def test_engines_elsewhere_need_a_key_and_a_gpu_of_their_own(monkeypatch):
    inference = {"base_url": "http://a:1", "admin_key_var": "ENGINES"}
    monkeypatch.delenv("ENGINES", raising=False)
    config = RunConfig(model={"name": "m"}, max_steps=1, inference=inference)
    with pytest.raises(ConfigError, match=r"environment variable ENGINES .* is not set"):
        check_engine(Resolved(config))
    monkeypatch.setenv("ENGINES", "key")
    check_engine(Resolved(config))
    shared = config.model_copy(update={"deployment": DeploymentConfig(colocated=True)})
    with pytest.raises(ConfigError, match=r"deployment\.colocated .* inference\.base_url"):
        check_engine(Resolved(shared))
