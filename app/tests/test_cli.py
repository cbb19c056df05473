"""The command line, through the real entry point and through typer's runner."""

import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from commandline import prime_rl
from typer.main import get_group
from typer.testing import CliRunner
from waiting import LIMIT

from prime_rl.config.run import RunConfig
from prime_rl_app.cli import main
from prime_rl_app.cli.app import app
from prime_rl_app.cli.run import split_arguments

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


def test_a_dry_run_writes_the_resolved_config_and_starts_nothing(tmp_path, toml):
    done = prime_rl(
        "run",
        toml,
        "--seed",
        7,
        "--dry-run",
        "--quick",
        "--output-dir",
        tmp_path / "o",
        cwd=tmp_path,
    )
    run_dir = tmp_path / "o" / "mine"
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"valid; the resolved config is {run_dir / 'configs' / 'run.json'}\n"
    config = RunConfig.model_validate_json((run_dir / "configs" / "run.json").read_bytes())
    assert (config.seed, config.orchestrator.batch_size, config.inference.port) == (7, 8, 1234)
    assert sorted(each.name for each in run_dir.iterdir()) == [".dry-run", "configs"]


def test_a_full_disk_is_one_message_too(tmp_path, toml, monkeypatch, capsys):
    def full(self, text, encoding):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    arguments = ["prime-rl", "run", str(toml), "--dry-run", "--output_dir", str(tmp_path / "o")]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert capsys.readouterr().err == (
        "error: the disk is full or read-only: [Errno 28] No space left on device\n"
    )


def test_errors_are_one_message_on_stderr_and_code_2(tmp_path, toml):
    done = prime_rl("run", toml, "--orchestrator.bach_size", 8, "--dry-run", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "error: command line: orchestrator.bach_size: unknown key; did you mean 'batch_size'?\n"
    )


def test_a_forgotten_launcher_is_an_error_of_the_launcher(tmp_path, toml):
    done = prime_rl("run", toml, "--launcher", "--dry-run", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: command line: launcher: no installed plugin offers the launcher '--dry-run'"
    )


