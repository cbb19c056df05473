"""Keys that are gone: an old config loads, and says what to write instead."""

import warnings

import pytest
from pydantic import ValidationError

from prime_rl.config.removed import REMOVED, without_removed
from prime_rl.config.run import RunConfig

LEAST = {"model": {"name": "m"}, "max_steps": 1}


def config_with(key, value):
    place, _, name = key.rpartition(".")
    return RunConfig.model_validate({**LEAST, place: {name: value}})


@pytest.mark.parametrize("key", REMOVED)
def test_a_resolved_config_of_an_earlier_version_loads_without_a_word(key):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert config_with(key, REMOVED[key].default) == RunConfig.model_validate(LEAST)


@pytest.mark.parametrize("key", REMOVED)
def test_another_value_is_named_with_what_to_write_instead(key):
    with pytest.warns(FutureWarning) as caught:
        found = config_with(key, 7)
    assert found == RunConfig.model_validate(LEAST)
    (said,) = {str(each.message) for each in caught}
    assert said == f"{key} = 7 is ignored: the key is gone. {REMOVED[key].instead}"


@pytest.mark.parametrize("key", REMOVED)
def test_a_key_that_is_gone_is_no_key_any_more(key):
    place, _, name = key.rpartition(".")
    table = RunConfig.model_validate(LEAST).model_dump()
    assert name not in table[place]


def test_a_table_that_is_none_keeps_its_own_error():
    with pytest.raises(ValidationError, match="rollout_transport"):
        RunConfig.model_validate({**LEAST, "rollout_transport": 3})
    assert without_removed({"rollout_transport": 3}) == {"rollout_transport": 3}


def test_the_given_table_is_not_changed():
    given = {"rollout_transport": {"hwm": 4, "host": "a"}}
    assert without_removed(given) == {"rollout_transport": {"host": "a"}}
    assert given == {"rollout_transport": {"hwm": 4, "host": "a"}}
