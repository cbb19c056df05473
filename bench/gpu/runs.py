"""Whole runs, as a user with one GPU starts them: engine and trainer take turns on it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.gpu.device import Figures, need, on_gpu
from prime_rl.rundir.rows import read_rows

ROOT = Path(__file__).resolve().parents[2]
FULL = "configs/reverse_text/grpo.toml"
LORA = "configs/reverse_text/grpo_lora.toml"
REWARD = "train/agg/all/reward/mean"
SMALL = ("--orchestrator.batch_size", "32")
"""Steps of a second or two."""


def first_run() -> Figures:
    """Twenty steps of the first run: it takes the GPU, shares it in turns, and its reward rises.
    Without a GPU: two steps."""
    steps = 20 if on_gpu() else 2
    more = () if on_gpu() else SMALL
    run = prime_rl("first", *more, configs=[FULL], steps=steps)
    figures = summary(run, steps)
    log = (run / "logs" / "latest" / "trainer.log").read_text("utf-8", errors="replace")
    config = json.loads((run / "configs" / "run.json").read_text("utf-8"))
    figures["on_cuda"] = " on cuda" in log
    figures["colocated"] = config["deployment"]["colocated"]
    if on_gpu():
        need(figures["on_cuda"], "a trainer on the GPU", figures)
        need(figures["colocated"], "engine and trainer in turns", figures)
        need(figures["last_reward"] > figures["first_reward"], "a rising reward", figures)
    return figures


def on_policy() -> Figures:
    """Three steps on samples of the weights that train: what is left of ``mismatch_kl`` is
    arithmetic (engine in float32, trainer in bfloat16), not age."""
    run = prime_rl(
        "on_policy", "--orchestrator.max_off_policy_steps", "0", *SMALL, configs=[FULL], steps=3
    )
    figures = summary(run, 3)
    most = 1e-3 if on_gpu() else 1e-6
    need(figures["mismatch_kl"] < most, f"mismatch_kl < {most:g}", figures)
    return figures


def resume() -> Figures:
    """Four steps with a checkpoint, then two more from it."""
    settings = ("--ckpt.interval", "2", *SMALL)
    prime_rl("resume", *settings, configs=[FULL], steps=4)
    resumed = prime_rl("resume", *settings, "--resume", configs=[FULL], steps=6)
    return summary(resumed, 6)


def lora() -> Figures:
    """Four steps with an adapter."""
    return summary(prime_rl("lora", *SMALL, configs=[LORA], steps=4), 4)


def prime_rl(name: str, *more: str, configs: Sequence[str | Path], steps: int) -> Path:
    """A run in the stage's folder; its directory. What it says goes to the stage's log. Raises
    ``AssertionError`` if it fails."""
    command = [sys.executable, "-m", "prime_rl", "run", *(str(ROOT / each) for each in configs)]
    command += ["--max-steps", str(steps), "--run.name", name, *more]
    done = subprocess.run(command, stderr=subprocess.STDOUT)
    need(done.returncode == 0, "prime-rl run to succeed", {"exit_code": done.returncode})
    return Path("outputs") / name


def summary(run: Path, steps: int) -> Figures:
    """Figures of a run, from its files. Rewards are means of the first and the last third of its
    steps."""
    sampled = read_rows(run / "metrics.jsonl")
    trained = read_rows(run / "trainer.jsonl")
    last = trained[-1]
    need(last["step"] == steps, f"{steps} steps", {"step": last["step"]})
    rewards = [each[REWARD] for each in sampled if REWARD in each]
    need(len(rewards) == steps, f"{steps} rewards", {"rewards": len(rewards)})
    third = max(steps // 3, 1)
    metrics = last["metrics"]
    return {
        "first_reward": sum(rewards[:third]) / third,
        "last_reward": sum(rewards[-third:]) / third,
        "mismatch_kl": metrics["mismatch_kl/all/mean"],
        "step_s": metrics["time/step"],
        "offload_s": metrics.get("time/offload", 0.0),
        "peak_gib": metrics["perf/peak_memory"],
    }
