"""``env_vars``: environment variables of a run's processes."""

from __future__ import annotations

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


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "KEYBOARD", "HF_HOME", "NCCL_DEBUG"])
def test_what_only_sounds_like_a_secret_passes(name):
    check_variables(loaded("--env-vars", f'{{{name} = "x"}}'))
