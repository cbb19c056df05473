"""An evaluation on the terminal: one progress bar per env, then a table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from prime_rl_evals.figures import Finished
from prime_rl_tools.eval.run import EnvFigures

ROWS = (
    ("finished", "all/is_completed/mean", "share"),
    ("cut off", "all/is_truncated/mean", "share"),
    ("turns", "all/num_turns/mean", "number"),
    ("input tokens", "all/num_input_tokens/mean", "number"),
    ("output tokens", "all/num_output_tokens/mean", "number"),
    ("output tokens, p90", "all/num_output_tokens/p90", "number"),
    ("seconds", "all/timing/agent/mean", "number"),
)
"""Title, figure and kind of the rows below the rates."""


class Bars:
    """One bar per env, with the mean reward so far and the number of failures."""

    def __init__(self, console: Console) -> None:
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("reward {task.fields[reward]}  failed {task.fields[failed]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._tasks: dict[str, TaskID] = {}
        self._rewards: dict[str, list[float]] = {}
        self._failed: dict[str, int] = {}

    def __enter__(self) -> Bars:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def start(self, env: str, total: int, finished: Sequence[Finished]) -> None:
        """A new bar."""
        self._rewards[env] = [each.reward for each in finished]
        self._failed[env] = 0
        self._tasks[env] = self._bars.add_task(env, total=total, reward="-", failed=0)
        self._update(env)

    def done(self, env: str, finished: Finished) -> None:
        """One more."""
        self._rewards[env].append(finished.reward)
        self._failed[env] += not finished.result.ok
        self._update(env)

    def _update(self, env: str) -> None:
        rewards = self._rewards[env]
        mean = f"{sum(rewards) / len(rewards):.3f}" if rewards else "-"
        self._bars.update(
            self._tasks[env], completed=len(rewards), reward=mean, failed=self._failed[env]
        )


def print_results(console: Console, results: Sequence[EnvFigures]) -> None:
    """One column per env, then the errors."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("")
    for result in results:
        table.add_column(Text(result.env), justify="right")
    rates = [name for result in results for name in result.figures if "@" in name or "^" in name]
    for rate in dict.fromkeys(rates):
        table.add_row(Text(rate, "bold"), *(_rate(result, rate) for result in results))
    table.add_row("failed (reward 0)", *(str(result.num_failed) for result in results))
    for title, name, kind in ROWS:
        if any(name in result.figures for result in results):
            table.add_row(title, *(_cell(result.figures.get(name), kind) for result in results))

    for name in dict.fromkeys(name for result in results for name in _terms(result)):
        table.add_row(Text(name), *(_cell(_terms(each).get(name), "number") for each in results))
    table.add_row("rollouts", *(f"{result.num_rollouts}" for result in results))
    console.print(table)
    for result in results:
        for kind, number in result.errors.items():
            line = result.examples[kind].strip().splitlines()[:1] or [""]
            text = f"{result.env}: {number} failed: {kind}: {line[0][:300]}"
            console.print(Text(text, "red"), soft_wrap=True)


def _terms(result: EnvFigures) -> dict[str, float]:
    """The env's own metrics."""
    pattern = re.compile("all/metrics/(.+)/mean")
    matches = ((pattern.fullmatch(name), value) for name, value in result.figures.items())
    return {match[1]: value for match, value in matches if match}


def _rate(result: EnvFigures, name: str) -> str:
    value = result.figures.get(name)
    error = result.figures.get("all/reward/stderr")
    if value is None:
        return "-"
    return f"{value:.4f}" + (f" ± {error:.4f}" if name.startswith("avg@") and error else "")


def _cell(value: float | None, kind: str) -> str:
    if value is None:
        return "-"
    return f"{value:.1%}" if kind == "share" else f"{value:.3g}"
