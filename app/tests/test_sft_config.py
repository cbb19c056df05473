"""``[sft]`` becomes the tables of an ordinary run."""

import json

import pytest

from prime_rl import ConfigError
from prime_rl.registry.components import Component, installed_losses
from prime_rl_app.config import build_config, load_config
from prime_rl_app.env_checks import _check_measured
from prime_rl_app.errors import explained
from prime_rl_app.resolve import check
from prime_rl_app.sft import SftConfig, _envs

SUBSET = {"subset": "m"}


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "rows.jsonl"
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    path.write_text((json.dumps(row) + "\n") * 100)
    return str(path)


def table(data, **sft):
    return {"model": {"name": "tiny-chat"}, "sft": {"data": data, "batch_size": 8, **sft}}


def test_epochs_become_steps_of_the_rows_that_train(data):
    # 100 rows - 20 held out = 80, in batches of 8: 10 steps an epoch
    config = build_config(table(data, hold_out=20, epochs=2.5))
    assert config.max_steps == 25
    train, validation = config.orchestrator.train.env
    assert (train.args["first"], train.measure_every) == (20, None)
    assert (validation.args["num_examples"], validation.measure_every) == (20, 10)
    assert config.trainer.optim.lr == 2e-5
    assert config.orchestrator.algo.type == "sft"


def test_the_last_batch_of_an_epoch_may_be_part_of_the_next(data):
    assert build_config(table(data)).max_steps == 13  # 100 / 8 = 12.5
    assert build_config(table(data, epochs=2)).max_steps == 25


def test_what_the_config_says_replaces_what_the_table_makes(data):
    whole = table(data) | {"max_steps": 3, "trainer": {"optim": {"lr": 1e-3}}}
    config = build_config(whole)
    assert (config.max_steps, config.trainer.optim.lr) == (3, 1e-3)


def test_without_evaluations_no_engine_is_started(data):
    assert build_config(table(data)).inference.replicas == 0
    evaluated = table(data) | {"orchestrator": {"eval": {"env": [{"id": "reverse-text"}]}}}
    assert build_config(evaluated).inference.replicas == 1
    elsewhere = table(data) | {"inference": {"base_url": "http://10.0.0.1:8000/v1"}}
    assert build_config(elsewhere).has_engines


def test_the_run_is_one_that_can_start(data):
    assert check(build_config(table(data, hold_out=10))).num_engines == 0


def test_a_run_without_engines_samples_nothing(data):
    config = build_config(
        table(data)
        | {
            "inference": {"replicas": 0},
            "orchestrator": {"eval": {"env": [{"id": "reverse-text"}]}},
        }
    )
    with pytest.raises(ConfigError, match=r"replicas is 0, and orchestrator.eval.env 'reverse-te"):
        check(config)


@pytest.mark.parametrize(
    ("sft", "message"),
    [
        ({"epoch": 3}, r"sft\.epoch: unknown key.*epochs"),
        ({"data": 3}, r"sft\.data: "),
        ({"validation": "a", "hold_out": 3}, "both name data to measure"),
        ({"hold_out": 100}, "100 rows leave none"),
        (
            {"split": "test"},
            r"^sft\.split: 'test' is of a data set of the hub; .*rows.jsonl is a fi",
        ),
        ({"subset": "main"}, r"^sft\.subset: 'main' is of a data set of the hub"),
        ({"validation_split": "test"}, "validation_split is set, and there is no validation"),
        ({"data": "missing.jsonl"}, r"^sft\.data: missing.jsonl does not exist"),
    ],
)
def test_a_wrong_key_is_an_error_that_names_the_table(data, sft, message):
    with pytest.raises(ConfigError, match=message):
        build_config(table(data) | {"sft": {"data": data, **sft}})


def test_split_and_subset_go_to_the_data_of_the_hub(data, monkeypatch):
    def args(**keys):
        sft_table = SftConfig.model_validate({"data": "a/b", **keys})
        return [env["args"] for env in _envs(sft_table, every=1)]

    hub = {"data": "a/b", "subset": "m"}
    assert args(subset="m") == [hub]
    assert args(subset="m", validation=data) == [hub, {"data": data}]
    assert args(subset="m", validation="c/d") == [hub, {"data": "c/d", "split": "test"} | SUBSET]
    assert args(split="s", validation="a/b", validation_split="v") == [
        {"data": "a/b", "split": "s"},
        {"data": "a/b", "split": "v"},
    ]
    mixed = {"data": data, "subset": "m", "validation": "c/d"}
    assert args(**mixed) == [{"data": data}, {"data": "c/d", "split": "test"} | SUBSET]


def test_a_split_of_a_file_that_validates_is_named_by_its_key(data, tmp_path):
    file = tmp_path / "x.toml"
    file.write_text(
        f'[model]\nname = "tiny-chat"\n[sft]\ndata = "{data}"\nvalidation = "{data}"\n'
        'validation_split = "test"\n'
    )
    with pytest.raises(ConfigError) as caught:
        check(load_config([file]))
    message = explained(str(caught.value), ["run", str(file)])
    assert message.startswith(f"{file}:6: sft.validation_split: 'test' is of a data set of the hub")


def test_one_of_two_sources_of_data(data):
    both = table(data) | {"orchestrator": {"train": {"env": [{"id": "reverse-text"}]}}}
    with pytest.raises(ConfigError, match=r"orchestrator\.train\.env too"):
        build_config(both)


def test_only_demonstrations_are_measured(data):
    envs = [{"id": "reverse-text"}, {"id": "reverse-text", "name": "m", "measure_every": 2}]
    run = {"model": {"name": "tiny-chat"}, "max_steps": 2, "orchestrator": {"train": {"env": envs}}}
    with pytest.raises(ConfigError, match="measure_every measures the loss of demonstrations"):
        build_config(run)


@pytest.mark.parametrize("key", ["batch_size", "group_size"])
def test_keys_that_epochs_are_counted_by_are_set_in_sft(data, key):
    with pytest.raises(ConfigError, match=rf"orchestrator\.{key}: the config has \[sft\]"):
        build_config(table(data) | {"orchestrator": {key: 2}})


def test_a_key_of_the_algorithm_reaches_both_envs(data):
    changed = {"orchestrator": {"algo": {"sampling": {"source": {"roles": ["user"]}}}}}
    config = build_config(table(data) | {"sft": {"data": data, "hold_out": 10}} | changed)
    assert [env.algo for env in config.orchestrator.train.env] == [None, None]
    assert config.orchestrator.algo.sampling.source.settings["roles"] == ["user"]


def test_a_loss_that_takes_more_than_a_pass_is_not_measured():
    preference = pytest.importorskip("prime_rl_preference.dpo_loss")
    with pytest.raises(ConfigError, match=r"dpo'.*which reads 'initial_logprobs'"):
        _check_measured("env 'a'", Component("dpo", preference.DPOLoss))
    _check_measured("env 'a'", installed_losses()["ce"])
