"""False alarms of ``prime-rl doctor`` on undisturbed runs, and the figures of its thresholds.

    python -m bench.doctor outputs/healthy-0 outputs/healthy-1 ...
    python -m bench.doctor --record FILE.json.gz outputs/healthy-0 ...
    python -m bench.doctor --record-sick FILE.json.gz outputs/high-rate outputs/noise ...

Each run is cut into segments of 1/1, 1/2, 1/3 ... 1/6 of its steps. ``--record`` writes what the
checks read of the runs, for the test: the metrics of all, and the rollouts of the first.
``--record-sick`` writes them by the names of the runs, with the rollouts of the first and of the
last window.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from prime_rl.rundir.rows import read_rows
from prime_rl_tools.doctor import History, diagnose
from prime_rl_tools.doctor.history import MAX_FILES, REWARD, is_held_out
from prime_rl_tools.doctor.measures import most_common_reply, teaching_share

PARTS = range(1, 7)
METRICS = (
    *("optim/lr", "optim/grad_norm", "optim/skipped", "entropy/all/mean", "mismatch_kl/all/mean"),
    *("is_masked", "off_policy/mean", "batch/agg/seen", "batch/reverse-text/seen"),
    *("batch/reverse-text/trainable", REWARD, "train/agg/all/reward/max"),
    *("train/reverse-text/all/reward/mean", "train/reverse-text/all/num_output_tokens/mean"),
    *("train/reverse-text/all/num_output_tokens/max", "train/reverse-text/all/is_truncated/mean"),
    *("dispatcher/cancelled/reverse-text", "time/step", "time/trainer/step"),
    *("wait/trainer/orchestrator", "wait/orchestrator/trainer", "wait/orchestrator/trainer_room"),
    *("train/reverse-text/all/has_error/mean", "loss/mean"),
)


def segments(num_steps: int) -> Iterator[tuple[int, int]]:
    """First and last step of each."""
    for parts in PARTS:
        size = num_steps // parts
        yield from ((1 + size * i, size * (i + 1)) for i in range(parts))


def figures(run: History) -> dict[str, float]:
    """What the thresholds bound, as far as it is one number."""

    def mean(name: str, steps: list[int]) -> float:
        return float(run.values(name, steps).mean())

    length = "train/reverse-text/all/num_output_tokens/mean"
    entropy = "entropy/all/mean"
    width = len(run.late)
    windows = [run.steps[i : i + width] for i in range(len(run.steps) - 2 * width + 1)]
    return {
        "entropy late / early": mean(entropy, run.late) / mean(entropy, run.early),
        "mismatch KL, median late": float(np.median(run.values("mismatch_kl/all/mean", run.late))),
        "length late / early": mean(length, run.late) / mean(length, run.early),
        "rollouts with credit": teaching_share(run, "reverse-text")[0],
        "is_masked late": mean("is_masked", run.late),
        "examples with one reply": most_common_reply(run.last_rollouts)[0],
        "reward late / best": mean(REWARD, run.late) / max(mean(REWARD, w) for w in windows),
        "trainer waits": float(
            run.values("wait/trainer/orchestrator", run.late).sum()
            / run.values("time/trainer/step", run.late).sum()
        ),
    }


def main() -> None:
    """Print the alarms, and the range of each figure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--record", type=Path)
    parser.add_argument("--record-sick", type=Path)
    parser.add_argument("runs", nargs="+", type=Path)
    arguments = parser.parse_args()
    if arguments.record:
        record(arguments.record, arguments.runs)
        return
    if arguments.record_sick:
        record_sick(arguments.record_sick, arguments.runs)
        return
    alarms = Counter[str]()
    count = 0
    timings: dict[str, list[float]] = {}
    for path in arguments.runs:
        for first, last in segments(len(History(path).steps)):
            run = History(path, first, last)
            count += 1
            for verdict in diagnose(run):
                alarms[verdict.name] += 1
                print(f"{path.name} {first} to {last}: {verdict.name}: {verdict.evidence}")
            for name, value in figures(run).items():
                timings.setdefault(name, []).append(value)
    print(f"{count} segments, {alarms.total()} alarms {dict(alarms)}")
    for name, values in timings.items():
        print(f"{name:26} {min(values):.3g} to {max(values):.3g}")


def record(path: Path, runs: list[Path]) -> None:
    """Write the fixture of the test of healthy runs."""
    histories = [History(run) for run in runs]
    columns = [
        columns_of(run, METRICS, history.steps)
        for run, history in zip(runs, histories, strict=True)
    ]
    first = histories[0]
    table = {
        "metrics": columns,
        "rollouts": [rollouts_of(first, step) for step in first.steps],
    }
    write(path, table)


def record_sick(path: Path, runs: list[Path]) -> None:
    """Write the fixture of the test of runs that went wrong."""
    table = {}
    for run in runs:
        history = History(run)
        names = {name.replace("reverse-text", env) for name in METRICS for env in history.envs}
        names |= {name for row in history.rows.values() for name in row if is_held_out(name)}
        steps = sorted(history.rows)
        recorded = {*history.early[-MAX_FILES:], *history.late[-MAX_FILES:]}
        table[run.name] = {
            "envs": history.envs,
            "train": history.config["orchestrator"]["train"],
            "steps": steps,
            "metrics": columns_of(run, sorted(names), steps),
            "rollouts": {step: rollouts_of(history, step) for step in sorted(recorded)},
        }
    write(path, table)


def write(path: Path, table: dict[str, Any]) -> None:
    text = json.dumps(table, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def columns_of(run: Path, names: Iterable[str], steps: list[int]) -> dict[str, list[float | None]]:
    """The values of each metric by step."""
    rows = rows_of(run)
    return {name: [_short(rows[step].get(name)) for step in steps] for name in names}


def rollouts_of(history: History, step: int) -> list[list[Any]]:
    """The rollouts of a step, as short rows."""
    return [
        [
            seen.rollout.example_id,
            seen.rollout.group_id,
            _short(seen.rollout.reward),
            seen.dropped_by,
            seen.rollout.policy_version,
            seen.teaches,
            np.frombuffer(seen.reply, np.int32).tolist(),
        ]
        for seen in history.read_step(step)
    ]


def rows_of(run: Path) -> dict[int, dict[str, float]]:
    """The metrics by step."""
    figures: dict[int, dict[str, float]] = {}
    for row in read_rows(run / "metrics.jsonl"):
        figures.setdefault(row["step"], {}).update(row)
    return figures


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


if __name__ == "__main__":
    main()
