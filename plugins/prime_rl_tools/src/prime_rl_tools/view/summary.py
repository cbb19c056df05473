"""The results of a run: ``summary.json``, and the learning curve as a PNG."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypedDict

import msgspec

from prime_rl.errors import RunError
from prime_rl.rundir.rows import Step, each_row, metrics_of, read_rows, read_table
from prime_rl_tools.view.outcomes import REWARD as REWARD
from prime_rl_tools.view.outcomes import mean_outcomes, read_batches

LOG = "recoveries.jsonl"
WINDOW = 10
"""Steps averaged for "first" and "last" in the summary; in a short run, half of them at most."""
PLOT = "learning_curve.png"
LOSS = "loss/mean"

COLORS = ("#d9822b", "#2a9562", "#a655ad", "#c0445c", "#8a6d3b")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
"""Of the held-out envs: no two that have a name in the legend share both."""
MOST_NAMED = 8
"""Held-out envs with a name in the legend: more would cover the curves."""

Results = Mapping[str, Sequence[Mapping[str, Any]]]
"""Evaluations by when they were made: ``before``, ``during`` or ``after`` training."""


def summarize(run_dir: Path, max_steps: int, stopped_at: int | None = None) -> dict[str, Any]:
    """What ``summary.json`` holds, from the other files of a run. ``stopped_at``: the last step of
    a run that the user stopped."""
    values = [value for _, value in read_curve(run_dir / "metrics.jsonl", REWARD)]
    window = min(WINDOW, (len(values) + 1) // 2)
    shares = mean_outcomes(read_batches(run_dir / "metrics.jsonl"))
    versions = run_dir / "plugins.json"
    loaded = _Loaded()
    with suppress(OSError, RunError):  # otherwise the summary is without them
        loaded = read_table(versions, _Loaded)

    ours = {
        name: version for name, version in loaded.packages.items() if name.startswith("prime-rl")
    }
    return {
        "steps": len(values),
        "stopped_at": stopped_at,
        "sampled_reward": {
            "first": _mean(values[:window]),
            "last": _mean(values[-window:]),
            "window": window,
            **({"outcomes": shares} if shares else {}),
        },
        "plugins": ours | {row["distribution"]: row["version"] for row in loaded.plugins},
        "eval": read_evals(run_dir, max_steps if stopped_at is None else stopped_at),
        "restarts": read_restarts(run_dir),
        "plot": PLOT,
    }


class _Loaded(msgspec.Struct):
    packages: dict[str, str] = {}
    plugins: list[_Distribution] = []


class _Distribution(TypedDict):
    distribution: str
    version: str


def read_restarts(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of ``recoveries.jsonl``: what made the run go back to a checkpoint."""
    return read_rows(run_dir / LOG, _Restart)


class _Restart(TypedDict):
    cause: str
    lost_seconds: float


def restarts_text(restarts: Sequence[Mapping[str, Any]]) -> str:
    """How often, how much was repeated, and the last cause."""
    lost = sum(each["lost_seconds"] for each in restarts)
    return f"{len(restarts)}, {lost:.0f} s of work repeated; last: {restarts[-1]['cause']}"


def write_summary(run_dir: Path, summary: Mapping[str, Any]) -> None:
    """Write ``summary.json`` and the learning curve. Raises ``OSError``."""
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=2), "utf-8")
    stopped_at = summary["stopped_at"]
    title = run_dir.name if stopped_at is None else f"{run_dir.name} (stopped at {stopped_at})"
    metrics = run_dir / "metrics.jsonl"
    _plot_curve(
        run_dir / PLOT,
        rewards=read_curve(metrics, REWARD),
        losses=read_curve(metrics, LOSS),
        results=summary["eval"],
        title=title,
    )


def read_evals(run_dir: Path, last: int) -> dict[str, list[dict[str, Any]]]:
    """The lines of ``evals.jsonl``, by when they were measured. ``last``: the last step of the run.
    Evaluations after the training of an earlier attempt count as evaluations during the run."""
    evals: dict[str, list[dict[str, Any]]] = {"before": [], "during": [], "after": []}
    for result in read_rows(run_dir / "evals.jsonl", _Eval):
        step = result.pop("step")
        when = result.pop("when")
        evals["during" if when == "after" and step < last else when].append(result)
    return evals


class _Eval(TypedDict):
    """The part of a line that is printed."""

    step: Step
    when: Literal["before", "during", "after"]
    env: str
    reward: float
    num_rollouts: int
    num_failed: int


def read_curve(path: Path, name: str) -> list[tuple[int, float]]:
    """``(step, value)`` of every line of ``metrics.jsonl`` that has this metric."""
    rows = map(metrics_of, each_row(path))
    return [(row["step"], row[name]) for row in rows if isinstance(row.get(name), int | float)]


def _plot_curve(
    path: Path,
    rewards: Sequence[tuple[int, float]],
    losses: Sequence[tuple[int, float]],
    results: Results,
    title: str,
) -> None:
    """Sampled reward over steps, its running mean, and the held-out evaluations. Of a run that has
    no rewards, such as one on demonstrations alone, the loss."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    held_out: dict[str, list[tuple[int, float]]] = {}
    for result in (result for listed in results.values() for result in listed):
        held_out.setdefault(result["env"], []).append((result["policy_version"], result["reward"]))
    has_rewards = bool(rewards or held_out)
    sampled = rewards if has_rewards else losses

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120, layout="constrained")
    if sampled:
        steps = [s for s, _ in sampled]
        values = [v for _, v in sampled]
        marker = "o" if len(sampled) == 1 else None  # one point makes no line
        name = "sampled reward" if has_rewards else "loss"
        each_step = {"color": "#9db4d8", "linewidth": 1, "label": f"{name} (each step)"}
        axes.plot(steps, values, marker=marker, **each_step)
        mean = {"color": "#1f4e9c", "linewidth": 2, "label": "running mean"}
        axes.plot(steps, running_mean(values), marker=marker, markersize=4, **mean)

    for place, (env, points) in enumerate(sorted(held_out.items())):
        versions, means = zip(*points, strict=True)
        style = {"markersize": 6, "linewidth": 1, "linestyle": "--"}
        if place < MOST_NAMED or len(held_out) == MOST_NAMED + 1:
            style |= {"color": COLORS[place % len(COLORS)], "marker": MARKERS[place % len(MARKERS)]}
            style |= {"label": f"held out: {env}", "zorder": 3}  # not covered by the others
        else:
            style |= {"color": "#b0b0b0", "marker": "."}
            if place == MOST_NAMED:
                style["label"] = f"held out: {len(held_out) - MOST_NAMED} others"
        axes.plot(versions, means, **style)

    axes.set(xlabel="step", ylabel="reward" if has_rewards else "loss", title=title)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.25)
    if axes.lines:
        place_of_legend = "lower right" if has_rewards else "upper right"
        legend = axes.legend(loc=place_of_legend, frameon=False)
        legend.set_in_layout(False)  # a long name would leave the curves no room
    figure.savefig(path)
    pyplot.close(figure)


def running_mean(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """The mean of each value and those before it, ``window`` in all."""
    return [_mean(values[max(0, i + 1 - window) : i + 1]) or 0.0 for i in range(len(values))]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
