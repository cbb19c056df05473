"""The live view of a run: step, reward with a sparkline, speed, and what each process does or waits
for.

On a terminal and in a notebook it is drawn in place; elsewhere (a pipe, CI) it prints a line when
something changes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from prime_rl import PluginConfig, RunView
from prime_rl.rundir.status import DONE, ENGINES, StatusReport, Tail, read_status
from prime_rl_tools.view.cell import Cell
from prime_rl_tools.view.ending import print_stop, print_summary
from prime_rl_tools.view.summary import REWARD, summarize, write_summary

if TYPE_CHECKING:
    from prime_rl.config.run import RunConfig
    from prime_rl.plugins.manager import Hooks

SLOW_SECONDS = 2.0
PRINT_EVERY = 10
"""Steps between two lines without a terminal."""
BARS = "▁▂▃▄▅▆▇█"


class TerminalView(RunView):
    """Shows steps, reward, speed and processes, and prints a summary at the end."""

    name = "terminal"

    def __init__(
        self,
        config: PluginConfig,
        run_dir: Path,
        max_steps: int,
        console: Console | None = None,
    ) -> None:
        """``console``: None for stdout."""
        super().__init__(config, run_dir, max_steps)
        self.console = console or Console()
        self.metrics = MetricsTail(run_dir / "metrics.jsonl")
        self.started = time.monotonic()
        self._live: Live | Cell | None = None
        if self.console.is_terminal:
            self._live = Live(console=self.console, auto_refresh=False)
        elif self.console.is_jupyter:
            self._live = Cell()
        self.metrics.read_new()
        # Steps that previous attempts have trained.
        self._steps_before = self._printed_step = self.metrics.step

    def __enter__(self) -> TerminalView:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live:
            self._live.update(self.render(), refresh=True)
            self._live.stop()

    def refresh(self) -> None:
        """See ``RunView.refresh``. Without a terminal: a line for each process whose state is new,
        until this attempt trains, and one for every few steps."""
        self.metrics.read_new()
        if self._live:
            self._live.update(self.render(), refresh=True)
            return
        if self.metrics.step <= self._steps_before:
            super().refresh()
        self._print_steps()

    def render(self) -> RenderableType:
        """The whole view."""
        return Panel(
            Group(self._headline(), Text(), self._processes()),
            title=f"prime-rl · {self.run_dir.name}",
            subtitle=str(self.run_dir),
            border_style="blue",
            width=min(self.console.width, 110),
        )

    def _headline(self) -> RenderableType:
        metrics, kl = self.metrics, self.metrics.latest.get("mismatch_kl/all/mean")
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", justify="right")
        table.add_column()
        bar = ProgressBar(total=self.max_steps, completed=metrics.step, width=40)
        elapsed = Text(clock(time.monotonic() - self.started), "dim")
        table.add_row("step", _row(Text(f"{metrics.step}/{self.max_steps}"), bar, elapsed))
        if metrics.headline is not None:
            name, value = metrics.headline
            curve = sparkline(metrics.rewards) if metrics.rewards else ""
            table.add_row(name, Text.assemble((f"{value} ", "bold"), (curve, "green")))
        table.add_row("tokens/s", f"{metrics.tokens_per_second:,.0f}")
        table.add_row("off-policy", metrics.off_policy)
        if kl is not None:
            table.add_row("mismatch KL", f"{kl:.1e}")
        return table

    def _processes(self) -> RenderableType:
        table = Table(box=None, header_style="dim", padding=(0, 2))
        for title in ("process", "does", "waits for", ""):
            table.add_column(title)
        for name, report in self.reports():
            table.add_row(Text(name, "bold"), *_status_cells(report))
        return table

    def reports(self) -> Iterator[tuple[str, StatusReport]]:
        """See ``RunView.reports``: in the order in which processes start. Several engines, or
        remote ones, add the line ``engines``."""
        folder = self.run_dir / "status"
        others = (path.stem for path in folder.glob("inference_*.json"))
        more = sorted(others, key=lambda name: int(name.rpartition("_")[2]))
        together = more or not (folder / "inference.json").exists()
        engines = [*([ENGINES] if together else []), "inference", *more]
        for name in ("model", *engines, "trainer", "orchestrator"):
            if (report := read_status(folder / f"{name}.json")) is not None:
                yield name, report

    def _print_steps(self) -> None:
        metrics, step = self.metrics, self.metrics.step
        shown = self.max_steps if step == self.max_steps else step - step % PRINT_EVERY
        if shown > self._printed_step:
            self._printed_step = shown
            self.print(
                f"step {step}/{self.max_steps} | {' '.join(metrics.headline or ('no reward',))} | "
                f"{metrics.tokens_per_second:,.0f} tokens/s | off-policy {metrics.off_policy}"
            )

    def print(self, line: str) -> None:
        """Print a line; on a terminal, above the view."""
        self.console.print(line, markup=False, highlight=False)

    def ended(self) -> None:
        """See ``RunView.ended``: write ``summary.json`` and ``learning_curve.png``, and print the
        summary."""
        self._summarize(None)

    def dry_run(self, config: RunConfig, hooks: Hooks, quick: bool) -> list[str]:
        """See ``RunView.dry_run``."""
        from prime_rl_tools.dry_run import describe

        return [*describe(config, hooks, quick)]

    def stopped(self, step: int | None, saved: bool, command: str) -> None:
        """See ``RunView.stopped``: the summary if weights are saved, and how to resume the run."""
        if saved:
            self._summarize(step)
        print_stop(self.console, self.run_dir, self.max_steps, step, saved, command)

    def _summarize(self, stopped_at: int | None) -> None:
        summary = summarize(self.run_dir, self.max_steps, stopped_at)
        try:
            write_summary(self.run_dir, summary)
        except OSError as error:
            self.print(f"cannot write the summary: {error}")
        print_summary(self.console, self.run_dir, summary)


class MetricsTail:
    """Follows ``metrics.jsonl``."""

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)
        self.latest: dict[str, Any] = {}
        self.rewards: list[float] = []
        self.step = 0
        self._clock: list[tuple[float, float]] = []

    def read_new(self) -> None:
        """Read the lines written since the last call."""
        for line in self._tail.new_lines():
            row = json.loads(line)
            self.latest |= row
            if row.get(REWARD) is not None:
                self.rewards.append(row[REWARD])
            if "progress/total_tokens" in row:  # a batch; batches of demonstrations have no reward
                self.step = row["step"]
                now = row["progress/seconds"], row["progress/total_tokens"]
                if self._clock and now < self._clock[-1]:  # a new attempt: both start again
                    self._clock.clear()
                self._clock.append(now)

    @property
    def headline(self) -> tuple[str, str] | None:
        """Name and value of the latest reward; without rewards, of the loss."""
        if self.rewards:
            return "reward", f"{self.rewards[-1]:.3f}"
        loss = self.latest.get("loss/mean")
        return None if loss is None else ("loss", f"{loss:.3f}")

    @property
    def tokens_per_second(self) -> float:
        """Over the last twenty steps."""
        if len(self._clock) < 2:
            return 0.0
        (t0, n0), (t1, n1) = self._clock[max(-len(self._clock), -20)], self._clock[-1]
        return (n1 - n0) / (t1 - t0) if t1 > t0 else 0.0

    @property
    def off_policy(self) -> str:
        """Staleness of the last batch, in steps."""
        mean, most = (self.latest.get(f"off_policy/{key}") for key in ("mean", "max"))
        return "-" if mean is None or most is None else f"{mean:.2f} steps (max {most:.0f})"


def sparkline(values: Sequence[float], width: int = 48) -> str:
    """Values as at most ``width`` bars, averaged in chunks, scaled between minimum and maximum."""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        chunks = [values[a:b] for a, b in pairwise(edges)]
        values = [sum(chunk) / len(chunk) for chunk in chunks]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(BARS[int((value - low) / span * (len(BARS) - 1) + 0.5)] for value in values)


def clock(seconds: float) -> str:
    """``83`` -> ``1:23``."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _row(*cells: RenderableType) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_row(*cells)
    return grid


def _status_cells(report: StatusReport) -> tuple[RenderableType, RenderableType, RenderableType]:
    state = Text(report.state)
    seconds = time.time() - report.time
    if seconds > SLOW_SECONDS and report.state != DONE:
        state.append(f"  {clock(seconds)}", "dim")  # shows how long a slow state lasts
    detail = "  ".join(f"{name} {plain(value)}" for name, value in report.detail.items())
    last: RenderableType = Text(detail, "dim")
    if report.progress is not None and report.progress < 1:
        bar = ProgressBar(total=1.0, completed=report.progress, width=20)
        last = _row(bar, f"{report.progress:4.0%}")
    return state, Text(report.waiting_for or "", "yellow"), last


def plain(value: float | str) -> str:
    """Format a status detail: ``13.0`` -> ``13``."""
    return f"{value:g}" if isinstance(value, float) else str(value)
