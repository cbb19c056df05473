"""The live view of a run: step, reward with a sparkline, speed, a sampled rollout, and what each
process does or waits for.

On a terminal it fills the alternate screen, whose last picture stays; in a notebook it is drawn in
place; elsewhere (a pipe, CI) it prints a line when something changes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from prime_rl import PluginConfig, RunView
from prime_rl.errors import printable
from prime_rl.plugins.status import StatusReport, read_status
from prime_rl.rundir.rows import Tail, metrics_of, parse_row
from prime_rl.rundir.status import DONE, ENGINES, names_seen
from prime_rl_app.output import as_reward
from prime_rl_app.run_states import REWARD
from prime_rl_tools.terminal import Console
from prime_rl_tools.view.cell import Cell
from prime_rl_tools.view.ending import print_findings, print_next, print_stop, print_summary
from prime_rl_tools.view.findings import Findings
from prime_rl_tools.view.outcomes import outcomes, outcomes_style, outcomes_text
from prime_rl_tools.view.sampled import SampledRollouts
from prime_rl_tools.view.summary import summarize, write_summary

if TYPE_CHECKING:
    from prime_rl.config.run import RunConfig
    from prime_rl.registry.manager import Hooks
    from prime_rl_tools.watch.server import Server

SLOW_SECONDS = 2.0
PRINT_EVERY = 10
"""Steps between two lines without a terminal."""
RECENT = 20
"""Steps over which speed, waiting and the time left are measured."""
BARS = "▁▂▃▄▅▆▇█"
WIDEST = 120
NARROW = 96
"""Columns: the view grows up to the first, and has fewer columns below the second."""
NEWS = 3
"""Messages that are shown while the run is going on."""


class Detail(NamedTuple):
    """What the view has of each part."""

    headline: bool
    """All rows, and blank lines between the parts; else step, reward and findings."""
    sampled: bool
    """The sampled rollout."""
    processes: bool
    """Whole texts, on as many lines as they need; else a line for each process."""


DETAILS = (
    Detail(headline=True, sampled=True, processes=True),
    Detail(headline=True, sampled=False, processes=True),
    Detail(headline=True, sampled=False, processes=False),
    Detail(headline=False, sampled=False, processes=True),
    Detail(headline=False, sampled=False, processes=False),
)
"""From the most to the least: the first that fits the terminal is shown."""


class TerminalConfig(PluginConfig):
    """``[view] type = "terminal"``"""

    watch: bool = False
    """Serve the run's page on loopback while it trains, as `prime-rl watch` does."""


