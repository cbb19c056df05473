"""A real run with replies of 4 to 400 tokens: the lead by measured durations, or one of a batch.

    python -m bench.real_tail [--steps 36] [--seeds 1 2 3]

tiny-chat without a warm-up, whose replies end anywhere, on the embedded engine with two trainer
ranks. Three envs cut the replies at 4, 40 and 400 tokens, in the ratio 6 : 3 : 1; the reward is the
share of a letter. The rules take turns, so that both meet the same load of the machine:

    one_ahead    a fixed lead of one batch: what a run did before it measured durations
    lead         the orchestrator's own

Each row has seconds per step without the first third, what they were spent on, the mean age, the
reward by thirds, and the CPU seconds of all processes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from prime_rl.rundir.rows import read_rows

ENVS = {"short": (6, 4), "medium": (3, 40), "long": (1, 400)}
"""Ratio, and most tokens of a reply."""

REWARD = """
def letter(reply):
    return reply.count("e") / max(len(reply), 1)
"""

ONE_AHEAD = """
import sys

if any("prime_rl.orchestrator" in each for each in sys.orig_argv):
    import importlib.util

    class Finder:
        def find_spec(self, name, path, target=None):
            if name != "prime_rl.orchestrator.admission.admission":
                return None
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            execute = spec.loader.exec_module

            def with_one_ahead(module):
                execute(module)
                init = module.Admission.__init__
                module.Admission.__init__ = lambda self, **options: init(
                    self, **{**options, "lead": 1.0}
                )

            spec.loader.exec_module = with_one_ahead
            return spec

    sys.meta_path.insert(0, Finder())
"""
"""As ``sitecustomize``, it gives the orchestrator's ``Admission`` a fixed lead. No key does."""


def config(folder: Path, steps: int) -> str:
    envs = [
        f"""
[[orchestrator.train.env]]
id = "function"
name = "{name}"
ratio = {ratio}
args = {{ data = "{folder / "rows.jsonl"}", reward = "tail_reward.letter" }}
sampling = {{ max_completion_tokens = {tokens} }}
"""
        for name, (ratio, tokens) in ENVS.items()
    ]
    return f"""
max_steps = {steps}
seq_len = 512

[model]
name = "tiny-chat"
warmup_exact = 0.0

[orchestrator]
batch_size = 32
group_size = 4

[orchestrator.renderer]
name = "qwen3"
enable_thinking = false

[orchestrator.algo]
type = "rloo"
{"".join(envs)}
[trainer]
num_ranks = 2
micro_batch_tokens = 4096

[trainer.optim]
lr = 1e-3
weight_decay = 0.0
"""


def prepare(folder: Path, steps: int) -> None:
    """Everything that the runs read."""
    words = ["sun", "tree", "stone", "river", "cloud", "light", "field", "night"]
    rows = [{"prompt": f"{word} {number}"} for word in words for number in range(40)]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    (folder / "tail_reward.py").write_text(REWARD, "utf-8")
    (folder / "one_ahead").mkdir()
    (folder / "one_ahead" / "sitecustomize.py").write_text(ONE_AHEAD, "utf-8")
    (folder / "run.toml").write_text(config(folder, steps), "utf-8")


def run(folder: Path, rule: str, seed: int) -> dict[str, Any]:
    """One run's figures."""
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    if rule == "one_ahead":
        paths.insert(0, str(folder / "one_ahead"))
    out = folder / f"{rule}{seed}"
    command = [sys.executable, "-c", "from prime_rl_app.cli import main; main()", "run"]
    command += [str(folder / "run.toml"), "--seed", str(seed), "--output_dir", str(out)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    (metrics,) = out.glob("*/metrics.jsonl")
    return {"rule": rule, "seed": seed} | figures(metrics) | {"cpu": round(cpu, 1)}


def figures(path: Path) -> dict[str, Any]:
    steps: dict[int, dict[str, float]] = defaultdict(dict)
    for row in read_rows(path):
        steps[row["step"]] |= row
    rows = [steps[step] for step in sorted(steps)]
    third = len(rows) // 3
    late = rows[third:]
    return {
        "step": mean(late, "time/step"),
        **{cause: mean(late, f"pace/{cause}") for cause in ("training", "held", "starved")},
        "age": mean(late, "off_policy/mean"),
        "tokens": mean(late, "train/agg/all/num_output_tokens/mean"),
        "rewards": [
            mean(rows[start : start + third], "train/agg/all/reward/mean")
            for start in range(0, 3 * third, third)
        ],
    }


def mean(rows: Sequence[dict[str, float]], name: str) -> float:
    return round(fmean(row[name] for row in rows), 3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=36)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, asked.steps)
        for seed in asked.seeds:
            for rule in ("one_ahead", "lead"):
                print(json.dumps(run(folder, rule, seed)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
