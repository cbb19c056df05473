"""An algorithm that reads the weights that its run began with, from ``prime-rl serve``."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import warm
from waiting import LIMIT, eventually

from prime_rl.run.children import free_ports
from prime_rl_tools.rollouts import read_rollouts

ROOT = Path(__file__).resolve().parents[1]
CLI = [sys.executable, "-c", "from prime_rl.cli import main; main()"]
MODEL = ("--model.warmup_exact", "0.3")
PLUGIN = """
import numpy as np
from prime_rl import Algorithm, hookimpl

class Anchored(Algorithm):
    name = "anchored"
    needs_initial = True

    async def setup(self, host):
        self.initial = host.initial

    @hookimpl
    async def score_rollout(self, rollout):
        (sample,) = rollout.samples
        first = await self.initial.logprobs(sample.token_ids, group_id=rollout.group_id)
        gap = np.abs(first - sample.inference_logprobs)[sample.loss_mask]
        rollout.metrics["moved"] = float(gap.max())

    @hookimpl
    def score_group(self, group):
        mean = np.mean([rollout.reward for rollout in group])
        for rollout in group:
            rollout.assign_advantages(rollout.reward - mean)

@hookimpl
def register_algorithms():
    return [Anchored]
"""

pytestmark = pytest.mark.slow


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=LIMIT) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def test_the_policy_leaves_the_weights_that_it_began_with(
    tmp_path: Path, model_cache: Path
) -> None:
    """At version 0 both have the same logprobs; later they do not."""
    site = tmp_path / "plugin"
    info = site / "anchored-0.1.dist-info"
    info.mkdir(parents=True)
    (site / "anchored.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: anchored\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[prime_rl]\nanchored = anchored\n")
    env = os.environ | {"PRIME_RL_CACHE": str(model_cache), "PYTHONPATH": str(site)}
    (port,) = free_ports(1)
    served = [*CLI, "serve", "tiny-reverse", *MODEL, "--port", str(port)]
    initial = warm.Popen(
        served, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        eventually(lambda: answers(port), initial)
        run = warm.Popen(
            [
                *(*CLI, "run", str(ROOT / "configs/reverse_text/grpo.toml"), "--max_steps", "3"),
                *("--output_dir", str(tmp_path), "--run.name", "anchored", *MODEL),
                *("--orchestrator.algo.type", "anchored", "--trainer.scheduler.warmup_steps", "0"),
                *("--orchestrator.initial.name", "tiny-reverse"),
                *("--orchestrator.initial.base_url", f'["http://127.0.0.1:{port}/v1"]'),
                *("--orchestrator.batch_size", "32", "--orchestrator.max_off_policy_steps", "0"),
                *("--orchestrator.eval.env", "[]", "--orchestrator.post_batch_filters", "[]"),
            ],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            output = run.communicate(timeout=LIMIT)[0]
        finally:
            run.kill()
    finally:
        initial.terminate()
        initial.communicate()
    assert run.returncode == 0, output
    paths = sorted((tmp_path / "anchored" / "rollouts").glob("step_*.msgpack"))
    moved = [max(r.metrics["moved"] for r in read_rollouts(path)[1]) for path in paths]
    assert len(moved) == 3 and moved[0] < 1e-4
    assert all(each > 1e-3 for each in moved[1:])
