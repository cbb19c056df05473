"""A race on the screen and as a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from statistics import fmean, stdev

from rich.console import Console
from rich.table import Table

from prime_rl_app.run_states import REWARD
from prime_rl_tools.race.compare import LEVEL, Pair, compare
from prime_rl_tools.race.schedule import Point
from prime_rl_tools.view.summary import read_curve, running_mean

Results = Mapping[str, Mapping[int, Point]]
"""The result of each seed, by the name of its config."""


def pairs_of(results: Results, against: str | None) -> list[Pair]:
    rewards = {name: {seed: p.reward for seed, p in by.items()} for name, by in results.items()}
    return compare(rewards, against)


def as_json(results: Results, against: str | None) -> str:
    points = {name: {s: asdict(p) for s, p in by.items()} for name, by in results.items()}
    pairs = [{**pair.as_json(), "verdict": pair.verdict} for pair in pairs_of(results, against)]
    return json.dumps({"results": points, "pairs": pairs}, indent=2)


def print_race(console: Console, results: Results, against: str | None) -> None:
    table = Table(box=None, header_style="bold")
    for name in ("config", "before", "after", "gain", "seeds", "steps", "tokens", "CPU s"):
        table.add_column(name, justify="left" if name == "config" else "right")
    for config, by_seed in sorted(results.items(), key=lambda item: -_mean_reward(item[1])):
        points = list(by_seed.values())
        before = [p.before for p in points if p.before is not None]
        gains = [p.reward - p.before for p in points if p.before is not None]
        table.add_row(
            config, f"{fmean(before):.3f}" if before else "",
            mean_and_error([p.reward for p in points]), mean_and_error(gains),
            str(len(points)),
            f"{fmean(p.step for p in points):.0f}", f"{fmean(p.tokens for p in points):,.0f}",
            f"{fmean(p.cpu_seconds for p in points):,.0f}",
        )  # fmt: skip

    console.print(table)
    console.print(
        "Held-out reward, before and after training: mean over the seeds ± standard error.\n",
        style="dim",
        highlight=False,
    )
    for pair in pairs_of(results, against):
        console.print(pair.verdict, highlight=False, style="bold" if pair.decided else None)
    console.print(
        f"All intervals hold together with probability {1 - LEVEL:.0%}, whenever you look: add "
        "seeds with a larger --seeds.",
        style="dim",
    )


def mean_and_error(values: Sequence[float]) -> str:
    """The mean and its standard error, if there are several; empty for none."""
    error = f" ± {stdev(values) / len(values) ** 0.5:.3f}" if len(values) > 1 else ""
    return f"{fmean(values):.3f}{error}" if values else ""


def _mean_reward(by_seed: Mapping[int, Point]) -> float:
    return fmean(point.reward for point in by_seed.values())


def draw_race(path: Path, folder: Path, results: Results, against: str | None) -> None:
    """The sampled reward of every run beside the intervals of every pair, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pairs = pairs_of(results, against)
    size = (11, max(4.0, 1.5 + 0.4 * len(pairs)))
    figure, (curves, forest) = pyplot.subplots(1, 2, figsize=size, dpi=120, layout="constrained")
    for number, (config, by_seed) in enumerate(results.items()):
        color = f"C{number}"
        for index, (seed, point) in enumerate(by_seed.items()):
            rows = read_curve(folder / f"{config}-seed{seed}" / "metrics.jsonl", REWARD)
            steps = [s for s, _ in rows]
            values = [v for _, v in rows]
            label = None if index else config
            curves.plot(steps, running_mean(values), color=color, linewidth=1, label=label)
            curves.plot([point.step], [point.reward], "o", color=color, markersize=5)

    curves.set(xlabel="step", ylabel="reward", title="sampled (line), held out (dot), each seed")
    curves.legend(loc="best", frameon=False)
    for row, pair in enumerate(pairs):
        color = "#1f7a3d" if pair.decided else "#777777"
        if isfinite(pair.high):
            forest.plot([pair.low, pair.high], [row, row], color=color, linewidth=2)
        forest.plot([pair.mean], [row], "o", color=color)

    forest.axvline(0.0, color="black", linewidth=0.8)
    forest.set_yticks(range(len(pairs)), [f"{pair.better} - {pair.other}" for pair in pairs])
    forest.set(xlabel="difference of held-out reward", title="intervals that hold at any time")
    forest.invert_yaxis()
    for axes in (curves, forest):
        axes.grid(alpha=0.25)
    figure.savefig(path)
    pyplot.close(figure)
