"""A run whose algorithm, wrapper and loss log metrics, with two ranks, then a resume that repeats
two steps: every step reports the values of its own rollouts, once."""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import warm
from waiting import LIMIT

from prime_rl_app.saved_rollouts import read_step, step_files

ROOT = Path(__file__).resolve().parents[1]
CLI = [sys.executable, "-c", "from prime_rl_app.cli import main; main()"]
CONFIG = ROOT / "configs" / "reverse_text" / "grpo.toml"

SMALL = [
    *("--model.warmup_exact", "0.15", "--orchestrator.algo.type", "watched"),
    *("--orchestrator.batch_size", "8", "--orchestrator.group_size", "4"),
    *("--orchestrator.eval.env", "[]", "--orchestrator.post_batch_filters", "[]"),
    *("--orchestrator.max_off_policy_steps", "0", "--orchestrator.save_rollouts", "true"),
    *(
        "--trainer.loss.type",
        "pg",
        "--trainer.num_ranks",
        "2",
        "--trainer.micro_batch_tokens",
        "64",
    ),
    *("--trainer.scheduler.type", "constant", "--trainer.scheduler.warmup_steps", "0"),
    *("--max_steps", "4", "--ckpt.interval", "2", "--run.name", "run"),
    *("--monitors.tensorboard.folder", "tensorboard"),
]

ALGORITHM = """
from prime_rl import Algorithm, hookimpl, log_metric

class Watched(Algorithm):
    name = "watched"
    group_relative = True

    @hookimpl
    async def score_rollout(self, rollout):
        log_metric("reward", rollout.reward)

    @hookimpl
    def score_group(self, group):
        mean = sum(rollout.reward for rollout in group) / len(group)
        for rollout in group:
            rollout.assign_advantages(rollout.reward - mean + 0.5)

@hookimpl
def register_algorithms():
    return [Watched]

@hookimpl(wrapper=True)
def score_group(group):
    yield
    for rollout in group:
        log_metric("credit", rollout.advantages[0], weight=rollout.num_trainable_tokens)

@hookimpl
def step_finished(step, metrics):
    log_metric("finished", step)
"""
LOSS = """
from prime_rl import Loss, LossOutputs, hookimpl, log_metric

class PolicyGradient(Loss):
    name = "pg"

    def __call__(self, inputs):
        tokens = inputs.loss_mask.sum()
        log_metric("tokens", tokens)
        log_metric("credit", inputs.advantages[inputs.loss_mask].mean(), weight=tokens)
        terms = -inputs.advantages * inputs.trainer_logprobs
        return LossOutputs(terms[inputs.loss_mask].sum(), {})

@hookimpl
def register_losses():
    return [PolicyGradient]
"""

pytestmark = pytest.mark.slow


def expected(run_dir: Path, step: int) -> dict[str, float]:
    """From the rollouts that the run has saved of a step."""
    rollouts = read_step(step_files(run_dir)[step]).kept
    tokens = np.array([rollout.num_trainable_tokens for rollout in rollouts])
    credit = np.array([float(rollout.advantages[0]) for rollout in rollouts])
    assert len(rollouts) == 8 and len(set(tokens.tolist())) > 1  # else the weights do not matter
    mean = (credit * tokens).sum() / tokens.sum()
    return {
        "plugin/watched/reward": float(np.mean([rollout.reward for rollout in rollouts])),
        "plugin/watching/credit": mean,
        "plugin/watching/finished": step,
        "plugin/pg/tokens": tokens.mean(),
        "plugin/pg/credit": mean,
    }


def test_a_step_reports_what_its_plugins_have_logged(
    site: Callable[..., None], model_cache: Path, tmp_path: Path
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    site("watching_package", "[prime_rl]\nwatching = watching_package\n", ALGORITHM)
    site("pg_package", "[prime_rl.trainer]\nlosses_of_mine = pg_package\n", LOSS)
    run_dir, env = tmp_path / "run", os.environ | {"PRIME_RL_CACHE": str(model_cache)}
    for more in ([], ["--resume", "2"]):
        command = [*CLI, "run", str(CONFIG), *SMALL, "--output_dir", str(tmp_path), *more]
        done = warm.run(command, env=env, timeout=LIMIT)
        assert done.returncode == 0, done.stdout + done.stderr
    found: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()):
        for name, value in line.items():
            if name.startswith("plugin/"):
                found[line["step"]][name].append(value)
    for step in (1, 2, 3, 4):
        once = {name: [pytest.approx(v, abs=1e-5)] for name, v in expected(run_dir, step).items()}
        assert found.pop(step) == once, f"step {step}"
    assert not found
    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) >= set(once)
