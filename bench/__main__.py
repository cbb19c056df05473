"""``make bench``: every bench, one after the other, each in a separate process.

    python -m bench [--record] [engine] [wire] [packer] [rollout] [train_step] [memory] [publish]
                    [update] [page] [step] [plan] [env_workers] [many] [overlap] [tail] [growth]
                    [flat] [start] [real_model] [roofline] [layouts] [rounding] [gpu]
                    [ARGUMENT ...]

The first word that names no bench begins the arguments of those that are named: ``python -m bench
publish --large``, ``python -m bench step short even``. ``--record`` before the names writes the
figures into ``docs/benchmarks.json``. ``gpu`` runs only if it is named.

Figures are medians of several runs, as CPU seconds or ratios: wall-clock times vary on a shared
machine. ``memory`` and ``step`` also measure TRL if it is installed (``pip install
-r requirements-bench.txt``). ``page`` measures wall-clock time in Chromium if there is one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

from bench.records import WRITES

BENCHES = (
    *("engine", "wire", "packer", "rollout", "train_step", "memory", "publish", "update"),
    *("page", "step", "plan", "env_workers", "many", "overlap", "tail", "growth", "flat"),
    "start",
    *("real_model", "roofline", "layouts", "rounding", "gpu"),
)
ROOT = Path(__file__).resolve().parents[1]


def main(arguments: list[str]) -> int:
    """Run the named benches, or all. What follows the names goes to them. Returns the number that
    failed."""
    records = arguments[:1] == ["--record"]
    arguments = arguments[records:]
    names = list(takewhile(BENCHES.__contains__, arguments))
    passed_on = arguments[len(names) :]
    if passed_on and not names:
        print(f"no bench {passed_on[0]!r}; available: {', '.join(BENCHES)}", file=sys.stderr)
        return 2

    env = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    failed = 0
    for name in names or BENCHES[:-1]:
        print(f"\n== {name}", flush=True)
        if records:
            env[WRITES] = " ".join(["python -m bench", name, *passed_on])
        command = [sys.executable, "-m", f"bench.{name}", *passed_on]
        ended = subprocess.run(command, cwd=ROOT, env=env)
        failed += ended.returncode != 0

    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
