"""``make bench``: every bench, one after the other, each in a separate process.

    python -m bench [engine] [wire] [packer] [rollout] [train_step] [memory] [publish] [update]
                    [page] [step] [plan] [env_workers] [many] [overlap] [tail] [growth]
                    [flat] [real_model]

Figures are medians of several runs, as CPU seconds or ratios: wall-clock times vary on a shared
machine. ``memory`` and ``step`` also measure TRL if it is installed (``pip install
-r requirements-bench.txt``). ``page`` measures wall-clock time in Chromium if there is one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

BENCHES = (
    *("engine", "wire", "packer", "rollout", "train_step", "memory", "publish", "update"),
    *("page", "step", "plan", "env_workers", "many", "overlap", "tail", "growth", "flat"),
    "real_model",
)
ROOT = Path(__file__).resolve().parents[1]


def main(names: list[str]) -> int:
    """Run the named benches, or all. Returns the number that failed."""
    unknown = sorted(set(names) - set(BENCHES))
    if unknown:
        print(f"no bench {unknown[0]!r}; available: {', '.join(BENCHES)}", file=sys.stderr)
        return 2
    env = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    failed = 0
    for name in names or BENCHES:
        print(f"\n== {name}", flush=True)
        failed += (
            subprocess.run([sys.executable, "-m", f"bench.{name}"], cwd=ROOT, env=env).returncode
            != 0
        )
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
