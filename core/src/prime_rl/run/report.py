"""What a run says when it is over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


def print_summary(console: Console, run_dir: Path) -> None:
    """Reward before and after, a few rollouts before and after, and where everything is."""
    path = run_dir / "summary.json"
    if not path.exists():
        return
    summary = json.loads(path.read_text())
    sampled = summary["sampled_reward"]
    console.print()
    if sampled["first"] is not None:
        console.print(
            f"Sampled reward  [bold]{sampled['first']:.3f} → {sampled['last']:.3f}[/]   "
            f"[dim]{_window(sampled['window'])}[/]"
        )
    for after in summary["eval"]["after"]:
        _print_eval(console, _first_of(summary["eval"], after), after)
    console.print(f"Run directory   {run_dir}", markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"Learning curve  {run_dir / summary['plot']}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _window(steps: int) -> str:
    return "first and last step" if steps == 1 else f"mean of the first and last {steps} steps"


def _first_of(measured: dict[str, Any], after: dict[str, Any]) -> dict[str, Any] | None:
    """The env's first measurement: before training, or where that was skipped, the first there
    is; None if it has been measured once only."""
    earlier: list[dict[str, Any]] = [*measured["before"], *measured.get("during", ())]
    return next((each for each in earlier if each["env"] == after["env"]), None)


def _print_eval(console: Console, before: dict[str, Any] | None, after: dict[str, Any]) -> None:
    if before is None:
        failed = f"   [red]failed: {after['num_failed']}[/]" if after["num_failed"] else ""
        console.print(
            f"Held-out reward [bold]{after['reward']:.3f}[/]   "
            f"[dim]{after['env']}, {after['num_rollouts']} rollouts; not measured before[/]{failed}"
        )
        return
    console.print(
        f"Held-out reward [bold]{before['reward']:.3f} → {after['reward']:.3f}[/]   "
        f"[dim]{before['env']}, {before['num_rollouts']} rollouts[/]{_failures(before, after)}"
    )
    table = Table(box=None, header_style="dim", padding=(0, 2))
    for title in ("prompt", "before", "", "after", ""):
        table.add_column(title, overflow="fold")
    for first, second in zip(before["shown"], after["shown"], strict=False):
        table.add_row(
            Text(_last(first["messages"], "user"), "bold"),
            Text(_last(first["messages"], "assistant")),
            Text(f"{first['reward']:.2f}", "yellow"),
            Text(_last(second["messages"], "assistant")),
            Text(f"{second['reward']:.2f}", "green"),
        )
    console.print(table)


def _failures(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Failed rollouts count as reward 0, so they are said."""
    failed = before["num_failed"], after["num_failed"]
    return f"   [red]failed: {failed[0]} before, {failed[1]} after[/]" if any(failed) else ""


def _last(messages: list[list[str]], role: str) -> str:
    """The last message of a role, on one line and not too long."""
    texts = [text for spoken_by, text in messages if spoken_by == role]
    line = " ".join(texts[-1].split()) if texts else ""
    return line if len(line) <= 60 else line[:57] + "..."
