"""Options of a command that come from a settings class."""

from pathlib import Path

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from prime_rl.config.base import Settings
from prime_rl.errors import ConfigError
from prime_rl_app.cli.app import app
from prime_rl_tools.commands.eval import evaluate
from prime_rl_tools.commands.options import validated, with_options
from prime_rl_tools.commands.serve import serve


class Table(Settings):
    """A table: it has no option."""


class Example(Settings):
    """Settings of a command."""

    num_items: int = 3
    """Number of items."""
    names: tuple[str, ...] = ()
    verbose: bool = False
    table: Table = Table()


def options_of(command):
    app = typer.Typer(add_completion=False)
    app.command()(command)
    declared = (name for parameter in get_command(app).params for name in parameter.opts)
    return {name for name in declared if name.startswith("--")}


def test_eval_and_serve_have_their_options():
    assert options_of(evaluate) == {
        *("--config", "--base-url", "--model", "--api-key-var", "--num-examples", "--group-size"),
        *("--env-args", "--temperature", "--top-p", "--max-tokens", "--max-turns", "--timeout"),
        *("--max-concurrency", "--seed", "--output", "--resume", "--json"),
    }
    assert options_of(serve) == {
        *("--engine", "--host", "--port", "--served-model-name", "--max-model-len", "--seed"),
        *("--api-key-var", "--show-admin-key"),
    }


def test_a_command_receives_the_options_that_were_given():
    received = []

    @with_options(Example)
    def command(options):
        received.append(options)

    app = typer.Typer(add_completion=False)
    app.command()(command)
    run = CliRunner().invoke
    assert run(app, []).exit_code == 0
    assert (
        run(app, ["--num-items", "5", "--names", "a", "--names", "b", "--verbose"]).exit_code == 0
    )
    assert run(app, ["--no-verbose"]).exit_code == 2
    assert received == [{}, {"num_items": 5, "names": ["a", "b"], "verbose": True}]
    assert validated(Example, received[1]).names == ("a", "b")
    assert "Number of items." in run(app, ["--help"]).output


def test_errors_name_the_option():
    with pytest.raises(ConfigError, match=r"^--num-items: .*integer.*\(got 'x'\)$"):
        validated(Example, {"num_items": "x"})
    with pytest.raises(ConfigError, match=r"^--num-item: unknown key; did you mean 'num_items'\?$"):
        validated(Example, {"num_item": 1})


@pytest.mark.parametrize("command", ["status", "doctor", "report", "inspect", "watch"])
def test_a_command_that_only_reads_takes_the_newest_run(command: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [command, "--output-dir", str(tmp_path)])
    assert str(result.exception) == f"latest: there is no run in {tmp_path}"


@pytest.mark.parametrize("command", ["stop", "scale"])
def test_a_command_that_changes_a_run_wants_its_name(command: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [command, "--output-dir", str(tmp_path)])
    assert result.exit_code == 2 and "Missing argument 'RUN'" in result.output
