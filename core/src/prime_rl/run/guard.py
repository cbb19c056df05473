"""``python -m prime_rl.run.guard RUN_DIR``: the last process of a run whose supervisor was killed.

The kernel sends SIGTERM to the children of a dead supervisor. A process that is stopped, busy in a
loop or in a session of its own goes on: after ``GRACE_SECONDS`` the guard kills what is left.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import psutil

from prime_rl.rundir.attempts import identity

GRACE_SECONDS = 15.0
POLL_SECONDS = 0.5


def kill_left(run_dir: Path, kept: Collection[str] = ()) -> None:
    """Kill all processes of a run on this machine, those of earlier supervisors too, except those
    with the names ``kept``; returns when they are gone."""
    found, wanted = [], run_dir.resolve()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            its = None if process.pid == os.getpid() else identity(process.environ())
            if its is not None and its[2] == wanted and its[1] not in kept:
                process.kill()
                found.append(process)
    psutil.wait_procs(found, timeout=GRACE_SECONDS)


def main() -> None:
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    time.sleep(GRACE_SECONDS)
    kill_left(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