def test_a_plugin_error_is_one_message_too(tmp_path, toml, site):
    site("bad", "[prime_rl]\nbad = no_such_module_anywhere\n")
    done = prime_rl("run", toml, "--dry-run", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: plugin 'bad' (bad 0.1) failed to import: ModuleNotFound")
    assert done.stderr.count("\n") == 1


# -- commands of plugins ------------------------------------------------------------------------

WALK = """
from prime_rl import hookimpl

@hookimpl
def register_commands(cli, plugins):
    @cli.command("walk")
    def walk():
        print("walks")

    @plugins.command("walk")
    def walk_plugins():
        print("walks plugins")
"""


def test_the_help_lists_commands_of_the_commands_group_only(tmp_path, site):
    site("walk", "[prime_rl]\nwalk = walk\n", WALK)
    assert "walk" not in prime_rl("--help", cwd=tmp_path, fork=False).stdout
    site("more", "[prime_rl.commands]\nwalk = walk\n")
    assert "walk" in prime_rl("--help", cwd=tmp_path, fork=False).stdout
    assert "walk" in prime_rl("plugins", "--help", cwd=tmp_path, fork=False).stdout


def test_a_command_of_any_plugin_runs(tmp_path, site):
    site("walk", "[prime_rl]\nwalk = walk\n", WALK)
    site("bad", "[prime_rl]\nbad = no_such_module_anywhere\n")
    assert prime_rl("walk", cwd=tmp_path, fork=False).stdout == "walks\n"
    assert prime_rl("plugins", "walk", cwd=tmp_path, fork=False).stdout == "walks plugins\n"


def test_a_command_that_is_not_installed_names_its_package(tmp_path, site):
    site("index", "[prime_rl.known]\ncommand.walk = prime_rl_walk\ncommand.plugins.run = a_b\n")
    done = prime_rl("walk", cwd=tmp_path, fork=False)
    assert done.returncode == 2
    assert "no command 'walk' is installed. Run: pip install prime-rl-walk" in done.stderr
    assert "Run: pip install a-b" in prime_rl("plugins", "run", cwd=tmp_path, fork=False).stderr


def test_a_broken_plugin_hides_no_command_of_the_others(tmp_path, site):
    site("bad", "[prime_rl]\nbad = bad\n[prime_rl.commands]\nbad = bad\n", "import no_such_one")
    done = prime_rl("--help", cwd=tmp_path, fork=False)
    assert done.returncode == 0 and "report" in done.stdout
    assert "Commands of these plugins are missing: plugin 'bad' (bad 0.1) failed to import" in (
        " ".join(done.stdout.split())
    )
    assert "failed to import" in prime_rl("walk", cwd=tmp_path, fork=False).stderr


def test_files_first_then_overrides():
    assert split_arguments(["a.toml", "b.toml", "--seed", "3"]) == (
        ["a.toml", "b.toml"],
        ["--seed", "3"],
    )
    assert split_arguments(["a.toml"]) == (["a.toml"], [])
    assert split_arguments(["@", "a.toml", "@b.toml", "--ckpt"]) == (
        ["a.toml", "b.toml"],
        ["--ckpt"],
    )


def test_help_shows_the_commands():
    shown = CliRunner().invoke(app, ["--help"])
    assert shown.exit_code == 0 and "run" in shown.stdout and "plugins" in shown.stdout


def test_core_alone_has_the_command_run_and_no_other(tmp_path):
    alone = "import importlib.metadata as m; m.entry_points = lambda **_: m.EntryPoints()"
    code = f"{alone}; import sys; from prime_rl_app.cli import main; main()"

    def typed(*words):
        command = [sys.executable, "-c", code, *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    shown = typed("--help")
    assert shown.returncode == 0 and "run" in shown.stdout and "report" not in shown.stdout
    assert "No such command 'list'" in typed("plugins", "list").stderr


def test_the_help_loads_no_plugin_without_commands():
    code = (
        "import sys; from prime_rl_app.cli.app import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit({'prime_rl_grpo', 'prime_rl_app.plugin'} & set(sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_version_is_the_cores(tmp_path):
    from importlib.metadata import version

    assert (
        prime_rl("--version", cwd=tmp_path).stdout == f"prime-rl-core {version('prime-rl-core')}\n"
    )


def test_python_dash_m_is_the_command(tmp_path):
    command = [sys.executable, "-m", "prime_rl", "-h"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "Usage: python -m prime_rl" in done.stdout


def walk(group, *path):
    """Every command below a group, with the words that call it."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from walk(command, *path, name)
        else:
            yield [*path, name], command


def test_every_command_has_a_panel_and_examples_that_parse():
    panels = {command.rich_help_panel for command in get_group(app).commands.values()}
    assert {"Train", "Look", "Serve", "Extend"} <= panels <= {*panels} - {None}
    for words, command in walk(get_group(app)):
        shown = re.findall(r"^```\n(.*?)^```$", inspect.cleandoc(command.help), re.M | re.S)
        assert shown, f"prime-rl {' '.join(words)} -h has no example"
        for line in "".join(shown).splitlines():
            called = shlex.split(line)
            assert called[: len(words) + 1] == ["prime-rl", *words]
            command.make_context(" ".join(words), called[len(words) + 1 :])


def test_help_is_wrapped_once():
    for name in ("race", "replay", "stop"):
        shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "80"}).stdout
        text = shown.partition("\n\n")[2].partition("╭")[0].partition("  prime-rl")[0]
        lines = [line.strip() for line in text.splitlines()]
        for line, following in pairwise(lines):
            if line and following:  # else the end of a paragraph
                assert len(line) + 1 + len(following.split()[0]) > 77, (line, following)


# -- completion by a real shell -------------------------------------------------------------------

ASK = """
eval "$(prime-rl --show-completion bash)"
complete -p prime-rl > complete.txt
function_name=$(sed -n 's/.* -F \\([^ ]*\\) .*/\\1/p' complete.txt)
ask() {
    COMP_WORDS=("$@")
    COMP_CWORD=$(($# - 1))
    COMPREPLY=()
    "$function_name" "$1" "${@: -1}" "${@: -2:1}"  # as bash calls it
    echo "${COMPREPLY[@]}"
}
ask prime-rl stat
ask prime-rl plugins pro
ask prime-rl status a-r
ask prime-rl run --dry
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_completes_commands_options_and_names_of_runs(tmp_path):
    """By the script that ``prime-rl --show-completion`` prints."""
    for name in ("a-run", "a-race", "b-run"):
        (tmp_path / "outputs" / name / "configs").mkdir(parents=True)
        (tmp_path / "outputs" / name / "configs" / "run.json").write_text("{}")
    folder = Path(sys.executable).parent
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-c", ASK], cwd=tmp_path, timeout=LIMIT,
        env=os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["status", "prove", "a-race a-run", "--dry-run"], done.stderr
