"""An env's own sampling table is completed by the group's when the config is validated."""

import pytest

from prime_rl.config.run import RunConfig

LEAST = {"model": {"name": "m/m"}, "max_steps": 3}


def config_with(part, group, own):
    env = {"id": "e"} if own is None else {"id": "e", "sampling": own}
    return RunConfig.model_validate(
        LEAST | {"orchestrator": {part: {"env": [env], "sampling": group}}}
    )


def sampling_of(config, part):
    (env,) = getattr(config.orchestrator, part).env
    return env.sampling


@pytest.mark.parametrize("part", ["train", "eval"])
def test_an_env_overrides_only_what_it_sets_also_after_run_json(part):
    group = {"temperature": 0.7, "max_completion_tokens": 32, "extra_body": {"a": 1}}
    first = config_with(part, group, {"max_completion_tokens": 64})
    for config in (first, RunConfig.model_validate_json(first.model_dump_json())):
        found = sampling_of(config, part)
        assert (found.temperature, found.max_completion_tokens) == (0.7, 64)
        assert found.extra_body == {"a": 1}
        assert config == first


def test_a_value_that_an_env_sets_to_the_default_counts():
    found = sampling_of(config_with("train", {"temperature": 0.7}, {"temperature": 1.0}), "train")
    assert found.temperature == 1.0
    nothing = config_with("eval", {"top_p": 0.5}, {"top_p": None})
    assert sampling_of(nothing, "eval").top_p is None


def test_an_env_without_a_table_of_its_own_has_none():
    assert sampling_of(config_with("train", {"temperature": 0.7}, None), "train") is None
