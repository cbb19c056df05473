"""CPU seconds of the commands that should answer at once, and of a run of two steps.

    python -m bench start

User and system time of the process and of those that it started, the median of several calls. The
run includes evaluation and plot; its model comes from the cache.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.records import record

ROOT = Path(__file__).resolve().parents[1]
REPEATS = 5
RUN = ("run", str(ROOT / "configs/reverse_text/grpo.toml"), "--max-steps", "2")
COMMANDS: dict[str, tuple[str, ...]] = {
    "help": ("--help",),
    "run_help": ("run", "--help"),
    "list": ("plugins", "list"),
    "list_verbose": ("plugins", "list", "--verbose"),
    "completion": (),
    "run": RUN,
}
COMPLETION = {
    "_PRIME_RL_COMPLETE": "complete_bash",
    "COMP_WORDS": "prime-rl plugins ",
    "COMP_CWORD": "2",
}
"""What bash sets when Tab is pressed after ``prime-rl plugins``."""


def measured(words: tuple[str, ...], folder: str) -> float:
    """CPU seconds of one call. Raises ``CalledProcessError`` if it fails."""
    env = os.environ | {"COLUMNS": "100"} | ({} if words else COMPLETION)
    command = [str(Path(sys.executable).with_name("prime-rl")), *words]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=folder, env=env, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        for name, words in COMMANDS.items():
            measured(words, folder)  # files come from the disk, a model is made
            found = [measured(words, folder) for _ in range(REPEATS)]
            record(f"start.{name}.median", statistics.median(found), "CPU s")
            record(f"start.{name}.min", min(found), "CPU s")
            record(f"start.{name}.max", max(found), "CPU s")
            figures = f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"
            print(f"{name:14}{figures}", flush=True)

    return 0


if __name__ == "__main__":
    sys.exit(main())
