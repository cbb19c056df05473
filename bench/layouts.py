"""What ``prime-rl plan`` says of the recipes in several layouts: minutes of a step, GiB of a rank,
and of a row of Qwen3-0.6B. Nothing runs on a GPU.

    python -m bench layouts [RECIPE ...]

The figures in ``docs/recipes.md`` and in the recipes' comments are these, by record
(``python -m bench --record layouts``). A test plans one layout anew and compares.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.records import record

ROOT = Path(__file__).resolve().parents[1]
APART = ["--deployment.colocated=false", "--weight_broadcast.type=filesystem"]
TURNS = ["--deployment.colocated=true", "--weight_broadcast.type=filesystem"]
TURNS += ["--inference.replicas=2", "--trainer.num_ranks=2"]


def divided(replicas: int, ranks: int, *more: str) -> list[str]:
    """Overrides: so many engines, so many ranks, each GPU of one of them."""
    return [*APART, f"--inference.replicas={replicas}", f"--trainer.num_ranks={ranks}", *more]


LAYOUTS: dict[str, tuple[str, dict[str, list[str]]]] = {
    "qwen3_8b_32k": (
        "8xH100-80",
        {
            "turns": [],
            "6_and_2": divided(6, 2, "--trainer.optim.type=adamw_offload"),
            "5_and_3": divided(5, 3),
            "4_and_4": divided(4, 4),
        },
    ),
    "tool_agent": ("2xH100-80", {"turns": TURNS, "1_and_1": []}),
    "qwen3_30b_a3b": (
        "2x8xH100-80",
        {
            "gathered": ["--trainer.expert_parallel=false"],
            "own": ["--trainer.expert_parallel=true"],
        },
    ),
    "qwen3_30b_a3b_32k": (
        "4x8xH100-80",
        {
            "gathered": ["--trainer.expert_parallel=false"],
            "machine": ["--trainer.expert_parallel=8"],
            "both": ["--trainer.expert_parallel=true"],
        },
    ),
}
"""Machines and overrides of each layout, by recipe."""


def plan(recipe: str, name: str) -> dict[str, Any]:
    """Of a recipe in one of its ``LAYOUTS``, as ``prime-rl plan --json`` prints it."""
    gpus, layouts = LAYOUTS[recipe]
    config = str(ROOT / f"configs/recipes/{recipe}.toml")
    command = [sys.executable, "-m", "prime_rl", "plan", config, "--gpus", gpus, "--json"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, *layouts[name]], cwd=ROOT, env=env, capture_output=True, text=True
    )
    if not done.stdout:
        raise RuntimeError(f"{recipe}, {name}: {done.stderr[-1000:]}")
    planned: dict[str, Any] = json.loads(done.stdout)
    return planned


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each layout, and record it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="*", choices=[[], *LAYOUTS], help="default: all")
    for recipe in parser.parse_args(arguments).recipes or LAYOUTS:
        for name in LAYOUTS[recipe][1]:
            planned = plan(recipe, name)
            minutes = planned["seconds"]["step"] / 60
            memory = planned["trainer"]["total"] / 2**30
            fits = "fits" if planned["fits"] else "does not fit"
            parts = ", ".join(f"{key} {each:.1f} s" for key, each in planned["seconds"].items())
            print(f"{recipe}, {name}: {memory:.1f} GiB of a rank, {fits}; {parts}", flush=True)
            record(f"layouts.{recipe}.{name}.step", minutes, "min")
            record(f"layouts.{recipe}.{name}.train", planned["seconds"]["train"] / 60, "min")
            record(f"layouts.{recipe}.{name}.memory", memory, "GiB")
            network = planned["seconds"].get("network", 0.0)
            record(f"layouts.{recipe}.{name}.network", network / 60, "min")
    return 0


if __name__ == "__main__":
    sys.exit(main())
