"""What a run came to: ``summary.json``, and the learning curve as a PNG."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prime_rl.config.run import RunConfig
from prime_rl.orchestrator.evals import EvalResult

REWARD = "train/agg/all/reward/mean"
WINDOW = 10
"""Steps averaged for "first" and "last" in the summary; in a short run, half of them at most."""


def write_summary(
    run_dir: Path,
    config: RunConfig,
    results: Mapping[str, Sequence[EvalResult]],
    stopped_at: int | None = None,
) -> None:
    """Write ``summary.json`` and ``learning_curve.png`` into the run directory. ``stopped_at``: the
    last step of a run that the user stopped."""
    rewards = read_curve(run_dir / "metrics.jsonl", REWARD)
    values = [value for _, value in rewards]
    window = min(WINDOW, (len(values) + 1) // 2)
    summary = {
        "steps": len(values),
        "stopped_at": stopped_at,
        "sampled_reward": {
            "first": _mean(values[:window]),
            "last": _mean(values[-window:]),
            "window": window,
        },
        "plugins": read_versions(run_dir),
        "eval": {when: [result.as_dict() for result in listed] for when, listed in results.items()},
        "plot": "learning_curve.png",
    }
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=2))
    title = run_dir.name if stopped_at is None else f"{run_dir.name} (stopped at {stopped_at})"
    plot_curve(run_dir / "learning_curve.png", rewards, results, title=title)


def read_versions(run_dir: Path) -> dict[str, str]:
    """Versions of the distributions whose plugins ran, by name; ``plugins.json`` says more."""
    path = run_dir / "plugins.json"
    rows = json.loads(path.read_text())["plugins"] if path.exists() else []
    return {row["distribution"]: row["version"] for row in rows}


def read_curve(path: Path, name: str) -> list[tuple[int, float]]:
    """``(step, value)`` of every line of ``metrics.jsonl`` that has this metric."""
    if not path.exists():
        return []
    rows = (json.loads(line) for line in path.read_text().splitlines())
    return [(row["step"], row[name]) for row in rows if row.get(name) is not None]


def plot_curve(
    path: Path,
    rewards: Sequence[tuple[int, float]],
    results: Mapping[str, Sequence[EvalResult]],
    title: str,
) -> None:
    """Sampled reward over steps, its running mean, and the held-out evaluations."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120, layout="constrained")
    steps, values = [s for s, _ in rewards], [v for _, v in rewards]
    axes.plot(steps, values, color="#9db4d8", linewidth=1, label="sampled reward (each step)")
    axes.plot(steps, _running_mean(values), color="#1f4e9c", linewidth=2, label="running mean")
    _mark_evals(axes, results)
    axes.set(xlabel="step", ylabel="reward", title=title)
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path)
    pyplot.close(figure)


def _mark_evals(axes: Any, results: Mapping[str, Sequence[EvalResult]]) -> None:
    by_env: dict[str, list[tuple[int, float]]] = {}
    for listed in results.values():
        for result in listed:
            by_env.setdefault(result.env, []).append((result.policy_version, result.reward))
    for env, points in sorted(by_env.items()):
        axes.plot(
            *zip(*points, strict=True),
            "o--",
            color="#d9822b",
            markersize=6,
            linewidth=1,
            label=f"held out: {env}",
        )


def _running_mean(values: Sequence[float], window: int = WINDOW) -> list[float]:
    return [_mean(values[max(0, i + 1 - window) : i + 1]) or 0.0 for i in range(len(values))]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
