"""A run whose processes are killed and stopped at random, beside one that is left alone.

    python -m bench.faults --faults 30 --seed 0

One ``prime-rl run`` with two trainer ranks and two engines at staleness 0. Each fault waits until a
file of a step appears, picks a process (the orchestrator, the trainer's agent, a rank, an engine)
and sends it SIGKILL or SIGSTOP. The run has to end by itself, with the frames of every step and the
weights of the other run, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from prime_rl_app.saved_rollouts import read_step
from prime_rl_tools.view.summary import read_restarts

ROOT = Path(__file__).resolve().parents[1]
STEPS_PER_FAULT = 2
LIMIT = 600.0
"""Seconds within which each condition comes true, on a busy machine too."""
STEP_LIMIT = 60.0
"""Seconds that a step may take beyond that, restarts included."""

COMMAND = [sys.executable, "-c", "from prime_rl_app.cli import main; main()", "run"]
CONFIG = [
    *(str(ROOT / "configs" / "reverse_text" / "grpo.toml"), "--model.warmup_exact", "0.15"),
    *("--orchestrator.batch_size", "8", "--orchestrator.group_size", "4"),
    *("--orchestrator.eval.env", "[]", "--trainer.optim.lr", "2e-3"),
    *("--trainer.scheduler.type", "constant", "--trainer.scheduler.warmup_steps", "0"),
    *("--orchestrator.max_off_policy_steps", "0", "--inference.embedded.num_slots", "1"),
    *("--inference.replicas", "2", "--trainer.num_ranks", "2", "--ckpt.interval", "3"),
    *("--recovery.stopped_timeout", "1", "--recovery.max_restarts", "10", "--view.type", "lines"),
]
KINDS = {
    "orchestrator": "prime_rl.orchestrator",
    "agent": "prime_rl_app.agent",
    "rank": "prime_rl.trainer",
    "engine": "prime_rl_embedded",
}
"""Of processes that faults hit, by the module that they run."""
MOMENTS = ("trainer.jsonl", "broadcasts", "rollouts", "checkpoint", "start")


@dataclass(frozen=True)
class Fault:
    """What happens to which process, when."""

    kind: str
    number: int
    """Among the processes of its kind."""
    signal: signal.Signals
    moment: str
    step: int


def schedule(seed: int, number: int, steps: int) -> list[Fault]:
    """Faults at random moments, in order of the steps."""
    chance = random.Random(seed)
    at = sorted(chance.randrange(1, steps - 1) for _ in range(number))
    signals = (signal.SIGKILL, signal.SIGSTOP)
    return [
        Fault(
            chance.choice([*KINDS]),
            n,
            signal=chance.choice(signals),
            moment=chance.choice(MOMENTS),
            step=step,
        )
        for n, step in enumerate(at)
    ]


def start(folder: Path, name: str, steps: int, popen: Callable[..., Any]) -> Any:
    """Start a run; its output goes to a file."""
    words = ["--max_steps", str(steps), "--output_dir", str(folder), "--run.name", name]
    with (folder / f"{name}.log").open("w", encoding="utf-8") as log:
        return popen([*COMMAND, *CONFIG, *words], stdout=log, stderr=subprocess.STDOUT)


def happens(run_dir: Path, fault: Fault) -> bool:
    """Whether the moment of a fault has come."""
    step = fault.step
    if fault.moment == "start":  # of the newest attempt
        return (run_dir / "logs" / "latest" / "trainer.log").exists()
    if fault.moment == "checkpoint":
        due = -(-step // 3) * 3
        names = f".step_{due}/orchestrator/progress.json", f"step_{due}/STABLE"
        return any((run_dir / "checkpoints" / name).exists() for name in names)
    if fault.moment == "broadcasts":
        return any((run_dir / f"broadcasts/step_{n}/STABLE").exists() for n in (step, step + 1))
    if fault.moment == "rollouts":
        return (run_dir / "rollouts" / f"step_{step}.msgpack").exists()
    path = run_dir / "trainer.jsonl"
    return path.exists() and path.read_bytes().count(b"\n") >= step


def targets(supervisor: int, kind: str) -> list[psutil.Process]:
    """Running processes of a kind, in order of their start."""
    processes = []
    for process in psutil.Process(supervisor).children(recursive=True):
        with suppress(psutil.Error):
            word = next((word for word in process.cmdline() if word.startswith("prime_rl")), "")
            named = word == KINDS[kind] or (kind == "engine" and word.startswith(KINDS[kind]))
            if named and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED):
                processes.append(process)
    return sorted(processes, key=lambda process: process.create_time())


def disturb(run: Any, run_dir: Path, faults: list[Fault]) -> int:
    """Let the faults happen; the number of signals sent."""
    sent = 0
    for fault in faults:
        victims: list[psutil.Process] = []
        deadline = time.monotonic() + LIMIT
        while not (happens(run_dir, fault) and (victims := targets(run.pid, fault.kind))):
            if run.poll() is not None:
                return sent
            assert time.monotonic() < deadline, fault
            time.sleep(0.02)
        with suppress(psutil.Error):
            victims[fault.number % len(victims)].send_signal(fault.signal)
            print(fault, flush=True)
            sent += 1
    return sent


def result(run_dir: Path, steps: int) -> tuple[list[Any], bytes]:
    """Digests of the frames of each step and rank, and the exported weights."""
    frames = [
        read_step(run_dir / "rollouts" / f"step_{step}.msgpack").frames
        for step in range(1, steps + 1)
    ]
    return frames, (run_dir / "weights" / "model.safetensors").read_bytes()


def storm(folder: Path, number: int, seed: int, popen: Callable[..., Any]) -> dict[str, Any]:
    """Both runs, and what they show. Raises ``AssertionError`` if they differ."""
    steps = max(6, number * STEPS_PER_FAULT)
    began = time.monotonic()
    calm = start(folder, "calm", steps=steps, popen=popen)
    limit = LIMIT + STEP_LIMIT * steps
    assert calm.wait(limit) == 0, (folder / "calm.log").read_text("utf-8")
    took = time.monotonic() - began
    run = start(folder, "storm", steps=steps, popen=popen)
    try:
        sent = disturb(run, folder / "storm", schedule(seed, number, steps))
        assert run.wait(limit) == 0, (folder / "storm.log").read_text("utf-8")
    finally:
        run.kill()
    (frames, weights), (expected, others) = (
        result(folder / name, steps) for name in ("storm", "calm")
    )
    differ = [n for n, (a, b) in enumerate(zip(frames, expected, strict=True), 1) if a != b]
    assert not differ, f"steps {differ} have other frames"
    assert weights == others
    return {
        "faults": sent,
        "restarts": [each["cause"] for each in read_restarts(folder / "storm")],
        "steps": steps,
        "calm_seconds": took,
        "storm_seconds": time.monotonic() - began - took,
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        print(
            json.dumps(
                storm(Path(folder), asked.faults, seed=asked.seed, popen=subprocess.Popen), indent=2
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
