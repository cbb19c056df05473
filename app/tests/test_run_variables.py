"""``env_vars``: environment variables of a run's processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl.errors import ConfigError
from prime_rl_app.commands import check_variables, variables_of
from prime_rl_app.config import load_config

CONFIG = Path(__file__).parents[2] / "configs" / "reverse_text" / "grpo.toml"
PARTS = ("trainer", "orchestrator", "inference")


def loaded(*overrides):
    return load_config([CONFIG], overrides)


def test_a_part_has_its_own_variables_and_those_of_the_run():
    config = loaded(
        *("--env-vars", '{A = "run", B = "run"}', "--trainer.env-vars.B", "trainer"),
        *("--inference.env-vars", '{"C": "engine"}'),
    )
    check_variables(config)
    assert variables_of(config, "trainer") == {"A": "run", "B": "trainer"}
    assert variables_of(config, "inference") == {"A": "run", "B": "run", "C": "engine"}
    assert variables_of(config, "orchestrator") == variables_of(config, "model")
    assert variables_of(config, "model") == {"A": "run", "B": "run"}


@pytest.mark.parametrize("where", ["env_vars", *(f"{part}.env_vars" for part in PARTS)])
@given(
    start=st.sampled_from(["", "WANDB_", "my_", "HF_"]),
    name=st.sampled_from(["API_KEY", "TOKEN", "SECRET", "PASSWORD", "token", "CREDENTIALS_FILE"]),
)
def test_a_secret_is_refused_and_not_shown(where, start, name):
    config = loaded(f"--{where}", f'{{"{start}{name}": "hunter2"}}')
    with pytest.raises(ConfigError) as caught:
        check_variables(config)
    assert str(caught.value).startswith(f"{where}.{start}{name}: by its name it is a secret")
    assert "deployment.pass_env" in str(caught.value) and "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "CUDA_VISIBLE_DEVICES",
        "PRIME_RL_PROCESS",
        "HF_HUB_OFFLINE",
        "RANK",
        "LOCAL_RANK",
        "NO_PROXY",
    ],
)
def test_what_the_run_sets_itself_is_refused(name):
    with pytest.raises(ConfigError, match=f"trainer.env_vars.{name}: the run sets this variable"):
        check_variables(loaded("--trainer.env-vars", f'{{{name} = "0"}}'))


@pytest.mark.parametrize("where", ["env_vars", *(f"{part}.env_vars" for part in PARTS)])
@pytest.mark.parametrize("name", ["", "A B", "A=B", "A\0", "A\n", " A", "A\t", "\x1b"])
def test_what_no_variable_may_be_called_is_refused(where, name):
    with pytest.raises(ConfigError) as caught:
        loaded(f"--{where}", json.dumps({name: "x"}))
    assert str(caught.value).startswith(f"{where}: expected the name of an environment variable")


@pytest.mark.parametrize("where", ["env_vars", *(f"{part}.env_vars" for part in PARTS)])
@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("a\0b", "expected a text without the character NUL"),
        ("\0", "expected a text without the character NUL"),
        ("\ud800", r"expected a text in UTF-8, got '\ud800'"),
        (b"\xff".decode("utf-8", "surrogateescape"), "expected a text in UTF-8"),
    ],
)
def test_a_value_that_no_variable_may_have_is_refused(where, value, says):
    with pytest.raises(ConfigError) as caught:
        loaded(f"--{where}", json.dumps({"A": value}))
    assert str(caught.value).startswith(f"{where}.A: {says}")


def test_a_text_that_is_no_utf_8_is_refused_anywhere():
    for key, place in (("model.name", "model.name"), ("run.name", "run.name")):
        with pytest.raises(ConfigError, match=f"{place}: expected a text in UTF-8, got"):
            loaded(f"--{key}", "a\udcff")
    with pytest.raises(ConfigError, match=r"orchestrator.train.env.0.args: expected a text in UTF"):
        loaded("--orchestrator.train.env.0.args", json.dumps({"\ud800": 1}))


@pytest.mark.parametrize("value", ["", "a b", "a=b", "\n", "ü"])
def test_any_other_value_passes(value):
    assert loaded("--env-vars", json.dumps({"A": value})).env_vars == {"A": value}


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "KEYBOARD", "HF_HOME", "NCCL_DEBUG"])
def test_what_only_sounds_like_a_secret_passes(name):
    check_variables(loaded("--env-vars", f'{{{name} = "x"}}'))
