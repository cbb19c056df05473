"""The defaults that name plugins: a TOML file that an installed distribution offers."""

from importlib.metadata import EntryPoint

import pytest

from prime_rl import ConfigError, ConfigWarning
from prime_rl.plugins.hookspecs import TRAINER_GROUP
from prime_rl.registry.manager import load_plugins
from prime_rl.registry.offers import ALGORITHM, ENGINE, LOSS, RENDERER, SAMPLER, collect
from prime_rl_app import config as load
from prime_rl_app.config import build_config, installed_defaults, load_config
from prime_rl_app.resolve import check

LEAST = {"model": {"name": "m/m"}, "max_steps": 3}


@pytest.fixture
def offer(monkeypatch, tmp_path):
    """Replaces the installed defaults by these TOML texts, each in a package of its own."""
    monkeypatch.syspath_prepend(tmp_path)

    def replace(*texts):
        entries = []
        for number, text in enumerate(texts):
            package = f"prime_rl_defaults_of_test_{number}"
            (tmp_path / package).mkdir()
            (tmp_path / package / "defaults.toml").write_text(text)
            value = f"{package}:defaults.toml"
            entries.append(EntryPoint(f"lab-{number}", value, load.DEFAULTS))
        offered = {load.DEFAULTS: entries}
        monkeypatch.setattr(load, "entries", lambda group: offered.get(group, []))

    return replace


def test_the_defaults_of_prime_rl_name_installed_plugins():
    config = build_config(LEAST)
    hooks = load_plugins(), load_plugins(TRAINER_GROUP)
    names = {
        ALGORITHM: config.orchestrator.algo.type,
        RENDERER: config.orchestrator.renderer.name,
        SAMPLER: config.orchestrator.sampler.type,
        ENGINE: config.inference.engine,
        LOSS: config.trainer.loss.type,
    }
    assert [*names.values()] == ["grpo", "auto", "standard", "embedded", "default"]
    for kind, name in names.items():
        assert any(name in collect(each, kind) for each in hooks)
    older = installed_defaults()["orchestrator"]["buffer_sampler"]
    assert any(older in collect(each, SAMPLER) for each in hooks)
    assert config.orchestrator.train.harness == {"id": "in-process"}
    assert config.orchestrator.eval.harness == {"id": "in-process"}


def test_a_buffer_of_an_earlier_version_is_the_sampler_with_its_settings():
    table = {"orchestrator": {"buffer": {"easy_threshold": 0.9}}}
    with pytest.warns(ConfigWarning, match="is read as orchestrator.sampler. Write that"):
        sampler = build_config(LEAST | table).orchestrator.sampler
    assert sampler.type == "difficulty_pools" and sampler.settings == {"easy_threshold": 0.9}

    # As a run.json of that version has it: with the default of the sampler.
    table["orchestrator"]["sampler"] = {"type": "standard"}
    with pytest.warns(ConfigWarning, match="is read as orchestrator.sampler"):
        assert build_config(LEAST | table).orchestrator.sampler == sampler

    table["orchestrator"]["sampler"] = {"type": "mine"}
    with pytest.warns(ConfigWarning, match="is ignored.*orchestrator.sampler is set"):
        assert build_config(LEAST | table).orchestrator.sampler.type == "mine"


def test_a_file_of_the_run_overrides_the_defaults(offer, tmp_path):
    offer(
        '[orchestrator.algo]\ntype = "one"\n[orchestrator]\npost_batch_filters = [{type = "f"}]\n'
    )
    file = tmp_path / "run.toml"
    file.write_text('max_steps = 3\n[model]\nname = "m/m"\n[orchestrator.algo]\nalpha = 2\n')
    algo = load_config([file]).orchestrator.algo
    assert (algo.type, algo.settings) == ("one", {"alpha": 2})
    other = load_config([file], ["--orchestrator.algo.type", "two"]).orchestrator
    assert other.algo.type == "two"
    assert [each.type for each in other.post_batch_filters] == ["f"]


