"""Supervised fine-tuning: ``prime-rl sft``, from the data set to the trained model."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import sys
from pathlib import Path

import pytest
import sft_oracle
import warm
from commandline import prime_rl
from waiting import eventually

CONFIG = """
seq_len = 128

[model]
name = "{model}"

[sft]
data = "{train}"
validation = "{validation}"
batch_size = {batch_size}
shuffle = false
validate_every = 8

[trainer]
micro_batch_tokens = 1024

[trainer.optim]
lr = {lr}
weight_decay = 0.0

[ckpt]
interval = 4
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    train, validation = sft_oracle.write_data(tmp_path)
    model = sft_oracle.write_model(tmp_path / "model")
    path = tmp_path / "sft.toml"
    path.write_text(
        CONFIG.format(
            model=model,
            train=train,
            validation=validation,
            batch_size=sft_oracle.BATCH_SIZE,
            lr=sft_oracle.LEARNING_RATE,
        )
    )
    return path


def metrics_of(run_dir: Path) -> dict[int, dict[str, float]]:
    """The trainer's metrics of each step; of a step that was trained again, the last."""
    lines = (run_dir / "trainer.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return {row["step"]: row["metrics"] for row in rows}


@pytest.mark.slow
def test_a_run_that_ends_goes_on_and_loses_its_trainer_has_the_losses_of_trl(config, tmp_path):
    """The oracle is TRL's SFTTrainer on the same conversations in the same order."""
    place = ["--output-dir", tmp_path, "--run.name", "run"]
    half = prime_rl("sft", config, "--max-steps", 12, *place, cwd=tmp_path)
    assert half.returncode == 0, half.stdout + half.stderr

    run_dir = tmp_path / "run"
    whole = ["sft", config, "--max-steps", sft_oracle.STEPS, *place, "--resume"]
    command = [sys.executable, "-c", "from prime_rl_app.cli import main; main()"]
    process = warm.Popen([*command, *map(str, whole)], env=dict(os.environ), cwd=tmp_path)
    try:
        eventually(lambda: max(metrics_of(run_dir)) >= 17, process)
        status = json.loads((run_dir / "status/trainer.json").read_text())
        os.kill(status["pid"], signal.SIGKILL)
        assert process.wait() == 0
    finally:
        process.kill()

    recorded = json.loads(sft_oracle.RECORDED.read_text())
    found = metrics_of(run_dir)
    assert sorted(found) == list(range(1, sft_oracle.STEPS + 1))
    for step, loss in recorded["loss"].items():
        assert found[int(step)]["loss/ce"] == pytest.approx(loss, abs=1e-3), step
    for step, loss in recorded["validation"].items():
        assert found[int(step)]["validation/loss"] == pytest.approx(loss, abs=1e-3), step
    assert not (run_dir / "status/inference.json").exists()  # no engine was started
    assert (run_dir / "weights/model.safetensors").exists()


@pytest.mark.slow
def test_the_commands_of_the_page_run_in_their_order(tmp_path):
    """And the model learns: the loss of the held-out rows falls by half."""
    root = Path(__file__).parents[1]
    shutil.copytree(root / "configs", tmp_path / "configs")
    page = (root / "docs/sft.md").read_text()
    commands = re.findall(r"^\$ prime-rl (.*)$", page, re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        short = []
        if command.endswith("rl"):
            short = [*("--max-steps", "2"), *("--orchestrator.eval.env", "[]")]
        elif command.endswith("again"):
            short = ["--max-steps", "2"]
        done = prime_rl(*shlex.split(command), *short, cwd=tmp_path)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"

    measured = {
        step: metrics["validation/loss"]
        for step, metrics in metrics_of(tmp_path / "outputs/sft").items()
        if "validation/loss" in metrics
    }
    assert list(measured) == [7, 14, 21, 28, 35, 42, 45]
    assert measured[45] < measured[7] / 2
    lines = (tmp_path / "outputs/good.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert rows and all(row["reward"] >= 0.9 for row in rows)
    assert all(row["messages"][-1]["role"] == "assistant" for row in rows)


@pytest.mark.slow
def test_an_adapter_trains_on_the_same_data_and_an_engine_evaluates_it(config, tmp_path):
    more = tmp_path / "more.toml"
    more.write_text(
        "[trainer.lora]\nrank = 4\n"
        "[orchestrator.eval.sampling]\nmax_completion_tokens = 4\n"
        '[[orchestrator.eval.env]]\nid = "reverse-text"\nnum_examples = 2\ninterval = 2\n'
    )
    place = ["--output-dir", tmp_path, "--run.name", "run", "--max-steps", 2]
    done = prime_rl("sft", config, more, *place, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    run_dir = tmp_path / "run"
    assert (run_dir / "weights/adapter/adapter_model.safetensors").exists()
    assert (run_dir / "status/inference.json").exists()
    found = metrics_of(run_dir)
    assert found[2]["loss/ce"] > 0 and found[2]["validation/loss"] > 0
    evaluated = sorted(path.name for path in (run_dir / "eval_rollouts").iterdir())
    assert evaluated == ["step_0", "step_2"]
