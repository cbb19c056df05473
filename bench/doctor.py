"""False alarms of ``prime-rl doctor`` on undisturbed runs, and the figures of its thresholds.

    python -m bench.doctor outputs/healthy-0 outputs/healthy-1 ...
    python -m bench.doctor --record FILE.json.gz outputs/healthy-0 ...

Each run is cut into segments of 1/1, 1/2, 1/3 ... 1/6 of its steps. ``--record`` writes what the
checks read of the runs, for the test: the metrics of all, and the rollouts of the first.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from prime_rl_tools.doctor import History, diagnose
from prime_rl_tools.doctor.history import REWARD
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

    length, entropy = "train/reverse-text/all/num_output_tokens/mean", "entropy/all/mean"
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
    parser.add_argument("runs", nargs="+", type=Path)
    arguments = parser.parse_args()
    if arguments.record:
        record(arguments.record, arguments.runs)
        return
    alarms, count = Counter[str](), 0
    found: dict[str, list[float]] = {}
    for path in arguments.runs:
        for first, last in segments(len(History(path).steps)):
            run = History(path, first, last)
            count += 1
            for verdict in diagnose(run):
                alarms[verdict.name] += 1
                print(f"{path.name} {first} to {last}: {verdict.name}: {verdict.evidence}")
            for name, value in figures(run).items():
                found.setdefault(name, []).append(value)
    print(f"{count} segments, {alarms.total()} alarms {dict(alarms)}")
    for name, values in found.items():
        print(f"{name:26} {min(values):.3g} to {max(values):.3g}")


def record(path: Path, runs: list[Path]) -> None:
    """Write the fixture of the test."""
    histories = [History(run) for run in runs]
    rows = [rows_of(run) for run in runs]
    table = {
        "metrics": [
            {n: [_short(row[step].get(n)) for step in h.steps] for n in METRICS}
            for h, row in zip(histories, rows, strict=True)
        ],
        "rollouts": [
            [
                [
                    *(seen.rollout.example_id, seen.rollout.group_id),
                    *(_short(seen.rollout.reward), seen.dropped_by, seen.rollout.policy_version),
                    *(seen.teaches, np.frombuffer(seen.reply, np.int32).tolist()),
                ]
                for seen in histories[0]._read([step])
            ]
            for step in histories[0].steps
        ],
    }
    path.write_bytes(gzip.compress(json.dumps(table, separators=(",", ":")).encode(), mtime=0))


def rows_of(run: Path) -> dict[int, dict[str, float]]:
    """The metrics by step."""
    found: dict[int, dict[str, float]] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        found.setdefault(row["step"], {}).update(row)
    return found


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


if __name__ == "__main__":
    main()
