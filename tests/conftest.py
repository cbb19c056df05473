"""What whole runs leave, or must not leave, behind."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def processes_of() -> Callable[[Path], list[int]]:
    """Processes whose command line names this run."""
    return find_processes


def find_processes(run_dir: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if str(run_dir) in (entry / "cmdline").read_text() and entry.name != str(os.getpid()):
                found.append(int(entry.name))
        except (OSError, ValueError):
            continue
    return found
