"""``prime-rl`` in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import warm
from waiting import LIMIT


def prime_rl(*arguments: object, cwd: Path) -> "subprocess.CompletedProcess[str]":
    """Run it in the folder ``cwd``."""
    command = [
        sys.executable,
        "-c",
        "from prime_rl_app.cli import main; main()",
        *map(str, arguments),
    ]
    if "PYTHONPATH" in os.environ:  # a fork does not load the plugins that ``site`` installs
        return subprocess.run(command, cwd=cwd, timeout=LIMIT, capture_output=True, text=True)
    return warm.run(command, cwd=cwd, timeout=LIMIT)
