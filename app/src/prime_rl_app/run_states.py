"""Runs seen from another terminal: their state, their progress, and how to stop them."""

from __future__ import annotations

import difflib
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from prime_rl.errors import ConfigError, PrimeRLError, RunError
from prime_rl.plugins.status import SUPERVISOR, StatusReport, read_status
from prime_rl.rundir.control import RUNNING, Supervisor, start_of
from prime_rl.rundir.directory import DRY
from prime_rl.rundir.rows import last_lines, parse_row_of, read_table
from prime_rl.rundir.status import DONE
from prime_rl_app.files import reading

REWARD = "train/agg/all/reward/mean"
"""The metric with the mean reward of a batch's rollouts."""

DIED = "died"
"""State of a run whose supervisor ended without writing an outcome."""
DRY_RUN = "dry run"
UNKNOWN = "unknown"
"""State of a run without a supervisor's record."""

LATEST = "latest"
"""Instead of a run's name: the newest run."""

TAIL_BYTES = 1 << 18
"""How much of the end of ``metrics.jsonl`` is searched first for the last batch: more if it is not
there, because a line of a run with hundreds of envs is as long, and many may follow it."""
FULL_MIB = 16.0
"""A disk with less free space is full: processes may have failed without being able to say so."""

POLL_SECONDS = 0.1
NOTEBOOK_SECONDS = 20.0
"""A supervisor that still lives this long after its run belongs to a notebook, and is left
running."""


@dataclass(frozen=True, kw_only=True)
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
    """State and progress of a run. Raises ``ConfigError`` if the folder holds no run, ``RunError``
    if one of its files is damaged."""
    config = run_dir / "configs" / "run.json"
    try:
        max_steps = read_table(config, _Config).max_steps
        started = config.stat().st_mtime
    except (OSError, RunError) as error:
        raise ConfigError(f"{run_dir} is no run directory: {error}") from error

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


class _Config(msgspec.Struct):
    max_steps: Annotated[int, msgspec.Meta(gt=0, le=10**12)]


class _Batch(msgspec.Struct):
    """The fields that are read of a line of ``metrics.jsonl``."""

    step: int = 0
    reward: float | None = msgspec.field(name=REWARD, default=None)


def state_of(run_dir: Path) -> str:
    """The supervisor's last state, or one of the states above. Raises ``RunError`` if its record is
    damaged."""
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
    """The last line of ``metrics.jsonl`` that describes a batch; empty if there is none.
    Raises ``RunError`` if it or a line after it is damaged."""
    if not path.exists():
        return {}
    with reading(path):
        num_bytes = TAIL_BYTES
        while True:
            for line in reversed(last_lines(path, num_bytes)):
                if line.strip():
                    row = parse_row_of(path, line, _Batch)
                    if "progress/total_tokens" in row:
                        return row

            if num_bytes >= path.stat().st_size:
                return {}
            num_bytes *= 4


def list_runs(
    output_dir: Path, damaged: Callable[[PrimeRLError], None] = lambda error: None
) -> list[RunInfo]:
    """Every run in a folder, the newest last, without those that only a dry run has used.
    ``damaged`` is called with the error of each run that cannot be read."""
    runs = []
    for path in output_dir.glob("*/configs/run.json"):
        try:
            if not (path.parent.parent / DRY).exists():
                runs.append(run_info(path.parent.parent))
        except PrimeRLError as error:
            damaged(error)
    return sorted(runs, key=lambda run: run.started)


def find_run(run: str, output_dir: Path) -> Path:
    """The directory of a run by its path or, in ``output_dir``, its name; ``latest``: the newest
    that is no dry run. Raises ``ConfigError``."""
    if run == LATEST:
        started = [each for each in list_runs(output_dir) if each.state != DRY_RUN]
        if not started:
            raise ConfigError(f"latest: there is no run in {output_dir}")
        return Path(started[-1].path)

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


def full_disk(run_dir: Path) -> str:
    """What is wrong with a run's disk and what to do, if it is full; else empty."""
    free = shutil.disk_usage(run_dir).free / 2**20
    if free >= FULL_MIB:
        return ""
    return f"{free:.1f} MiB are free. Free space; `prime-rl run --resume` continues"


def failures(run_dir: Path) -> list[str]:
    """What ended a failed run: each process that says it, and its error."""
    if state_of(run_dir) not in ("failed", DIED):
        return []
    errors = {name: report.detail.get("error") for name, report in processes(run_dir).items()}
    return [f"{name}: {error}" for name, error in errors.items() if error]


def processes(run_dir: Path) -> dict[str, StatusReport]:
    """The last status of each process of a run, by name, in start order. The state of one that
    cannot be read says so."""
    names = [path.stem for path in run_dir.glob("status/*.json")]
    order = ("model", "inference", "trainer", "orchestrator")
    known = [name for name in order if name in names]
    others = sorted(set(names) - {*order, SUPERVISOR})
    paths = {name: run_dir / "status" / f"{name}.json" for name in known + others}
    return {
        name: read_status(path) or StatusReport(f"{path} cannot be read")
        for name, path in paths.items()
    }


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
    ended = None
    while left := [pid for pid, start in started.items() if start_of(pid) == start]:
        if left == [supervisor.pid] and _has_ended(run_dir):
            ended = ended or time.monotonic()
            if time.monotonic() > ended + NOTEBOOK_SECONDS:
                break

        if time.monotonic() > deadline:
            raise RunError(
                f"processes {', '.join(map(str, left))} have not ended within {timeout:.0f} s. "
                f"Look into {run_dir / 'logs' / 'latest'}, wait longer with --timeout, or end the "
                "run at once, unsaved, with another `prime-rl stop`."
            )

        time.sleep(POLL_SECONDS)

    return True


def _has_ended(run_dir: Path) -> bool:
    """Whether the supervisor wrote an outcome. A Python process that called ``prime_rl.train``
    lives on."""
    try:
        supervisor = Supervisor.read(run_dir)
    except RunError:  # a shared disk refuses now and then: the next look sees it
        return False
    return supervisor is not None and supervisor.state != RUNNING
