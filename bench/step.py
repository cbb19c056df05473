"""One RL step, end to end, compared with TRL's ``GRPOTrainer`` on the same model in the same run.

    python -m bench step          (python -m bench.step [short] [even] [long] [turns])

Four shapes: the first run's (128 rollouts of 7 tokens), 64 x (64 + 64) tokens, two of 2,048 tokens,
and 64 rollouts of four turns, which TRL is not measured on. ``full`` includes a verifiers
environment, the harness, rendering, scoring, wire and trainer. ``direct`` replaces verifiers by
plain requests to the engine. ``trl`` runs TRL with one thread and with two, by the interpreter
that ``PRIME_RL_BENCH_TRL`` names, else by this one.

CPU seconds are the sum of the orchestrator, engine and trainer processes; wall is the median time
between steps.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.records import record

HERE = Path(__file__).parent
PROCESSES = ("orchestrator", "inference", "trainer")
SKIP = 4
"""Steps before the measurement begins."""

MODEL = """
import sys, torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from prime_rl_environments.tiny.tokenizer import build_tokenizer
torch.manual_seed(0)
tokenizer = build_tokenizer()
config = Qwen3Config(vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=4096,
    tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=0)
Qwen3ForCausalLM(config).save_pretrained(sys.argv[1])
tokenizer.save_pretrained(sys.argv[1])
"""


@dataclass(frozen=True)
class Shape:
    """What one step samples."""

    label: str
    rollouts: int
    group: int
    prompt: int
    """Tokens."""
    new: int
    """Tokens of a reply, exactly."""
    turns: int = 1
    """More than one: ``reverse-retry``, which TRL has no counterpart of."""

    def table(self) -> str:
        """The TOML that ``step.toml`` is combined with."""
        letters = self.prompt - 6  # the chat template's tokens
        task = f'"letter-e"\nargs = {{ prompt_letters = {letters} }}'
        if self.turns > 1:
            task = f'"reverse-retry"\nargs = {{ tries = {self.turns} }}'
        length = max(64, (self.prompt + self.new) * self.turns + 8)
        return f"""
max_steps = {30 if self.rollouts * self.new * self.turns < 4000 else 14}
seq_len = {length if self.turns == 1 else 512}

[orchestrator]
batch_size = {self.rollouts}
group_size = {self.group}

[[orchestrator.train.env]]
id = {task}

[orchestrator.train.sampling]
max_completion_tokens = {self.new}
extra_body = {{ ignore_eos = true }}
"""


SHAPES = {
    "short": Shape("the first run's", 128, group=8, prompt=12, new=7),
    "even": Shape("64 x (64 + 64)", 64, group=8, prompt=64, new=64),
    "long": Shape("2 x (64 + 2,048)", 2, group=2, prompt=64, new=2048),
    "turns": Shape("64 x 4 turns of 12", 64, group=8, prompt=20, new=12, turns=4),
}


def run(shape: Shape, variants: Sequence[str]) -> dict[str, dict[str, float]]:
    """Median wall and CPU seconds per step, by variant."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        subprocess.run([sys.executable, "-c", MODEL, str(model)], check=True, capture_output=True)
        figures = {name: ours(model, Path(folder), variant=name, shape=shape) for name in variants}
        for threads in (1, 2) if shape.turns == 1 else ():
            if peer := trl(model, threads, shape):
                figures[f"trl, {threads} thread{'s' * (threads > 1)}"] = peer
    return figures


