"""``--without`` and ``PRIME_RL_DISABLE`` on every command: what they name is not even imported."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from report_runs import make_run
from typer.main import get_group

import prime_rl_app.cli.app
from prime_rl.entries import DISABLE
from prime_rl.registry.components import installed_losses
from prime_rl_app.cli import main

CONFIG = Path(__file__).parents[3] / "configs" / "reverse_text" / "grpo.toml"
GROUPS = ("prime_rl", "prime_rl.trainer", "prime_rl.commands")
WAYS = {"--without, entry point": ("bad", False), "the environment, distribution": ("ill", True)}

COMMANDS = {
    "run": (f"run {CONFIG} --dry-run --quick --output-dir {{}}/dry", "valid; the resolved"),
    "serve": ("serve nowhere/model --engine nothing", "did you mean|installed: embedded"),
    "replay": ("replay good --output-dir {} --algo grpo", "step"),
    "report": ("report good --output-dir {} --out {}/page.html", "page.html"),
    "inspect": ("inspect good --output-dir {}", "rollouts"),
    "runs": ("runs --output-dir {}", "good"),
    "status": ("status good --output-dir {}", "good"),
    "stop": ("stop good --output-dir {}", "good"),
    "scale": ("scale good 2 --output-dir {}", "good"),
    "plan": ("plan {}/a.toml --gpus 8xH100", "a.toml"),
    "race": ("race {}/a.toml {}/b.toml", "a.toml"),
    "gateway": ("gateway missing --output-dir {}", "missing"),
    "serve-env": ("serve-env {}/a.toml", "a.toml"),
    "export": ("export missing --output-dir {}", "missing"),
    "sft": ("sft {}/a.toml", "a.toml"),
    "migrate": ("migrate {}/a.toml", "a.toml|model"),
    "chat": ("chat missing --output-dir {}", "missing"),
    "eval": ("eval no-such-env", "no-such-env"),
    "watch": ("watch missing --output-dir {}", "missing"),
    "doctor": ("doctor missing --output-dir {}", "missing"),
    "plugins list": ("plugins list --verbose", "prime-rl-grpo"),
    "plugins show": ("plugins show grpo", "prime-rl-grpo"),
    "plugins check": ("plugins check zero_advantage", "1 passed"),
    "plugins new": ("plugins new mine --directory {}/mine", "wrote|is not empty"),
    "plugins search": ("plugins search zero_advantage", "prime-rl-filters"),
    "plugins prove": ("plugins prove grop", "Did you mean 'grpo'"),
}
"""With each command, a call of it and what it then prints: an answer, or an error of its own."""


@pytest.fixture
def call(tmp_path, monkeypatch, capsys) -> Iterator[Callable[..., str]]:
    """``main()`` as a new process runs it, beside a plugin that exits when it is imported."""
    make_run(tmp_path / "good")
    info = tmp_path / "site" / "ill-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ill\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("".join(f"[{g}]\nbad = bad_exit\n" for g in GROUPS))
    marker = str(tmp_path / "imported")
    code = f"import sys\nfrom pathlib import Path\nPath({marker!r}).touch()\nsys.exit(3)\n"
    (tmp_path / "site" / "bad_exit.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(
        prime_rl_app.cli, "app", prime_rl_app.cli.app
    )  # restored, as the next one is

    def call(words: str, disabled: str = "") -> str:
        monkeypatch.delitem(sys.modules, "prime_rl_app.cli.app")
        monkeypatch.setenv(DISABLE, disabled)
        monkeypatch.setattr(sys, "argv", ["prime-rl", *words.replace("{}", str(tmp_path)).split()])
        installed_losses.cache_clear()
        (tmp_path / "imported").unlink(missing_ok=True)
        with pytest.raises(SystemExit):
            main()
        done = capsys.readouterr()
        return done.out + done.err

    yield call
    installed_losses.cache_clear()


def test_the_table_has_every_command(monkeypatch):
    # An earlier test may have added the commands of other plugins to the module that it imported.
    monkeypatch.delitem(sys.modules, "prime_rl_app.cli.app", raising=False)
    tree = get_group(importlib.import_module("prime_rl_app.cli.app").app)
    assert {name.partition(" ")[0] for name in COMMANDS} == {*tree.commands}
    assert {f"plugins {name}" for name in tree.commands["plugins"].commands} <= {*COMMANDS}


def test_a_plugin_that_exits_at_import_is_an_error_with_its_name(call):
    why = "plugin 'bad' (ill 0.1) failed to import: SystemExit: 3 (line 4 of "
    LIST = COMMANDS["plugins list"][0]
    for words in (COMMANDS["run"][0], COMMANDS["replay"][0], "plugins check bad", LIST):
        said = " ".join(call(words).split())
        assert why in said, said
        assert words != LIST or "prime-rl-grpo" in said


def test_the_short_list_imports_no_plugin(call, tmp_path):
    info = tmp_path / "site" / "ill-0.1.dist-info" / "entry_points.txt"
    info.write_text("[prime_rl]\nbad = bad_exit\n")
    said = call("plugins list")
    assert not (tmp_path / "imported").exists()
    assert re.search(r"\n +ill +0\.1 +bad\b", said), said


def test_a_run_is_checked_without_the_code_of_a_plugin_in_any_group(call, tmp_path):
    """Also in those that core reads itself: ``prime_rl.fits``, ``prime_rl.defaults`` ..."""
    root = CONFIG.parents[2]
    folders = ("core/src", "app/src", "plugins/*/src")
    sources = [file for folder in folders for file in root.glob(f"{folder}/**/*.py")]
    text = "".join(file.read_text() for file in sources)
    groups = {*re.findall(r'"(prime_rl\.[a-z_]+)"', text)}
    assert {"prime_rl.fits", "prime_rl.env_workers", "prime_rl.checks"} <= groups
    info = tmp_path / "site" / "ill-0.1.dist-info" / "entry_points.txt"
    info.write_text("".join(f"[{group}]\nbad = bad_exit:x\n" for group in (*groups, "prime_rl")))
    words = COMMANDS["run"][0]
    for way in ("--without ill", "--without bad"):
        assert "valid; the resolved" in call(f"{words} {way}")
        assert "did you mean" in call(f"{words} {way} --orchestrator.bach_size 3")
        assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_runs_without_a_plugin_that_exits_at_import(command, call, tmp_path):
    words, expected = COMMANDS[command]
    call(words)
    assert (tmp_path / "imported").exists()  # else nothing is shown below
    for name, in_environment in WAYS.values():
        said = call(words, name) if in_environment else call(f"{words} --without {name}")
        assert not (tmp_path / "imported").exists(), said
        assert "ill" not in said.split() and any(each in said for each in expected.split("|")), said
