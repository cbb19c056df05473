"""``prime-rl doctor``."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from prime_rl_tools.commands.options import LATEST, OUTPUTS, OutputDir, RunName
from prime_rl_tools.commands.runs import AsJson

if TYPE_CHECKING:
    from prime_rl_tools.doctor import Verdict

WINDOW = 10
"""Steps at the beginning and at the end over which the reward is averaged."""
MOST_COLUMNS = 100
"""Longest line on a wide terminal, and where there is none."""
NOTE = (
    "An early warning is an indication: look at the rollouts (prime-rl report) before you change a "
    "key."
)


def doctor(run: RunName = LATEST, output_dir: OutputDir = OUTPUTS, as_json: AsJson = False) -> None:
    """Say what keeps a run from learning: verdicts with evidence, threshold and the key to change.

    ```
    prime-rl doctor
    ```
    """
    from prime_rl.errors import printable
    from prime_rl_app.output import counted
    from prime_rl_app.run_states import failures, find_run
    from prime_rl_tools.doctor import MIN_STEPS, History, diagnose, pace_line

    history = History(find_run(run, output_dir))
    verdicts = diagnose(history)
    steps = history.steps
    if as_json:
        typer.echo(json.dumps([asdict(verdict) for verdict in verdicts], indent=2))

    width = min(MOST_COLUMNS, shutil.get_terminal_size((MOST_COLUMNS, 24)).columns)
    errors = [_wrapped(printable(f"failed  {error}"), width) for error in failures(history.run_dir)]
    if len(steps) < MIN_STEPS:
        # Beside an empty list too: it would read as a run without a fault.
        text = f"{history.run_dir}: {counted(len(steps), 'step')}; a verdict needs {MIN_STEPS}"
        for line in (text, *errors):  # a run that ended so soon says why
            typer.echo(line, err=as_json)
        return

    if as_json:
        for line in errors:
            typer.echo(line, err=True)
        return

    findings = counted(len(verdicts), "finding")
    typer.echo(f"{history.run_dir}: steps {steps[0]} to {steps[-1]}, {findings}")
    for line in errors:
        typer.echo(line)
    for line in reward_lines(history.run_dir):
        typer.echo(_wrapped(line, width))
    pace = pace_line(history)
    if pace is not None:
        typer.echo(_wrapped(pace, width))
    for verdict in verdicts:
        typer.echo(f"\n{printable(_text(verdict, width))}")
    if verdicts:
        typer.echo(f"\n{_wrapped(NOTE, width)}")


def _wrapped(text: str, width: int, title: str = "") -> str:
    """``title`` stands before the first line, which the others are below."""
    return textwrap.fill(
        text,
        width,
        initial_indent=title,
        subsequent_indent=" " * len(title),
        break_long_words=False,
        break_on_hyphens=False,
    )


def reward_lines(run_dir: Path) -> Iterator[str]:
    """The reward at the beginning and at the end, and the shares of rollouts that it does not
    show."""
    from prime_rl_app.output import as_reward
    from prime_rl_tools.view.outcomes import REWARD, mean_outcomes, outcomes_text, read_batches

    batches = [
        row for row in read_batches(run_dir / "metrics.jsonl") if row.get(REWARD) is not None
    ]
    window = max(1, min(WINDOW, len(batches) // 2))
    for rows, place in ((batches[:window], "first"), (batches[-window:], "last")):
        if rows:
            reward = sum(row[REWARD] for row in rows) / len(rows)
            shares = outcomes_text(mean_outcomes(rows))
            of_rollouts = f"; of rollouts {shares}" if shares else ""
            over = f"{place} step" if len(rows) == 1 else f"mean of the {place} {len(rows)} steps"
            yield f"reward {as_reward(reward)} ({over}){of_rollouts}"


def _text(verdict: Verdict, width: int) -> str:
    rows = (
        ("found", verdict.evidence), ("counts", verdict.threshold), ("change", verdict.advice),
    )  # fmt: skip
    lines = [_wrapped(verdict.line, width)]
    for title, text in rows:
        lines.append(_wrapped(text, width, title=f"  {title:8}"))

    return "\n".join(lines)
