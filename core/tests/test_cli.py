"""The command line, through the real entry point and through typer's runner."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from prime_rl.cli.app import app
from prime_rl.cli.plugin_facts import inventory
from prime_rl.cli.run import split_arguments
from prime_rl.config import RunConfig

BIN = Path(sys.executable).with_name("prime-rl")
CONFIG = """
max_steps = 3
[model]
name = "tiny-reverse"
[orchestrator]
batch_size = 8
group_size = 4
[orchestrator.renderer]
name = "qwen3"
[[orchestrator.train.env]]
id = "reverse-text"
"""


@pytest.fixture
def toml(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(CONFIG + '[run]\nname = "mine"\n[inference]\nport = 1234\n')
    return path


def prime_rl(*arguments, cwd):
    return subprocess.run(
        [BIN, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=60
    )


def test_a_dry_run_writes_the_resolved_config_and_starts_nothing(tmp_path, toml):
    done = prime_rl(
        "run", toml, "--seed", 7, "--dry-run", "--output-dir", tmp_path / "o", cwd=tmp_path
    )
    run_dir = tmp_path / "o" / "mine"
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"valid; the resolved config is {run_dir / 'configs' / 'run.json'}\n"
    config = RunConfig.model_validate_json((run_dir / "configs" / "run.json").read_bytes())
    assert (config.seed, config.orchestrator.batch_size, config.inference.port) == (7, 8, 1234)
    assert sorted(each.name for each in run_dir.iterdir()) == [".dry-run", "configs"]


def test_errors_are_one_message_on_stderr_and_code_2(tmp_path, toml):
    done = prime_rl("run", toml, "--orchestrator.bach_size", 8, "--dry-run", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "error: orchestrator.bach_size: unknown key; did you mean 'batch_size'?\n"
    )


def test_a_plugin_error_is_one_message_too(tmp_path, toml):
    site = tmp_path / "site"
    info = site / "bad-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bad\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[prime_rl]\nbad = no_such_module_anywhere\n")
    done = subprocess.run(
        [BIN, "plugins", "list"], capture_output=True, text=True, env={"PYTHONPATH": str(site)}
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: plugin 'bad' (bad 0.1) failed to import: ModuleNotFound")
    assert done.stderr.count("\n") == 1


def test_the_inventory_as_json_through_the_real_command(tmp_path):
    done = prime_rl("plugins", "list", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = {row["plugin"]: row for row in json.loads(done.stdout)}
    assert rows["core"]["offers"] == {"samplers": ["standard"], "monitors": ["file"]}
    assert rows["grpo"]["distribution"] == "prime-rl-grpo"
    assert rows["grpo"]["offers"] == {"algorithms": ["grpo", "max_rl"]}
    assert rows["filters"]["offers"] == {"filters": ["gibberish", "repetition", "zero_advantage"]}
    assert rows["losses"]["group"] == "prime_rl.trainer"


def test_the_table_names_plugin_distribution_and_offers():
    shown = CliRunner().invoke(app, ["plugins", "list"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    (line,) = [line for line in shown.stdout.splitlines() if "prime-rl-grpo" in line]
    assert "grpo" in line and "0.1.0" in line and "algorithms: grpo, max_rl" in line


def test_what_a_plugin_implements_and_wraps_is_listed(monkeypatch):
    from prime_rl import hookimpl
    from prime_rl.plugins import manager

    class Watcher:
        @hookimpl
        def step_finished(self, step): ...

        @hookimpl(wrapper=True)
        def score_group(self, group):
            return (yield)

    def load(group, **_):
        hooks = manager.Hooks(group)
        if group == "prime_rl":
            hooks.sources["w"] = manager.Source("w", "prime-rl-watch", "3.0")
            hooks.register(Watcher(), "w")
        return hooks

    monkeypatch.setattr(manager, "load_plugins", load)
    assert inventory() == [
        {"plugin": "w", "distribution": "prime-rl-watch", "version": "3.0", "group": "prime_rl",
         "offers": {}, "implements": ["step_finished"], "wraps": ["score_group"]}
    ]  # fmt: skip


def test_files_first_then_overrides():
    assert split_arguments(["a.toml", "b.toml", "--seed", "3"]) == (
        ["a.toml", "b.toml"],
        ["--seed", "3"],
    )
    assert split_arguments(["a.toml"]) == (["a.toml"], [])


def test_help_shows_the_commands():
    shown = CliRunner().invoke(app, ["--help"])
    assert shown.exit_code == 0 and "run" in shown.stdout and "plugins" in shown.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["plugins", "list"], ["run", "--help"]])
def test_commands_that_show_something_import_nothing_heavy(arguments):
    code = (
        "import sys; from prime_rl.cli.app import app\n"
        "try: app(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'verifiers', 'renderers'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_version_is_the_cores(tmp_path):
    from importlib.metadata import version

    assert (
        prime_rl("--version", cwd=tmp_path).stdout == f"prime-rl-core {version('prime-rl-core')}\n"
    )
