"""Keys that are gone: an old config loads, and says what to write instead."""

import warnings
from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from prime_rl import ConfigWarning, ModelMaker, PluginConfig, Removed
from prime_rl.config.removed import REMOVED, without_removed
from prime_rl.config.run import RunConfig
from prime_rl.registry.offers import MODEL, settings_of

LEAST = {"model": {"name": "m"}, "max_steps": 1}
GONE = [key for key, removed in REMOVED.items() if removed.moved_to is None]
MOVED = [key for key, removed in REMOVED.items() if removed.moved_to is not None]


def config_with(key, value, **others):
    place, _, name = key.rpartition(".")
    return RunConfig.model_validate({**LEAST, place: {name: value}, **others})


@pytest.mark.parametrize("key", REMOVED)
def test_a_resolved_config_of_an_earlier_version_loads_without_a_word(key):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert config_with(key, REMOVED[key].default) == RunConfig.model_validate(LEAST)


@pytest.mark.parametrize("key", GONE)
def test_another_value_is_named_with_what_to_write_instead(key):
    with pytest.warns(ConfigWarning) as caught:
        config = config_with(key, 7)
    assert config == RunConfig.model_validate(LEAST)
    (said,) = {str(each.message) for each in caught}
    assert said == f"{key} = 7 is ignored: the key is gone. {REMOVED[key].instead}"


@pytest.mark.parametrize("key", MOVED)
def test_a_value_moves_to_the_new_key_unless_that_is_set(key):
    new = REMOVED[key].moved_to
    value = {"type": "mine", "depth": 3} if key == "orchestrator.buffer" else 7
    with pytest.warns(ConfigWarning) as caught:
        config = config_with(key, value).model_dump()
    assert reduce(lambda table, name: table[name], new.split("."), config) == value
    (said,) = {str(each.message) for each in caught}
    assert said == f"{key} = {value!r} is read as {new}. {REMOVED[key].instead}"

    table = dict(LEAST)
    place, _, name = key.rpartition(".")
    for path, each in (((place, name), value), (new.split("."), {"type": "other"})):
        part = table
        for step in path[:-1]:
            part = part.setdefault(step, {})
        part[path[-1]] = each
    with pytest.warns(ConfigWarning, match=f"is ignored: the key is gone, and {new} is set"):
        kept = RunConfig.model_validate(table).model_dump()
    assert reduce(lambda table, name: table[name], new.split("."), kept) == {"type": "other"}


def test_a_buffer_takes_the_sampler_that_an_earlier_run_named_beside_it():
    older = {"buffer": {"depth": 3}, "buffer_sampler": "pools", "sampler": {"type": ""}}
    with pytest.warns(ConfigWarning, match=r"is read as orchestrator\.sampler\. Write that"):
        config = RunConfig.model_validate({**LEAST, "orchestrator": older})
    assert config.orchestrator.sampler.type == "pools"
    assert config.orchestrator.sampler.settings == {"depth": 3}


@pytest.mark.parametrize("key", REMOVED)
def test_a_key_that_is_gone_is_no_key_any_more(key):
    place, _, name = key.rpartition(".")
    table = RunConfig.model_validate(LEAST).model_dump()
    assert name not in table[place]


def test_a_table_that_is_none_keeps_its_own_error():
    with pytest.raises(ValidationError, match="rollout_transport"):
        RunConfig.model_validate({**LEAST, "rollout_transport": 3})
    assert without_removed({"rollout_transport": 3}) == {"rollout_transport": 3}


TABLES = st.dictionaries(
    st.sampled_from([*{key.split(".")[0] for key in REMOVED}, "observers"]),
    st.dictionaries(
        st.sampled_from([key.split(".")[-1] for key in REMOVED] + ["sampler", "other"]),
        st.sampled_from([None, 4, {}, {"type": ""}, {"type": "x", "n": 1}]),
    ),
)


@given(TABLES)
def test_the_given_table_is_not_changed_and_nothing_removed_stays(table):
    before = repr(table)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kept = without_removed(table)
    assert repr(table) == before
    for key in REMOVED:
        place, _, name = key.rpartition(".")
        assert name not in kept.get(place, {})
    others = {
        (place, name): value
        for place, part in table.items()
        for name, value in part.items()
        if f"{place}.{name}" not in REMOVED and name != "sampler"
    }
    assert all(kept[place][name] == value for (place, name), value in others.items())


class Maker(ModelMaker):
    """Of a plugin whose setting ``width`` is gone."""

    name = "maker"

    class config_class(PluginConfig):  # read as an attribute
        removed = {"width": Removed(default=4, instead="Every model is 4 wide.")}
        depth: int = 1


def test_a_plugin_lists_its_own_keys_that_are_gone():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet = settings_of(Maker, MODEL, {"width": 4, "depth": 2}, "model")
    assert quiet.model_dump() == {"depth": 2}

    with pytest.warns(ConfigWarning) as caught:
        assert settings_of(Maker, MODEL, {"width": 9, "depth": 2}, "model") == quiet
    (said,) = {str(each.message) for each in caught}
    assert said == "model.width = 9 is ignored: the key is gone. Every model is 4 wide."
