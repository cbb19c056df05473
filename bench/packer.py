"""CPU seconds to plan rows for 10 thousand and 1 million samples: log-normal lengths, mean about
1.2k, rows of 8,192.

python -m bench packer
"""

from __future__ import annotations

import time

import numpy as np

from bench.records import record
from prime_rl.orchestrator.packer import plan_rows

CAPACITY = 8192


def run() -> dict[str, dict[str, float]]:
    """CPU seconds and filled share of the rows, by number of samples."""
    figures = {}
    for count in (10_000, 1_000_000):
        drawn = np.random.default_rng(0).lognormal(6.8, 0.8, count)
        lengths = drawn.astype(int).clip(16, CAPACITY).tolist()
        start = time.process_time()
        rows = plan_rows(lengths, CAPACITY)
        seconds = time.process_time() - start
        filled = sum(lengths) / (len(rows) * CAPACITY)
        record(f"packer.{count}.cpu", seconds, "CPU s")
        record(f"packer.{count}.filled", filled, "share")
        figures[f"{count:,}"] = {"cpu": seconds, "filled": filled}
    return figures


def report(figures: dict[str, dict[str, float]]) -> list[str]:
    """Lines to print."""
    return [
        f"{count:>9} samples: {values['cpu']:.3f} CPU s, rows {values['filled']:.2%} full"
        for count, values in figures.items()
    ]


if __name__ == "__main__":
    print("\n".join(report(run())))