class TerminalView(RunView):
    """Shows steps, reward, speed, a rollout and processes, and prints a summary at the end."""

    name = "terminal"
    config_class = TerminalConfig

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
            self._live = Live(console=self.console, auto_refresh=False, screen=True)
        elif self.console.is_jupyter:
            self._live = Cell()

        self._news: list[str] = []
        self._sampled = SampledRollouts(run_dir)
        self._server: Server | None = None
        self.metrics.read_new()
        # Steps that previous attempts have trained.
        self._steps_before = self._printed_step = self.metrics.step
        self._findings = Findings(run_dir, self.metrics.step)

    def __enter__(self) -> TerminalView:
        if isinstance(self.config, TerminalConfig) and self.config.watch:
            from prime_rl_tools.watch.server import Server, Watched

            self._server = Server(Watched([self.run_dir]))
            self._server.start()
            self.print(f"watch it at {self._server.url}")

        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._server:
            self._server.close()
            self._server = None

        if self._live:
            self._live.update(self.render(), refresh=True)
            self._live.stop()

        if isinstance(self._live, Live):  # the alternate screen is gone
            self.console.print(self.render())
            for line in self._news:
                self.console.print(line, markup=False, highlight=False)

    def refresh(self) -> None:
        """See ``RunView.refresh``. Without a terminal: a line for each process whose state is new,
        until this attempt trains, one for every few steps, and one per new finding."""
        self.metrics.read_new()
        self._findings.update(self.metrics.step)
        if self._live:
            self._live.update(self.render(), refresh=True)
            return

        if self.metrics.step <= self._steps_before:
            super().refresh()
        self._print_steps()
        for verdict in self._findings.new():
            self.print(f"doctor: {verdict.line}")

    def render(self) -> RenderableType:
        """The whole view; on the alternate screen, as much of it as fits."""
        if not (isinstance(self._live, Live) and self._live.is_started):
            return self._panel(DETAILS[0], ())

        news = self._news[-NEWS:]
        height = self.console.height
        panels = (self._panel(detail, news) for detail in DETAILS)
        lines = self.console.render_lines
        options = self.console.options.update(height=None)
        last = self._panel(DETAILS[-1], ())
        return next((each for each in panels if len(lines(each, options)) <= height), last)

    def _panel(self, detail: Detail, news: Sequence[str]) -> RenderableType:
        width = min(self.console.width, WIDEST)
        parts: list[RenderableType | None] = [self._headline(width, detail.headline)]
        if detail.sampled:
            parts.append(self._sampled.render(width))
        parts.append(self._processes(width, detail.processes))
        parts += [Text(line, "bold") for line in news]
        spaced = [each for part in parts if part is not None for each in (Text(), part)]
        shown = spaced[1:] if detail.headline else [each for each in parts if each is not None]
        title = f"prime-rl · {self.run_dir.name}"
        where = self._server.url if self._server else str(self.run_dir)
        return Panel(Group(*shown), title=title, subtitle=where, border_style="dim", width=width)

    def _headline(self, width: int, is_whole: bool) -> RenderableType:
        metrics = self.metrics
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", justify="right")
        table.add_column(overflow="fold")
        bar = ProgressBar(
            total=self.max_steps, completed=metrics.step, width=max(8, min(40, width - 50))
        )
        times = clock(time.monotonic() - self.started)
        left = metrics.seconds_left(self.max_steps)
        if left is not None:
            times += f", about {clock(left)} left"
        table.add_row("step", _row(Text(f"{metrics.step}/{self.max_steps}"), bar, Text(times)))
        if metrics.headline is not None:
            name, value = metrics.headline
            curve = sparkline(metrics.rewards, max(8, width - 32)) if metrics.rewards else ""
            cell = Text.assemble((f"{value} ", "bold"), (curve, "green"))
            shares = metrics.outcomes
            if shares:
                cell.append(f"\nof rollouts {outcomes_text(shares)}", outcomes_style(shares))
            table.add_row(name, cell)

        findings = self._findings.render()
        if not is_whole:
            if findings is not None:
                table.add_row("doctor", findings)
            return table

        trained = metrics.trained
        if trained:
            table.add_row("trainer", Text("   ".join(trained)))
        table.add_row("tokens/s", f"{metrics.tokens_per_second:,.0f} of batches, prompts included")
        if metrics.waits:
            table.add_row("waiting", Text(metrics.waits))
        if metrics.paused is not None:
            table.add_row("new weights", f"engines paused {metrics.paused:.2f} s per step")
        kl = metrics.latest.get("mismatch_kl/all/mean")
        apart = "" if kl is None else f"   mismatch KL {kl:.1e}"
        table.add_row("off-policy", metrics.off_policy + apart)
        if findings is not None:
            table.add_row("doctor", findings)
        return table

    def _processes(self, width: int, is_whole: bool) -> RenderableType:
        table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
        if not is_whole:  # a line each
            reports = list(self.reports())
            longest = max((len(name) for name, _ in reports), default=0)
            table.add_column("process", no_wrap=True, min_width=longest)
            table.add_column("does", no_wrap=True, overflow="ellipsis")
            for name, report in reports:
                cell, _, _ = _status_cells(report)
                if report.waiting_for:
                    cell = Text.assemble("waits for ", (report.waiting_for, "magenta"))
                table.add_row(Text(name, "bold"), cell)
            return table

        titles = ("process", "does", "waits for", "")
        for title in titles if width >= NARROW else titles[:2]:
            table.add_column(title, overflow="fold")
        for name, report in self.reports():
            state, waits, last = _status_cells(report)
            if width < NARROW:
                if isinstance(last, Text):
                    state = Text.assemble(state, "  ", last)
                if report.waiting_for:
                    state.append(f"\nwaits for {report.waiting_for}", "magenta")
            cells = (state, waits, last) if width >= NARROW else (state,)
            table.add_row(Text(name, "bold"), *cells)

        return table

    def reports(self) -> Iterator[tuple[str, StatusReport]]:
        """See ``RunView.reports``: in the order in which processes start. Several engines, or
        remote ones, add the line ``engines``; environments that run in workers, ``env_workers``."""
        folder = self.run_dir / "status"
        files = names_seen(folder)
        others = (file.removesuffix(".json") for file in files if file.startswith("inference_"))
        numbered = (name for name in others if name.rpartition("_")[2].isdecimal())
        more = sorted(numbered, key=lambda name: int(name.rpartition("_")[2]))
        together = more or "inference.json" not in files
        engines = [*([ENGINES] if together else []), "inference", *more]
        for name in ("model", *engines, "trainer", "orchestrator", "env_workers"):
            report = read_status(folder / f"{name}.json")
            if report is not None:
                yield name, report

    def _print_steps(self) -> None:
        metrics = self.metrics
        step = self.metrics.step
        shown = self.max_steps if step == self.max_steps else step - step % PRINT_EVERY
        if shown > self._printed_step:
            self._printed_step = shown
            shares = outcomes_text(metrics.outcomes)
            reward = " ".join(metrics.headline or ("no reward",))
            self.print(
                f"step {step}/{self.max_steps} | {reward}{f' ({shares})' if shares else ''} | "
                f"{metrics.tokens_per_second:,.0f} tokens/s | off-policy {metrics.off_policy}"
            )

    def print(self, line: str) -> None:
        """Print a line; on a terminal it is in the view, and printed when the run has ended."""
        if isinstance(self._live, Live) and self._live.is_started:
            self._news.append(line)
        else:
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def ended(self) -> None:
        """See ``RunView.ended``: write ``summary.json`` and ``learning_curve.png``, and print the
        summary and what to do next."""
        self._summarize(None)
        print_next(self.console, self.run_dir, self.max_steps)

    def dry_run(self, config: RunConfig, hooks: Hooks, quick: bool) -> list[str]:
        """See ``RunView.dry_run``."""
        from prime_rl_tools.dry_run import describe

        return [printable(line) for line in describe(config, hooks, quick)]

    def stopped(self, step: int | None, saved: bool, command: str) -> None:
        """See ``RunView.stopped``: the summary if weights are saved, and how to resume the run."""
        if saved:
            self._summarize(step)
        print_stop(
            self.console,
            self.run_dir,
            max_steps=self.max_steps,
            step=step,
            saved=saved,
            command=command,
        )

    def _summarize(self, stopped_at: int | None) -> None:
        summary = summarize(self.run_dir, self.max_steps, stopped_at)
        try:
            write_summary(self.run_dir, summary)
        except OSError as error:
            self.print(f"cannot write the summary: {error}")
        print_summary(self.console, self.run_dir, summary)
        self._findings.read()
        print_findings(self.console, self.run_dir, self._findings.found)


