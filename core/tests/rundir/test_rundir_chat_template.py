"""The choice of a chat template in the run directory, and its warnings."""

import json
from types import SimpleNamespace

import pytest

from prime_rl import PluginConfig, RendererOffer
from prime_rl.orchestrator import __main__ as orchestrator
from prime_rl.plugins.model import ChatTemplate
from prime_rl.rundir.chat_template import put_chat_template, read_chat_template, write_chat_template


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "run/configs").mkdir(parents=True)
    return tmp_path / "run"


class Plain(RendererOffer):
    """A renderer that compares no templates."""

    name = "plain"


def test_a_renderer_that_compares_nothing_is_reported(run_dir, monkeypatch, caplog):
    monkeypatch.setattr(orchestrator, "load_tokenizer", lambda path: None)
    offer = Plain(PluginConfig())
    monkeypatch.setattr(orchestrator.build, "renderer_offer", lambda config, hooks: offer)
    launch = SimpleNamespace(model_path="m")
    run = SimpleNamespace(config=None, hooks=None, run_dir=run_dir, launch=launch)
    orchestrator._choose_chat_template(run, SimpleNamespace(name="plain"))
    chosen = read_chat_template(run_dir)
    assert chosen.text is None
    assert "Renderer 'plain' compares no template with its own output" in chosen.warning
    assert chosen.warning in caplog.text


def test_a_template_in_the_tokenizers_config_is_replaced_too(run_dir, tmp_path):
    write_chat_template(run_dir, ChatTemplate("new", None))
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "old", "x": "ü"}')
    put_chat_template(run_dir, tmp_path)
    table = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert table == {"chat_template": "new", "x": "ü"}
    assert (tmp_path / "chat_template.jinja").read_text() == "new"
