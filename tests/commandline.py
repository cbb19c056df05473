"""``prime-rl`` in a process of its own."""

import subprocess
import sys
from pathlib import Path

import warm
from waiting import LIMIT


def prime_rl(
    *arguments: object, cwd: Path, fork: bool = True
) -> "subprocess.CompletedProcess[str]":
    """Run it in the folder ``cwd``. A fork has the commands that were installed before: for those
    that a test's ``site`` installs, start a process of its own."""
    command = [
        sys.executable,
        "-c",
        "from prime_rl_app.cli import main; main()",
        *map(str, arguments),
    ]
    if fork:
        return warm.run(command, cwd=cwd, timeout=LIMIT)
    return subprocess.run(command, cwd=cwd, timeout=LIMIT, capture_output=True, text=True)
