"""Where benches write their figures: ``docs/benchmarks.json``, from which the README and
``docs/benchmarks.md`` take theirs (``python -m tools.docs``).

    python -m bench --record step short even

Without ``--record`` a bench prints its figures and writes nothing. A figure replaces the earlier
one of its name.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NotRequired, TypedDict

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "docs" / "benchmarks.json"
WRITES = "PRIME_RL_BENCH_RECORD"
"""The environment variable with the command that is recorded. Absent: nothing is written."""

LOAD = os.getloadavg()[0]

LIBRARIES = ("torch", "transformers", "triton", "liger-kernel", "verifiers", "trl")


class Conditions(TypedDict):
    """What a figure depends on. ``commit``, ``cpu``, ``versions``: "not recorded" for figures that
    are older than this file."""

    date: str
    commit: str
    cpu: str
    versions: str
    command: str
    gpu: NotRequired[str]
    """Absent: measured on a CPU."""


class Figure(Conditions):
    """One measured number."""

    name: str
    value: float
    unit: str


def read(path: Path = RECORDS) -> dict[str, Figure]:
    """Every figure by name. Raises ``ValueError`` if two have the same name."""
    figures: list[Figure] = json.loads(path.read_text("utf-8"))
    by_name = {figure["name"]: figure for figure in figures}
    if len(by_name) != len(figures):
        raise ValueError(f"{path}: a figure has two records; remove one")
    return by_name


def record(name: str, value: float, unit: str, path: Path | None = None) -> None:
    """Write a figure, if this bench is to record them."""
    command = os.environ.get(WRITES)
    if command is None:
        return
    path = path or RECORDS
    figures = read(path) if path.exists() else {}
    figures[name] = {
        "name": name,
        "value": float(f"{value:.6g}"),
        "unit": unit,
        **conditions(command),
    }
    write(figures, path)


def conditions(command: str) -> Conditions:
    """Of a figure that ``command`` measures here and today."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": _commit(),
        "cpu": _cpu(),
        "versions": _versions(),
        "command": command,
    }


def write(figures: dict[str, Figure], path: Path = RECORDS) -> None:
    """One line per figure, by name, so that a change is seen as one."""
    lines = [json.dumps(figures[name], ensure_ascii=False) for name in sorted(figures)]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n", "utf-8")


def _commit() -> str:
    """The commit, with ``+`` for code that differs from it."""
    commit = _git("describe", "--always", "--exclude=*")
    changed = _git("status", "--porcelain", "--", ".", ":!docs")
    return commit + "+" * bool(changed) or "not recorded"


def _git(*words: str) -> str:
    """What git prints; empty if it fails."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _cpu() -> str:
    """Model and number of the cores that this process may use, and the load average at its
    start."""
    model = platform.processor() or "unknown CPU"
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text("utf-8").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break

    return f"{model}, {len(os.sched_getaffinity(0))} cores, load {LOAD:.0f}"


def _versions() -> str:
    """Python and the libraries that decide the figures."""
    versions = [f"Python {platform.python_version()}"]
    for name in LIBRARIES:
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue

    return ", ".join(versions)
