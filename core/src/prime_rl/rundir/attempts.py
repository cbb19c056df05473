"""The attempts of a run: whose process this one is, and whether it may still write.

Every process of a run, and what it starts, carries ``PRIME_RL_PROCESS`` in its environment. By it
the supervisor finds what an attempt has left behind, also in other sessions; and a process of an
earlier attempt that was taken for dead finds that it must not write any more: ``logs/latest``,
which each attempt replaces before it changes anything else, names a later one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from prime_rl.errors import RunError

PROCESS = "PRIME_RL_PROCESS"
"""Environment variable: ``ATTEMPT:NAME:RUN_DIR``."""


def newest_attempt(run_dir: Path) -> int:
    """The attempt that may write. Raises ``OSError`` or ``ValueError`` without one."""
    return int(os.readlink(run_dir / "logs" / "latest").removeprefix("attempt_"))


def identity(environ: Mapping[str, str]) -> tuple[int, str, Path] | None:
    """Attempt, name and run directory of a process by its environment; None: it is of no run."""
    attempt, _, rest = environ.get(PROCESS, "").partition(":")
    name, _, run_dir = rest.partition(":")
    return (int(attempt), name, Path(run_dir)) if attempt.isdecimal() and run_dir else None


def check_current() -> None:
    """Raise ``RunError`` in a process of an attempt that another one has replaced: a process that
    was stopped and wakes up later must not write. Called before each lasting write. Engines serve
    several attempts."""
    mine = identity(os.environ)
    if mine is None or mine[1].startswith("inference"):
        return
    with suppress(OSError, ValueError):
        if (newest := newest_attempt(mine[2])) > mine[0]:
            raise RunError(
                f"{mine[1]} is of attempt {mine[0]}, and attempt {newest} of {mine[2]} has begun: "
                "this process writes nothing more"
            )