def ours(model: Path, folder: Path, variant: str, shape: Shape) -> dict[str, float]:
    """One run of ours. An environment variable tells ``bench.direct`` to use ``direct``."""
    paths = [str(HERE / "tasksets"), str(HERE.parent)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    if variant == "direct":
        env["PRIME_RL_BENCH_DIRECT"] = "1"
    (folder / "shape.toml").write_text(shape.table(), "utf-8")
    command = [sys.executable, "-m", "bench.direct", "run", str(HERE / "step.toml")]
    command += [str(folder / "shape.toml"), "--model.name", str(model)]
    command += ["--output_dir", str(folder), "--run.name", variant]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        marks = sample_steps(folder / variant, process)
        output = process.communicate()[0].decode()
    finally:
        process.terminate()  # if the bench is stopped, stop the run too
        process.wait()
    if process.returncode or len(marks) <= SKIP + 2:
        raise SystemExit(f"bench: {variant} failed:\n{output[-3000:]}")
    walls = [b[0] - a[0] for a, b in zip(marks[SKIP:], marks[SKIP + 1 :], strict=False)]
    cpu = {name: marks[-1][1][name] - marks[SKIP][1][name] for name in PROCESSES}
    steps = len(walls)
    return {
        "wall": statistics.median(walls),
        "cpu": sum(cpu.values()) / steps,
        **{name: seconds / steps for name, seconds in cpu.items()},
    }


def sample_steps(
    run_dir: Path, process: subprocess.Popen[bytes]
) -> list[tuple[float, dict[str, float]]]:
    """``(time, CPU seconds by process)`` at the end of each of the trainer's steps."""
    marks: list[tuple[float, dict[str, float]]] = []
    log = run_dir / "trainer.jsonl"
    seen = 0
    while process.poll() is None:
        lines = log.read_bytes().count(b"\n") if log.exists() else 0
        if lines > seen:
            seen = lines
            try:
                marks.append((time.perf_counter(), {n: cpu_seconds(run_dir, n) for n in PROCESSES}))
            except FileNotFoundError:  # a process has ended, so the run is over
                break
        time.sleep(0.005)
    return marks


def cpu_seconds(run_dir: Path, name: str) -> float:
    """User and system time of one process of a run, all threads (Linux)."""
    pid = json.loads((run_dir / "status" / f"{name}.json").read_text("utf-8"))["pid"]
    fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def trl(model: Path, threads: int, shape: Shape) -> dict[str, float] | None:
    """TRL's step. None if TRL is not installed."""
    python = os.environ.get("PRIME_RL_BENCH_TRL", sys.executable)
    numbers = (threads, shape.rollouts, shape.group, shape.prompt, shape.new)
    command = [python, str(HERE / "peer_trl.py"), str(model), *map(str, numbers)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        print(f"bench: TRL did not run: {result.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return None
    return {k: float(v) for k, v in json.loads(result.stdout.splitlines()[-1]).items()}


def report(figures: dict[str, dict[str, float]]) -> list[str]:
    """Lines to print: seconds per step, and ratios to TRL."""
    lines = [f"{'variant':<16}{'wall s':>8}{'CPU s':>8}   orchestrator / engine / trainer CPU s"]
    for variant, values in figures.items():
        parts = " / ".join(f"{values[name]:.3f}" for name in PROCESSES if name in values)
        lines.append(f"{variant:<16}{values['wall']:>8.3f}{values['cpu']:>8.3f}   {parts}")
    peers = {name: values for name, values in figures.items() if name.startswith("trl")}
    for variant in (name for name in figures if not name.startswith("trl")):
        for peer, values in peers.items():
            wall = values["wall"] / figures[variant]["wall"]
            cpu = figures[variant]["cpu"] / values["cpu"]
            lines.append(
                f"{variant}: {wall:.2f}x the speed of {peer}, at {cpu:.2f}x its CPU seconds"
            )
    return lines


def main(names: Sequence[str]) -> None:
    """Measure the named shapes, or all."""
    for name in names or SHAPES:
        shape = SHAPES[name]
        variants = ("full", "direct") if name == "even" else ("full",)
        print(f"\n{name}: {shape.label}")
        figures = run(shape, variants)
        print("\n".join(report(figures)), flush=True)
        for variant, values in figures.items():
            key = variant.replace(", 1 thread", "1").replace(", 2 threads", "2")
            for what, seconds in values.items():
                record(f"step.{name}.{key}.{what}", seconds, "s")


if __name__ == "__main__":
    main(sys.argv[1:])
