"""Algorithms that read earlier weights of the policy, from an engine of the run: those that the run
began with, and the moving average."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import warm
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from waiting import LIMIT

from prime_rl import Rollout
from prime_rl.rundir.launch import Launch
from prime_rl_app.saved_rollouts import read_rollouts

ROOT = Path(__file__).resolve().parents[1]
CLI = [sys.executable, "-c", "from prime_rl_app.cli import main; main()"]
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
        rollout.assign_stream("ref_logprobs", first)
        gap = np.abs(first - sample.inference_logprobs)[sample.loss_mask]
        rollout.metrics["moved"] = float(gap.max())

    @hookimpl
    def score_group(self, group):
        mean = np.mean([rollout.reward for rollout in group])
        for rollout in group:
            rollout.assign_advantages(rollout.reward - mean)

class Averaged(Anchored):
    name = "averaged"
    needs_initial, needs_ema = False, True

    async def setup(self, host):
        self.initial = host.ema

@hookimpl
def register_algorithms():
    return [Anchored, Averaged]
"""

pytestmark = pytest.mark.slow


def run_it(tmp_path: Path, model_cache: Path, algorithm: str, *arguments: str) -> Path:
    """Train at staleness 0; the run directory."""
    site = tmp_path / "plugin"
    info = site / "anchored-0.1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (site / "anchored.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: anchored\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[prime_rl]\nanchored = anchored\n")
    env = os.environ | {"PRIME_RL_CACHE": str(model_cache), "PYTHONPATH": str(site)}
    run = warm.Popen(
        [
            *(*CLI, "run", str(ROOT / "configs/reverse_text/grpo.toml"), *arguments),
            *("--output_dir", str(tmp_path), "--run.name", "anchored", *MODEL),
            *("--orchestrator.algo.type", algorithm, "--trainer.scheduler.warmup_steps", "0"),
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
    assert run.returncode == 0, output
    return tmp_path / "anchored"


def rollouts_of(run_dir: Path) -> list[list[Rollout]]:
    """By step."""
    paths = sorted((run_dir / "rollouts").glob("step_*.msgpack"))
    return [read_rollouts(path)[1] for path in paths]


def assert_scored_by(model: Any, rollouts: Sequence[Rollout]) -> None:
    """Their reference's logprobs are those of a model of transformers."""
    for rollout in rollouts:
        (sample,) = rollout.samples
        ids = torch.from_numpy(np.asarray(sample.token_ids, np.int64))
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1].log_softmax(-1)
        expected = logits.gather(1, ids[1:, None])[:, 0].numpy()
        at = np.flatnonzero(sample.loss_mask)
        assert sample.ref_logprobs is not None
        np.testing.assert_allclose(sample.ref_logprobs[at], expected[at - 1], atol=1e-4)


def test_the_policy_leaves_the_weights_that_it_began_with(
    tmp_path: Path, model_cache: Path
) -> None:
    """The engine that the run starts has them: its logprobs are those of transformers. At version 0
    the policy has the same; later it does not."""
    run_dir = run_it(tmp_path, model_cache, "anchored", "--max_steps", "3")
    launch, steps = Launch.read(run_dir), rollouts_of(run_dir)
    assert len(launch.engine_urls) == 1
    assert launch.reference_urls.keys() == {"initial"}
    assert launch.reference_urls["initial"] not in ("", *launch.engine_urls)
    moved = [max(rollout.metrics["moved"] for rollout in rollouts) for rollouts in steps]
    assert len(moved) == 3 and moved[0] < 1e-4
    assert all(each > 1e-3 for each in moved[1:])
    model = AutoModelForCausalLM.from_pretrained(launch.model_path, dtype=torch.float32)
    assert_scored_by(model, steps[2][:4])


def test_the_average_follows_the_published_versions_and_a_resumed_run_continues_it(
    tmp_path: Path, model_cache: Path
) -> None:
    """Each batch is scored by the average of the versions up to its own, as transformers computes
    it with weights averaged here."""
    decay, keep = 0.6, ("--trainer.keep_broadcasts", "9", "--trainer.ema_decay", "0.6")
    run_dir = run_it(tmp_path, model_cache, "averaged", "--max_steps", "2", *keep)
    launch = Launch.read(run_dir)
    shutil.rmtree(run_dir / "averages")  # the checkpoint has all that a resumed run needs
    run_it(tmp_path, model_cache, "averaged", "--max_steps", "4", *keep, "--resume")
    model = AutoModelForCausalLM.from_pretrained(launch.model_path, dtype=torch.float32)
    average, weights = model.state_dict(), run_dir / "broadcasts"
    for version, rollouts in enumerate(rollouts_of(run_dir)):
        if version:
            new = load_file(weights / f"step_{version}" / "model.safetensors")
            for name, values in new.items():
                average[name].copy_(decay * average[name] + (1 - decay) * values)
        assert_scored_by(model, rollouts[:4])
        moved = max(rollout.metrics["moved"] for rollout in rollouts)
        assert moved > 1e-3 if version else moved < 1e-4
    assert version == 3


def test_a_reset_gives_the_engine_of_the_reference_the_policy_and_a_resumed_run_keeps_it(
    tmp_path: Path, model_cache: Path
) -> None:
    """With an interval of 2, batches 1 and 2 are scored by version 0, and 3 and 4 by version 2."""
    keys = ("--trainer.keep_broadcasts", "9", "--trainer.reference_reset.interval", "2")
    run_dir = run_it(tmp_path, model_cache, "anchored", "--max_steps", "3", *keys)
    launch = Launch.read(run_dir)
    assert (run_dir / "references" / "step_2" / "STABLE").exists()
    shutil.rmtree(run_dir / "references")  # the checkpoint has all that a resumed run needs
    run_it(tmp_path, model_cache, "anchored", "--max_steps", "4", *keys, "--resume")
    model = AutoModelForCausalLM.from_pretrained(launch.model_path, dtype=torch.float32)
    steps = rollouts_of(run_dir)
    for rollouts in steps[:2]:
        assert_scored_by(model, rollouts[:4])
    model.load_state_dict(
        load_file(run_dir / "broadcasts" / "step_2" / "model.safetensors"), strict=False
    )
    for rollouts in steps[2:]:
        assert_scored_by(model, rollouts[:4])
    moved = [max(rollout.metrics["moved"] for rollout in rollouts) for rollouts in steps]
    assert moved[0] < 1e-4 < 1e-3 < moved[1] and moved[2] < 1e-4 < 1e-3 < moved[3]
