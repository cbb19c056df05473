"""The recipe of Qwen3-0.6B on one GPU, without the hub: the model's shape with random weights.

Random weights know no arithmetic, so the task is one that they can learn in a dozen steps: a reply
earns the share of its tokens whose ids lie in the lower half of the vocabulary, half at the start.
The sizes, the optimizer's other settings and the layout are the recipe's.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tomllib
from pathlib import Path

import tomli_w

from bench.gpu.device import Figures, need, on_gpu
from bench.gpu.runs import ROOT, prime_rl, summary
from bench.gpu.serving import write_random
from bench.gpu.trainer import PLAN_ERROR, SHAPES
from prime_rl.rundir.rows import read_rows

GIB = 2**30
RECIPE = ROOT / "configs" / "recipes" / "qwen3_0.6b_gsm8k.toml"
REWARDS = """
def lower_half(completion_ids):
    return sum(token < {half} for token in completion_ids) / max(len(completion_ids), 1)
"""


def recipe() -> Figures:
    """Some steps of the recipe: its reward rises; tokens/s; the trainer's peak memory, and that of
    ``prime-rl plan``."""
    steps = 9 if on_gpu() else 2
    config = write_config(Path.cwd())
    run = prime_rl("recipe", configs=[config], steps=steps)
    trained = [each["metrics"] for each in read_rows(run / "trainer.jsonl")]
    timed = trained[len(trained) // 3 :]
    figures = summary(run, steps) | {
        "step_s": statistics.median(each["time/step"] for each in timed),
        "rate_tokens_per_s": statistics.median(each["perf/throughput"] for each in timed),
        "peak_gib": max(each["perf/peak_memory"] for each in trained),
        "planned_gib": planned_peak(config),
    }
    if on_gpu():
        need(figures["last_reward"] > figures["first_reward"] + 0.02, "a rising reward", figures)
        ratio = figures["peak_gib"] / figures["planned_gib"]
        need(abs(ratio - 1) < PLAN_ERROR, f"a peak within {PLAN_ERROR:.0%} of plan's", figures)
    return figures


def write_config(folder: Path) -> Path:
    """Model, questions, reward and the recipe with these."""
    shape = "qwen3-0.6b" if on_gpu() else "tiny"
    model = write_random(folder / "model", shape)
    rewards = folder / "rewards.py"
    rewards.write_text(REWARDS.format(half=SHAPES[shape]["vocab_size"] // 2), "utf-8")
    rows = ({"prompt": f"Write anything, number {number}."} for number in range(1000))
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "questions.jsonl").write_text(lines, "utf-8")
    seq_len, batch_size, new, row, rate = (
        (512, 128, 128, 8192, 2e-4) if on_gpu() else (128, 32, 16, 512, 1e-3)
    )
    config = tomllib.loads(RECIPE.read_text("utf-8"))
    config["seq_len"] = seq_len
    config["model"]["name"] = str(model)
    config["inference"] = {"engine": "embedded"}
    orchestrator = config["orchestrator"]
    orchestrator["batch_size"] = batch_size
    orchestrator["train"]["sampling"]["max_completion_tokens"] = new
    env = {
        "id": "function",
        "args": {"data": "questions.jsonl", "reward": f"{rewards}:lower_half"},
    }
    orchestrator["train"]["env"] = [env]
    orchestrator["eval"]["env"] = [env | {"num_examples": 8}]
    config["trainer"]["micro_batch_tokens"] = row
    config["trainer"]["optim"]["lr"] = rate  # the recipe's is for pretrained weights
    path = folder / "recipe.toml"
    path.write_text(tomli_w.dumps(config), "utf-8")
    return path


def planned_peak(config: Path) -> float:
    """GiB of the trainer's tensors, as ``prime-rl plan`` foresees them: without what it reserves
    for CUDA."""
    command = [sys.executable, "-m", "prime_rl", "plan", str(config), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    need(done.returncode in (0, 1), "a plan", {"said": done.stderr[-300:]})
    trainer = json.loads(done.stdout)["trainer"]
    return float(trainer["total"] - trainer["parts"].get("reserve", 0.0)) / GIB
