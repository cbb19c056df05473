"""A check that warns: the command line shows one line, and the run goes on."""

import warnings

import pytest

from prime_rl import ConfigWarning, Observer, hookimpl
from prime_rl.registry.manager import Hooks
from prime_rl_app import cli
from prime_rl_app.config import build_config
from prime_rl_app.resolve import _check_observers


class Picky(Observer):
    name = "picky"

    @staticmethod
    def check(config):
        if config.max_steps < 10:
            warnings.warn(
                "max_steps: picky expects ten \x1b[31mat least", ConfigWarning, stacklevel=2
            )


class Plugin:
    @hookimpl
    def register_observers(self):
        return [Picky]


def config(max_steps):
    table = {"model": {"name": "m/m"}, "max_steps": max_steps}
    return build_config(table | {"orchestrator": {"save_rollouts": False}})


@pytest.fixture
def hooks():
    hooks = Hooks()
    hooks.register(Plugin(), "picky")
    return hooks


def test_a_check_may_warn_instead_of_refusing(hooks):
    with pytest.warns(ConfigWarning, match="max_steps: picky expects ten"):
        _check_observers(config(3), hooks)
    _check_observers(config(10), hooks)


def test_the_command_line_shows_the_text_alone_and_once(hooks, capsys, monkeypatch):
    others = []
    monkeypatch.setattr(warnings, "showwarning", lambda text, *more: others.append(str(text)))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        cli._show_warnings_of_the_config()
        for _ in range(4):  # a dry run reads the config and loads the plugins several times
            _check_observers(config(3), hooks)
            warnings.warn("another", UserWarning, stacklevel=1)
    shown = capsys.readouterr().err
    assert shown == "warning: max_steps: picky expects ten \ufffd[31mat least\n"
    assert others == ["another"]
