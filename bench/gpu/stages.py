"""The stages in the order in which they run, each in a process and with a limit of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from bench.gpu.device import Figures, Skip

ROOT = Path(__file__).resolve().parents[2]
STAGES: dict[str, tuple[str, int]] = {
    "facts": ("facts", 60),
    "parity": ("agreement", 90),
    "kernels": ("agreement", 120),
    "trainer": ("trainer", 180),
    "first_run": ("runs", 90),
    "on_policy": ("runs", 60),
    "recipe": ("recipe", 300),
    "engine": ("serving", 180),
    "resume": ("runs", 80),
    "lora": ("runs", 60),
    "broadcast": ("serving", 60),
    "offload": ("trainer", 60),
    "compiled": ("trainer", 120),
}
"""Name: module of this package with the function of that name, limit in seconds. The most telling
come first."""
PATIENCE = 1 if shutil.which("nvidia-smi") else 4
"""Times the limit. CPUs are shared, and slower."""
LEAST = 10
"""Seconds. A stage with less time left does not start."""
RESULT = "RESULT "
"""Before the figures in the last line of a stage."""


@dataclass(frozen=True)
class Outcome:
    """Of one stage."""

    state: str
    """ok, skipped, FAILED, TIMEOUT or "no time"."""
    figures: Figures
    seconds: float

    @property
    def failed(self) -> bool:
        return self.state in ("FAILED", "TIMEOUT")


def run_here(name: str) -> None:
    """Run a stage in this process and print its figures. Does not return: threads of libraries may
    hang at the end of a process."""
    try:
        figures = getattr(import_module(f"bench.gpu.{STAGES[name][0]}"), name)()
    except Skip as why:
        figures = {"skipped": str(why)}
    print(RESULT + json.dumps(figures), flush=True)
    os._exit(0)


def run_apart(name: str, left: float, out: Path) -> Outcome:
    """Run a stage in a process of its own, for at most its limit and the seconds that are
    ``left``. Its log goes to ``out``; all its processes end with it."""
    limit = min(PATIENCE * STAGES[name][1], left)
    if limit < LEAST:
        return Outcome("no time", {}, 0.0)
    log = out / f"{name}.log"
    path = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    env = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(path),
    }
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix=f"gpu_{name}_") as folder, log.open("wb") as file:
        child = subprocess.Popen(
            [sys.executable, "-m", "bench.gpu", "--stage", name],
            cwd=folder,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )
        code: int | None = None
        with suppress(subprocess.TimeoutExpired):
            code = child.wait(limit)
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # a run's engine, a server
        child.wait()

    return read_log(log, code, limit=limit, seconds=time.perf_counter() - started)


def read_log(log: Path, code: int | None, limit: float, seconds: float) -> Outcome:
    """What a stage's log and exit code say. ``code`` None: it ran past its limit."""
    lines = log.read_text("utf-8", errors="replace").strip().splitlines()
    results = [line.removeprefix(RESULT) for line in lines if line.startswith(RESULT)]
    if code is None:
        return Outcome("TIMEOUT", {"limit_s": limit, "last": " ".join(lines[-1:])[-300:]}, seconds)
    if code or not results:
        return Outcome("FAILED", {"why": " ".join(lines[-2:])[-500:]}, seconds)
    figures = json.loads(results[-1])
    return Outcome("skipped" if "skipped" in figures else "ok", figures, seconds)
