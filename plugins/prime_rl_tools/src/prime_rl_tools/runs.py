"""Runs seen from another terminal: their state, their progress, and how to stop them."""

from __future__ import annotations

import difflib
import json
import os
import signal
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_rl.errors import ConfigError, RunError
from prime_rl.rundir.control import DONE, RUNNING, Supervisor, start_of
from prime_rl.rundir.directory import DRY
from prime_rl.rundir.status import StatusReport, read_status
from prime_rl_tools.view.summary import REWARD

DIED = "died"
"""State of a run whose supervisor ended without writing an outcome."""
DRY_RUN = "dry run"
UNKNOWN = "unknown"
"""State of a run without a supervisor's record."""

TAIL_BYTES = 1 << 18
"""How much of the end of ``metrics.jsonl`` is searched for the last batch."""
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class RunInfo:
    """One line of ``prime-rl runs``."""

    name: str
    path: str
    state: str
    step: int
    max_steps: int
    reward: float | None
    """Sampled reward of the last batch."""
    started: float
    """Seconds since the epoch."""
    updated: float
    """When a process of the run last wrote its status."""


def run_info(run_dir: Path) -> RunInfo:
    """State and progress of a run. Raises ``ConfigError`` if the folder holds no run."""
    config = run_dir / "configs" / "run.json"
    try:
        max_steps = int(json.loads(config.read_text())["max_steps"])
        started = config.stat().st_mtime
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{run_dir} is no run directory: {config}: {error}") from error
    row = last_batch(run_dir / "metrics.jsonl")
    return RunInfo(
        name=run_dir.name,
        path=str(run_dir),
        state=state_of(run_dir),
        step=row.get("step", 0),
        max_steps=max_steps,
        reward=row.get(REWARD),
        started=started,
        updated=max([started, *(path.stat().st_mtime for path in run_dir.glob("status/*.json"))]),
    )


def state_of(run_dir: Path) -> str:
    """The supervisor's last state, or one of the states above."""
    if (run_dir / DRY).exists():
        return DRY_RUN
    supervisor = Supervisor.read(run_dir)
    if supervisor is None:
        return DONE if (run_dir / "summary.json").exists() else UNKNOWN
    if supervisor.state != RUNNING or supervisor.is_alive:
        return supervisor.state
    # This machine cannot see the processes of another one.
    return DIED if supervisor.host == socket.gethostname() else UNKNOWN


def last_batch(path: Path) -> dict[str, Any]:
    """The last line of ``metrics.jsonl`` that describes a batch; empty if there is none near the
    end."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return {}
    for line in reversed(lines):
        with suppress(ValueError):  # cut off by the seek, or still being written
            row = json.loads(line)
            if isinstance(row, dict) and "progress/total_tokens" in row:
                return row
    return {}


def list_runs(output_dir: Path) -> list[RunInfo]:
    """Every run in a folder, the newest last. A run directory without a config is ignored."""
    found = []
    for path in output_dir.glob("*/configs/run.json"):
        with suppress(ConfigError):
            found.append(run_info(path.parent.parent))
    return sorted(found, key=lambda run: run.started)


def find_run(run: str, output_dir: Path) -> Path:
    """The directory of a run by its path or, in ``output_dir``, its name. Raises
    ``ConfigError``."""
    for path in (Path(run), output_dir / run):
        if (path / "configs" / "run.json").is_file():
            return path
    names = [path.parent.parent.name for path in output_dir.glob("*/configs/run.json")]
    close = difflib.get_close_matches(run, names, n=1)
    if close:
        way_out = f"Did you mean {close[0]!r}?"
    elif names:
        way_out = "`prime-rl runs` lists them."
    else:
        way_out = "There are no runs in there: --output-dir names another folder."
    raise ConfigError(f"no run {run!r}: it is no run directory, nor one in {output_dir}. {way_out}")


def processes(run_dir: Path) -> dict[str, StatusReport]:
    """The last status of each process of a run, by name, in start order."""
    names = [path.stem for path in run_dir.glob("status/*.json")]
    order = ("model", "inference", "trainer", "orchestrator")
    known = [name for name in order if name in names]
    others = sorted(set(names) - {*order, "supervisor"})
    reports = {name: read_status(run_dir / "status" / f"{name}.json") for name in known + others}
    return {name: report for name, report in reports.items() if report is not None}


def stop(run_dir: Path, timeout: float) -> bool:
    """Ask a run's supervisor to save and stop (a second request stops at once), and wait until all
    processes of the run have ended. False: the run is not running. Raises ``RunError`` if it runs
    on another machine, belongs to another user, or does not end in time."""
    supervisor = Supervisor.read(run_dir)
    if supervisor is None or supervisor.state != RUNNING:
        return False
    if supervisor.host != socket.gethostname():
        raise RunError(f"the run is on another machine, {supervisor.host!r}: stop it there")
    if not supervisor.is_alive:
        return False
    pids = [supervisor.pid, *(report.pid for report in processes(run_dir).values())]
    started = {pid: start for pid in pids if pid and (start := start_of(pid)) is not None}
    try:
        os.kill(supervisor.pid, signal.SIGTERM)
    except PermissionError as error:
        raise RunError(f"process {supervisor.pid} belongs to another user: {error}") from error
    deadline = time.monotonic() + timeout
    while left := [pid for pid, start in started.items() if start_of(pid) == start]:
        if time.monotonic() > deadline:
            raise RunError(
                f"processes {', '.join(map(str, left))} have not ended within {timeout:.0f} s. "
                f"Look into {run_dir / 'logs' / 'latest'}, wait longer with --timeout, or end the "
                "run at once, unsaved, with another `prime-rl stop`."
            )
        time.sleep(POLL_SECONDS)
    return True
