"""A run of real processes, replayed: every frame its trainer received comes out again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import warm
from typer.testing import CliRunner

from prime_rl_app import children
from prime_rl_app.cli.app import app
from prime_rl_app.saved_rollouts import read_step, step_files
from prime_rl_tools.report import write_report
from prime_rl_tools.report.exports import StepExports
from prime_rl_tools.report.source import eval_files

CONFIG = Path(__file__).parents[4] / "configs" / "reverse_text" / "grpo.toml"


@pytest.mark.slow
def test_a_run_replays_byte_for_byte_and_its_page_has_the_trainers_values(
    tmp_path, model_cache, monkeypatch
):
    pytest.importorskip("prime_rl_environments")
    monkeypatch.setenv("PRIME_RL_CACHE", str(model_cache))
    monkeypatch.setattr(children, "subprocess", warm.SUBPROCESS)
    arguments = [
        "run", str(CONFIG), "--max_steps", "3", "--trainer.scheduler.warmup_steps", "1",
        "--orchestrator.batch_size", "48", "--orchestrator.eval.env.0.num_examples", "8",
        "--trainer.token_export.enabled", "true", "--output_dir", str(tmp_path),
        "--run.name", "run",
    ]  # fmt: skip
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    run_dir = tmp_path / "run"
    result = CliRunner().invoke(app, ["replay", str(run_dir), "--json"])
    assert result.exit_code == 0, result.output
    changes = json.loads(result.output)
    assert [(c["step"], c["frames_equal"], c["num_changed"]) for c in changes] == [
        (1, True, 0), (2, True, 0), (3, True, 0)
    ]  # fmt: skip
    stored = [s for path in step_files(run_dir).values() for s in read_step(path).rollouts]
    facts = write_report(run_dir, tmp_path / "page.html")
    held_out = [s for path in eval_files(run_dir) for s in read_step(path).rollouts]
    assert len(held_out) == 2 * 8  # before and after training
    assert facts.num_rollouts == len(stored) + len(held_out)
    first = read_step(step_files(run_dir)[1])
    exports = StepExports(run_dir, 1, seq_len=64)
    for rollout in first.kept:
        seen = exports.take(rollout.env, rollout.samples[0])
        assert len(seen["trainer_logprobs"]) == rollout.num_tokens