class MetricsTail:
    """Follows ``metrics.jsonl``."""

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)
        self.latest: dict[str, Any] = {}
        self._timed: dict[str, Any] = {}
        """Seconds and waits of the newest step that has them: its rows come from two processes."""
        self.rewards: list[float] = []
        self.outcomes: dict[str, float] = {}
        """Outcomes of the newest batch's rollouts that the newest reward does not show."""
        self.versions_behind: list[float] = []
        """Shares of the newest batch's rollouts that are 0, 1, 2 ... versions behind."""
        self.step = 0
        self._clock: deque[tuple[int, float, float]] = deque(maxlen=RECENT)
        """Step, seconds and tokens so far."""

    def read_new(self) -> None:
        """Read the lines written since the last call."""
        for line in self._tail.new_lines():
            try:
                row = metrics_of(parse_row(line))
            except ValueError:
                continue  # damaged; `doctor` and the report say so

            self.latest |= row
            if row["step"] > self._timed.get("step", 0) and "time/step" in row:
                self._timed = {"step": row["step"]}
            if row["step"] == self._timed.get("step"):
                self._timed |= row
            if row.get(REWARD) is not None:
                self.rewards.append(row[REWARD])
            seconds = row.get("progress/seconds")
            tokens = row.get("progress/total_tokens")
            # A batch; batches of demonstrations have no reward.
            if seconds is not None and tokens is not None:
                self.step = row["step"]
                self.outcomes = outcomes(row)
                self.versions_behind = shares_behind(row)
                now = (seconds, tokens)
                if self._clock and now < self._clock[-1][1:]:  # a new attempt: both start again
                    self._clock.clear()
                self._clock.append((self.step, *now))

    @property
    def headline(self) -> tuple[str, str] | None:
        """Name and value of the latest reward; without rewards, of the loss."""
        if self.rewards:
            return "reward", as_reward(self.rewards[-1])
        loss = self.latest.get("loss/mean")
        return None if loss is None else ("loss", f"{loss:.3f}")

    @property
    def tokens_per_second(self) -> float:
        """Tokens of batches, prompts and replies, over the last twenty steps."""
        if len(self._clock) < 2:
            return 0.0
        (_, t0, n0) = self._clock[0]
        (_, t1, n1) = self._clock[-1]
        return (n1 - n0) / (t1 - t0) if t1 > t0 else 0.0

    def seconds_left(self, max_steps: int) -> float | None:
        """Seconds until the last step, at the speed of the last twenty steps. None: not known
        yet."""
        if len(self._clock) < 2 or self.step >= max_steps:
            return None
        (s0, t0, _) = self._clock[0]
        (s1, t1, _) = self._clock[-1]
        return (max_steps - s1) * (t1 - t0) / (s1 - s0) if s1 > s0 else None

    @property
    def trained(self) -> list[str]:
        """The trainer's numbers of the last step."""
        shown = {
            "loss": ("loss/mean", ".4f"),
            "entropy": ("entropy/all/mean", ".3f"),
            "grad norm": ("optim/grad_norm", ".3g"),
        }
        values = ((name, self.latest.get(key), kind) for name, (key, kind) in shown.items())
        return [f"{name} {value:{kind}}" for name, value, kind in values if value is not None]

    @property
    def waits(self) -> str:
        """Seconds of the last step that each side waited, of its seconds in all."""
        waits = {
            name.removeprefix("wait/").replace("/", " for ").replace("_", " "): value
            for name, value in self._timed.items()
            if name.startswith("wait/") and value and value >= 0.005
        }
        total = self._timed.get("time/step")
        if not waits or total is None:
            return ""
        parts = ", ".join(f"{name} {value:.2f} s" for name, value in sorted(waits.items()))
        return f"{parts} of {total:.2f} s"

    @property
    def paused(self) -> float | None:
        """Seconds of the last step for which new weights kept the engines from sampling. None: no
        weights were loaded."""
        value = self._timed.get("time/engines_paused")
        return None if value is None else float(value)

    @property
    def off_policy(self) -> str:
        """Staleness of the last batch, in steps, with the shares of the batch by their number from
        0 on if there are several."""
        mean = self.latest.get("off_policy/mean")
        most = self.latest.get("off_policy/max")
        if mean is None or most is None:
            return "-"
        shares = " ".join(f"{share:.0%}" for share in self.versions_behind)
        several = f": {shares}" if len(self.versions_behind) > 1 else ""
        return f"{mean:.2f} steps (max {most:.0f}{several})"


