"""What ``prime-rl serve`` reads from a command line, and what it refuses."""

import json
import socket

import pytest

from prime_rl import ConfigError
from prime_rl_tools.serve.request import choose_port, model_context, read_settings


def settings_for(model="tiny-reverse", overrides=(), **options):
    return read_settings(model, list(overrides), options)


@pytest.mark.parametrize(
    ("model", "overrides", "reason"),
    [
        ("nowhere", [], "'nowhere' is no folder, no hub id"),
        ("no/such/folder", [], "model.name: 'no/such/folder' is no folder"),
        ("tiny-reverse", ["--prot", "80"], "--prot: unknown key; did you mean 'port'?"),
        ("tiny-reverse", ["--trainer.lr", "1"], "--trainer: unknown key; known here: "),
        ("tiny-reverse", ["--inference.port", "1"], "--inference.port: unknown option"),
        ("tiny-reverse", ["--model.name", "x"], "--model.name: unknown option"),
        ("tiny-reverse", ["--inference.other.x", "1"], "--inference.other: unknown option"),
        ("tiny-reverse", ["--model.warmup_exat", "1"], "did you mean 'warmup_exact'"),
        ("tiny-reverse", ["--inference.embedded.slots", "1"], "did you mean 'num_slots'"),
        ("tiny-reverse", ["another"], "'another': expected one MODEL, then options"),
        ("--model.warmup_exact", ["3"], "'--model.warmup_exact': expected one MODEL"),
    ],
)
def test_invalid_arguments_are_refused_with_the_reason(model, overrides, reason):
    with pytest.raises(ConfigError) as caught:
        settings_for(model, overrides)
    assert reason in str(caught.value)


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        settings_for(str(tmp_path))
    with pytest.raises(ConfigError, match="is no folder, no hub id"):
        settings_for(str(tmp_path / "weights"))  # more slashes than owner/name


def test_a_missing_folder_is_not_taken_for_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert settings_for("outputs/weights").model.name == "outputs/weights"
    (tmp_path / "outputs").mkdir()
    with pytest.raises(ConfigError, match="'outputs/weights' is no folder"):
        settings_for("outputs/weights")


def test_settings_reach_the_model_and_the_engine():
    overrides = ["--model.warmup-exact", "0.5", "--inference.embedded.num-slots", "3"]
    settings = settings_for(overrides=[*overrides, "--inference.ready_timeout", "5"])
    assert settings.model.settings == {"warmup_exact": 0.5}
    assert settings.engine == "embedded" and settings.engine_settings == {"num_slots": 3}
    assert settings.served_name == "tiny-reverse" and settings.inference.ready_timeout == 5.0


def test_an_option_out_of_bounds_is_refused():
    with pytest.raises(ConfigError, match=r"^--max-model-len: Input should be greater than 0"):
        settings_for(max_model_len=0)
    with pytest.raises(ConfigError, match=r"^--port: Input should be less than or equal to 65535"):
        settings_for(port=70000)


def test_a_taken_port_is_refused_if_it_was_set_and_skipped_otherwise(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--port: {port} is taken on 127\.0\.0\.1"):
            choose_port("127.0.0.1", port)
        monkeypatch.setattr("prime_rl_tools.serve.request.PORT", port)
        assert choose_port("127.0.0.1", None) not in (port, 0)
    assert choose_port("127.0.0.1", None) == port


def test_a_host_of_another_machine_is_refused():
    with pytest.raises(ConfigError, match=r"--host 203\.0\.113\.1 --port 1234: "):
        choose_port("203.0.113.1", 1234)


@pytest.mark.parametrize(
    ("config", "context"),
    [
        ({"max_position_embeddings": 64}, 64),
        ({"n_positions": 32}, 32),
        ({"text_config": {"max_position_embeddings": 8}, "max_position_embeddings": 9}, 8),
    ],
)
def test_the_context_is_read_from_the_models_config(tmp_path, config, context):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_context(tmp_path) == context


def test_a_config_without_a_context_needs_max_model_len(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"give --max-model-len"):
        model_context(tmp_path)
