"""``make bench``: every bench, one after the other, each in a process of its own.

    python -m bench [engine] [wire] [packer] [rollout] [train_step] [memory] [publish] [update]
                    [step]

Figures are CPU seconds or ratios, as medians of several runs: wall-clock on a shared machine says
little. ``memory`` and ``step`` measure the peer where it is installed (``pip install
-r requirements-bench.txt``).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

BENCHES = (
    *("engine", "wire", "packer", "rollout", "train_step", "memory", "publish", "update"),
    "step",
)
ROOT = Path(__file__).resolve().parents[1]


def main(names: list[str]) -> int:
    """Run the named benches, or all; the number that failed."""
    unknown = sorted(set(names) - set(BENCHES))
    if unknown:
        print(f"no bench {unknown[0]!r}; there are {', '.join(BENCHES)}", file=sys.stderr)
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