def shares_behind(row: Mapping[str, Any]) -> list[float]:
    """The share of a batch that is 0, 1, 2 ... versions behind, up to its oldest rollout."""
    prefix = "off_policy/behind/"
    shares = {
        int(name.removeprefix(prefix)): float(share)
        for name, share in row.items()
        if name.startswith(prefix) and share is not None
    }
    return [shares.get(number, 0.0) for number in range(max(shares, default=-1) + 1)]


def sparkline(values: Sequence[float], width: int = 48) -> str:
    """Values as at most ``width`` bars, averaged in chunks, scaled between minimum and maximum."""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        chunks = [values[a:b] for a, b in pairwise(edges)]
        values = [sum(chunk) / len(chunk) for chunk in chunks]
    low = min(values)
    high = max(values)
    span = (high - low) or 1.0
    return "".join(BARS[int((value - low) / span * (len(BARS) - 1) + 0.5)] for value in values)


def clock(seconds: float) -> str:
    """``83`` -> ``1:23``."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _row(*cells: RenderableType) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_row(*cells)
    return grid


def _status_cells(report: StatusReport) -> tuple[Text, RenderableType, RenderableType]:
    state = Text(report.state)
    seconds = time.time() - report.time
    if seconds > SLOW_SECONDS and report.state != DONE:
        state.append(f"  {clock(seconds)}", "dim")  # shows how long a slow state lasts
    detail = "  ".join(f"{name} {plain(value)}" for name, value in report.detail.items())
    last: RenderableType = Text(detail, "dim")
    if report.progress is not None and report.progress < 1:
        bar = ProgressBar(total=1.0, completed=report.progress, width=20)
        last = _row(bar, f"{report.progress:4.0%}")

    return state, Text(report.waiting_for or "", "magenta"), last


def plain(value: float | str) -> str:
    """Format a status detail: ``13.0`` -> ``13``."""
    return f"{value:g}" if isinstance(value, float) else str(value)
