"""What the reward does not show stands beside it: on the screen, in the summary, in the doctor."""

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from prime_rl import PluginConfig
from prime_rl_app.cli.app import app
from prime_rl_tools.report.data import curves
from prime_rl_tools.view.live import TerminalView
from prime_rl_tools.view.outcomes import mean_outcomes, outcomes, outcomes_text

ALL = "train/agg/all"


def batch(step, failed=0.2, truncated=0.0, seen=160, trainable=128, **more):
    return {
        "step": step,
        f"{ALL}/reward/mean": 0.5,
        f"{ALL}/has_error/mean": failed,
        f"{ALL}/is_truncated/mean": truncated,
        "batch/agg/seen": seen,
        "batch/agg/trainable": trainable,
        "progress/seconds": float(step),
        "progress/total_tokens": 100.0 * step,
        **more,
    }


@pytest.fixture
def run_dir(tmp_path):
    """Twenty steps; a fifth of the rollouts fails, and of 160 considered 128 train."""
    folder = tmp_path / "a-run"
    (folder / "status").mkdir(parents=True)
    (folder / "configs").mkdir()
    (folder / "configs" / "run.json").write_text('{"max_steps": 20}')
    rows = [batch(step) for step in range(1, 21)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


EXPECTED = "failed 20.0%, truncated 0.0%, dropped 20.0%"


def test_shares_worked_out_manually():
    shares = outcomes(batch(1, truncated=0.5))
    assert shares == {"failed": 0.2, "truncated": 0.5, "dropped": pytest.approx(0.2)}
    rows = [batch(1, failed=0.0), batch(2, failed=0.5, seen=128), {"step": 2}]
    assert mean_outcomes(rows) == {
        "failed": 0.25, "truncated": 0.0, "dropped": pytest.approx(0.1),
    }  # fmt: skip
    assert outcomes({}) == {}
    assert outcomes_text({}) == ""
    assert outcomes_text({"failed": 0.0001, "cancelled": 0.0}) == "failed <0.1%"
    assert outcomes_text({"failed": 0.0, "cancelled": 0.5}) == "failed 0.0%, cancelled 50.0%"


def view_of(run_dir, **options):
    console = Console(record=True, file=io.StringIO(), width=120, **options)
    return console, TerminalView(PluginConfig(), run_dir, 20, console)


def test_the_screen_shows_them_below_the_reward(run_dir):
    console, view = view_of(run_dir, force_terminal=True, color_system=None)
    view.metrics.read_new()
    console.print(view.render())
    lines = console.export_text().splitlines()
    (place,) = [number for number, line in enumerate(lines) if "reward  0.500" in line]
    assert f"of rollouts {EXPECTED}" in lines[place + 1]


def test_a_line_without_a_terminal_has_them_beside_the_reward(run_dir):
    written = (run_dir / "metrics.jsonl").read_text()
    (run_dir / "metrics.jsonl").unlink()
    console, view = view_of(run_dir, force_terminal=False)
    (run_dir / "metrics.jsonl").write_text(written)
    with view:
        view.refresh()
    assert f"step 20/20 | reward 0.500 ({EXPECTED}) | " in console.file.getvalue()


def test_the_summary_has_their_means(run_dir):
    console, view = view_of(run_dir, force_terminal=False)
    view.ended()
    assert f"of rollouts {EXPECTED}   mean of all steps" in console.export_text()
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["sampled_reward"]["outcomes"] == pytest.approx(
        {"failed": 0.2, "truncated": 0.0, "dropped": 0.2}
    )


@pytest.mark.parametrize("command", ["doctor", "status"])
def test_a_command_that_shows_the_reward_shows_them(run_dir, command):
    words = [command, "a-run", "--output-dir", str(run_dir.parent)]
    said = CliRunner().invoke(app, words, env={"COLUMNS": "120"})
    assert said.exit_code == 0, said.output
    assert EXPECTED in said.output


def test_the_docs_show_the_rows_of_status(run_dir):
    command = ["status", "a-run", "--output-dir", str(run_dir.parent)]
    said = CliRunner().invoke(app, command).output
    page = (Path(__file__).parents[4] / "docs/observability.md").read_text()
    (shown,) = re.findall(r"^\$ prime-rl status .*?(?=```)", page, re.DOTALL | re.MULTILINE)
    row = re.compile(r"^(\w+(?: \w+)*)  +\S", re.MULTILINE)
    assert row.findall(shown) == row.findall(said)
    assert "of rollouts" in row.findall(said)


def test_the_page_has_a_curve_of_what_was_dropped(run_dir):
    found, end = curves(run_dir / "metrics.jsonl")
    assert found[f"{ALL}/is_dropped/mean"] == [[step, 0.2] for step in range(1, 21)]
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(batch(21, seen=128)) + "\n")
    assert curves(run_dir / "metrics.jsonl", end)[0][f"{ALL}/is_dropped/mean"] == [[21, 0.0]]
