"""Commands of prime-rl that a test starts and looks at while they run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import warm
from waiting import LIMIT

CLI = [sys.executable, "-c", "from prime_rl_app.cli import main; main()"]

Start = Callable[..., "subprocess.Popen[str]"]


@contextmanager
def started_commands(model_cache: Path) -> Iterator[Start]:
    """Starts ``prime-rl`` with some arguments. What still runs at the end gets a Ctrl-C."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: object) -> subprocess.Popen[str]:
        process = warm.Popen(
            [*CLI, *map(str, arguments)],
            env=os.environ | {"PRIME_RL_CACHE": str(model_cache)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.communicate(timeout=LIMIT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
