"""The attempts of a run: whose process this one is, whether it may still write, and its end.

Every process of a run, and what it starts, carries ``PRIME_RL_PROCESS`` in its environment. By it
the supervisor finds the processes that an attempt has left behind, also in other sessions. (The
orchestrator hides its environment and is found by its command line.) A process of an earlier
attempt may have been taken for dead by mistake. It stops writing when ``logs/latest`` names a later
attempt: each attempt replaces this link before it changes anything else.

``python -m prime_rl.rundir.attempts RUN_DIR`` is the guard: if the supervisor is killed, the kernel
sends SIGTERM to its children, and the guard kills what is left.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from prime_rl.errors import RunError

if TYPE_CHECKING:
    import psutil

GRACE_SECONDS = 15.0
"""Between the supervisor's death and SIGKILL."""
PROCESS = "PRIME_RL_PROCESS"
"""Environment variable: ``ATTEMPT:NAME:RUN_DIR``."""
ORCHESTRATOR = "prime_rl.orchestrator"
"""Its module, before the run directory the end of its command line."""


def newest_attempt(run_dir: Path) -> int:
    """The attempt that may write. Raises ``OSError`` or ``ValueError`` without one."""
    return int(os.readlink(run_dir / "logs" / "latest").removeprefix("attempt_"))


def identity(environ: Mapping[str, str]) -> tuple[int, str, Path] | None:
    """Attempt, name and run directory of a process by its environment; None: it is of no run."""
    attempt, _, rest = environ.get(PROCESS, "").partition(":")
    name, _, run_dir = rest.partition(":")
    return (int(attempt), name, Path(run_dir)) if attempt.isdecimal() and run_dir else None


def check_current() -> None:
    """Before each lasting write: raise ``RunError`` in a process of an attempt that another one has
    replaced, which was stopped and wakes up late. Engines serve several attempts."""
    process = identity(os.environ)
    if process is None:
        return

    attempt, name, run_dir = process
    if name.startswith("inference"):
        return

    with suppress(OSError, ValueError):
        newest = newest_attempt(run_dir)
        if newest > attempt:
            raise RunError(
                f"{name} is of attempt {attempt}, and attempt {newest} of {run_dir} has begun: it "
                "writes nothing more"
            )


def kill_left(run_dir: Path, kept: Collection[str] = ()) -> None:
    """Kill all processes of a run on this machine, those of earlier supervisors too, except those
    with the names ``kept``; returns when they are gone."""
    import psutil

    killed = []
    wanted = run_dir.resolve()

    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            is_left = process.pid != os.getpid() and _is_of(process, wanted, kept)
            if is_left:
                process.kill()
                killed.append(process)

    psutil.wait_procs(killed, timeout=GRACE_SECONDS)


def _is_of(process: psutil.Process, run_dir: Path, kept: Collection[str]) -> bool:
    """Whether a process belongs to the run, and its name is not among ``kept``. Raises
    ``psutil.Error``."""
    import psutil

    if process.cmdline()[-2:] == [ORCHESTRATOR, str(run_dir)]:
        return "orchestrator" not in kept

    try:
        run_of_process = identity(process.environ())
    except psutil.AccessDenied:  # another user's, or hidden
        return False
    if run_of_process is None:
        return False
    return run_of_process[2] == run_dir and run_of_process[1] not in kept


if __name__ == "__main__":
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.5)
    time.sleep(GRACE_SECONDS)
    kill_left(Path(sys.argv[1]))
