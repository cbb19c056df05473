"""Sampling and training at the same time: seconds of a step beside those of its longer half.

    python -m bench overlap [--sampling 1.0] [--training 0.5 1.0 2.0] [--tail SHARE SECONDS]
                            [--inflight 64]

The real orchestrator against the stub engine of ``bench/many.py``, which answers every request
after the same time. A batch is as large as the number in flight, so one takes as long as a reply.
The trainer takes a batch, waits, and announces the version. Ideal is ``max(sampling, training)``.
``--tail 0.05 6``: 5 % of the replies take 6 s.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from bench.many import orchestrating, serving, train
from bench.records import record

STEPS = 14
FIRST = 4
"""The steps before it warm up."""
BATCH = 64


def measure(url: str, folder: Path, training: float, inflight: int, steps: int) -> float:
    """Median seconds of a step; with a tail, the mean."""
    ends = []
    values = {"steps": steps, "batch": BATCH, "inflight": inflight, "workers": 0}
    with orchestrating(url, folder, **values) as (run_dir, process):
        for step in range(1, steps + 1):
            train(run_dir, step, orchestrator=process, seconds=training)
            ends.append(time.monotonic())

    if steps > STEPS:
        return (ends[-1] - ends[STEPS]) / (steps - 1 - STEPS)
    return statistics.median(b - a for a, b in zip(ends[FIRST:], ends[FIRST + 1 :], strict=False))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sampling", type=float, default=1.0)
    parser.add_argument("--training", type=float, nargs="+", default=[0.5, 1.0, 2.0])
    parser.add_argument("--tail", type=float, nargs=2, default=[0.0, 0.0])
    parser.add_argument("--inflight", type=int, default=BATCH)
    asked = parser.parse_args()
    steps = 3 * STEPS if asked.tail[0] else STEPS
    with serving(asked.sampling, tuple(asked.tail)) as url, tempfile.TemporaryDirectory() as folder:
        for number, training in enumerate(asked.training):
            run_dir = Path(folder) / str(number)
            step = measure(url, run_dir, training, inflight=asked.inflight, steps=steps)
            longer = max(asked.sampling, training)
            if asked.tail[0] == 0.0 and asked.sampling == 1.0:
                record(f"overlap.{training}.step", step, "s")
                record(f"overlap.{training}.over", step / max(1.0, training), "x")
            figures = {"sampling": asked.sampling, "training": training, "step": round(step, 3)}
            print(json.dumps(figures | {"over_the_longer": round(step / longer, 3)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