def test_without_a_distribution_of_defaults_nothing_is_named(offer):
    offer()
    config = build_config(LEAST)
    assert installed_defaults() == {}
    assert (config.inference.engine, config.orchestrator.algo.type) == ("", "")
    assert config.orchestrator.post_batch_filters == ()


RENDERER_MISSING = "orchestrator.renderer.name: no renderer is set"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "env 'reverse-text': algo: no algorithm is set"),
        ({"orchestrator.algo.type": "grpo"}, "trainer.loss: no loss is set"),
        ({"trainer.loss.type": "default"}, "orchestrator.sampler.type: no sampler is set"),
        (
            {"orchestrator.sampler.type": "standard"},
            "orchestrator.renderer.name: no renderer is set",
        ),
        ({"orchestrator.renderer.name": "qwen3"}, "inference.engine: no engine is set"),
    ],
)
def test_a_required_name_without_a_default_is_an_error(offer, given, message):
    offer()
    words = {"orchestrator.algo.type": "grpo", "trainer.loss.type": "default",
             "orchestrator.sampler.type": "standard",
             "orchestrator.renderer.name": "qwen3"}  # fmt: skip
    until = [*words].index(next(iter(given))) + 1 if given else 0
    table = {"model": {"name": "tiny-reverse"}, "max_steps": 3}
    table["orchestrator"] = {"train": {"env": [{"id": "reverse-text"}]}}
    for key in [*words][:until]:
        load.set_at(table, key.split("."), words[key])
    with pytest.raises(ConfigError) as caught:
        check(build_config(table))
    said = str(caught.value)
    assert said.startswith(f"{message}, and no installed distribution brings a default. Set ")
    assert said.endswith("or pip install prime-rl, which brings defaults.")
    assert "(installed: " in said


def test_an_env_with_an_algo_of_its_own_has_to_name_it():
    env = {"id": "reverse-text", "algo": {"alpha": 1}}
    config = build_config(LEAST | {"orchestrator": {"train": {"env": [env]}}})
    with pytest.raises(ConfigError, match=r"^env 'reverse-text': algo: no algorithm is set"):
        check(config)


def test_a_default_algorithm_that_no_env_uses_need_not_be_installed():
    env = {"id": "reverse-text", "algo": {"type": "echo"}}
    table = {"train": {"env": [env]}, "renderer": {"name": "prime-qwen3"}}
    plugins = {"disabled": ["grpo"]}
    model = {"name": "tiny-reverse"}
    check(build_config(LEAST | {"model": model, "orchestrator": table, "plugins": plugins}))
    table["algo"] = {"type": "max_rl"}
    with pytest.raises(ConfigError, match=r"^orchestrator\.algo: no installed plugin offers"):
        check(build_config(LEAST | {"model": model, "orchestrator": table, "plugins": plugins}))


def test_two_distributions_with_defaults_are_refused(offer):
    offer("", "")
    with pytest.raises(ConfigError, match=r"2 installed .* \(lab-0, lab-1\), expected one"):
        build_config(LEAST)


def test_a_run_with_engines_elsewhere_has_no_engine_of_its_own():
    elsewhere = {"base_url": "http://a:1"}
    assert build_config(LEAST | {"inference": elsewhere}).inference.engine == ""
    with pytest.raises(ConfigError, match="engine says how to start an engine"):
        build_config(LEAST | {"inference": elsewhere | {"engine": "vllm"}})


def test_a_misspelled_key_of_the_group_is_reported_once():
    with pytest.raises(ConfigError) as caught:
        build_config(
            {
                "model": {"name": "m/m"},
                "max_steps": 3,
                "orchestrator": {
                    "train": {
                        "env": [{"id": "e", "sampling": {"max_completion_tokens": 64}}],
                        "sampling": {"temprature": 0.7},
                    }
                },
            }
        )
    assert str(caught.value) == (
        "orchestrator.train.sampling.temprature: unknown key; did you mean 'temperature'?"
    )
