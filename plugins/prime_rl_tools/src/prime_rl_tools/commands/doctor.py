"""``prime-rl doctor``."""

from __future__ import annotations

import json
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
    from prime_rl_app.runs import find_run
    from prime_rl_tools.doctor import MIN_STEPS, History, diagnose, pace_line

    history = History(find_run(run, output_dir))
    verdicts = diagnose(history)
    steps = history.steps
    if as_json:
        typer.echo(json.dumps([asdict(verdict) for verdict in verdicts], indent=2))
        return

    if len(steps) < MIN_STEPS:
        typer.echo(f"{history.run_dir}: {len(steps)} steps; a verdict needs {MIN_STEPS}")
        return

    typer.echo(f"{history.run_dir}: steps {steps[0]} to {steps[-1]}, {len(verdicts)} findings")
    for line in reward_lines(history.run_dir):
        typer.echo(line)
    pace = pace_line(history)
    if pace is not None:
        typer.echo(textwrap.fill(pace, 96, break_long_words=False, break_on_hyphens=False))
    for verdict in verdicts:
        typer.echo(f"\n{printable(_text(verdict))}")
    if verdicts:
        typer.echo(f"\n{NOTE}")


def reward_lines(run_dir: Path) -> Iterator[str]:
    """The reward at the beginning and at the end, and the shares of rollouts that it does not
    show."""
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
            yield f"reward {reward:.3f} (mean of the {place} {len(rows)} steps){of_rollouts}"


def _text(verdict: Verdict) -> str:
    rows = (
        ("found", verdict.evidence), ("counts", verdict.threshold), ("change", verdict.advice),
    )  # fmt: skip
    lines = [verdict.line]
    for title, text in rows:
        lines += textwrap.wrap(
            text, 96, initial_indent=f"  {title:8}", subsequent_indent=" " * 10,
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip

    return "\n".join(lines)
