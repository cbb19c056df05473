"""A run watched while it goes on: evaluated between steps, followed by monitors, asked and stopped
from another terminal."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import warm
from started_commands import Start, started_commands
from waiting import LIMIT, eventually, lines_so_far
from wandb_server import WandbServer, wandb_server

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs" / "reverse_text" / "grpo.toml"
CLI = [sys.executable, "-c", "from prime_rl_app.cli import main; main()"]

pytestmark = pytest.mark.slow

SMALL = [
    *("--model.warmup_exact", "0.0"),
    *("--orchestrator.batch_size", "16", "--orchestrator.group_size", "4"),
    *("--orchestrator.post_batch_filters", "[]"),
    *("--orchestrator.eval.env.0.num_examples", "16"),
    *("--orchestrator.eval.env.0.group_size", "4"),
    *("--trainer.scheduler.type", "constant", "--trainer.scheduler.warmup_steps", "0"),
]
WATCHED = """
[monitors.wandb]
project = "watched"
table_interval = 3
[monitors.tensorboard]
"""


@pytest.fixture
def start(model_cache: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts ``prime-rl run`` with small settings."""
    with started_commands(model_cache) as starting:

        def run(name: str, *arguments: str) -> subprocess.Popen[str]:
            files = [argument for argument in arguments if argument.endswith(".toml")]
            rest = arguments[len(files) :]
            first = ["run", CONFIG, *files, *SMALL, "--output_dir", tmp_path]
            return starting(*first, "--run.name", name, *rest)

        yield run


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return lines_so_far(run_dir / "metrics.jsonl")


def ask(*arguments: object) -> subprocess.CompletedProcess[str]:
    """A command in another terminal."""
    command = [*CLI, *map(str, arguments)]
    return warm.run(command, timeout=LIMIT)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Iterator[WandbServer]:
    """A server in the place of wandb.ai, to which runs report online."""
    with wandb_server() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        yield server


def test_an_evaluation_between_steps_measures_one_version_and_training_goes_on(
    start, wandb, tmp_path
) -> None:
    watched = tmp_path / "watched.toml"
    watched.write_text(WATCHED)
    process = start(
        "run", str(watched), "--max_steps", "8", "--orchestrator.eval.env.0.interval", "2"
    )
    output = process.communicate(timeout=LIMIT)[0]
    assert process.returncode == 0, output
    rows = lines(tmp_path / "run")
    evals = [row for row in rows if "eval/reverse-text/policy_version" in row]
    versions = [row["eval/reverse-text/policy_version"] for row in evals]
    assert versions[0] == 0 and versions[-1] == 8 and len(versions) >= 4
    assert versions == [row["step"] for row in evals] == sorted(set(versions))
    # The engine says of every sampled token who sampled it: one version an evaluation.
    assert [row["eval/reverse-text/num_policy_versions"] for row in evals] == [1.0] * len(evals)
    assert all(row["eval/reverse-text/cancelled"] == 0 for row in evals)
    assert all("eval/reverse-text/avg@4" in row for row in evals)
    batches = [row for row in rows if "train/agg/all/reward/mean" in row]
    assert [row["step"] for row in batches] == list(range(1, 9))
    # While an evaluation takes the engine, groups wait: never longer than the config allows.
    assert max(row["off_policy/max"] for row in batches) <= 8
    check_waiting(batches, [row for row in rows if "loss/mean" in row])
    check_monitors(tmp_path / "run", wandb)


def check_waiting(batches: list[dict[str, Any]], trained: list[dict[str, Any]]) -> None:
    for row in batches:
        waited = {k: v for k, v in row.items() if k.startswith("wait/orchestrator/")}
        assert 0 <= sum(waited.values()) <= row["time/step"] + 0.5
    # A step that is shorter than the time between two samples may have none.
    assert sum(row.get("event_loop_lag/n", 0) for row in batches) > 0
    assert sum(row["wait/orchestrator/inference"] for row in batches) > 0
    assert len(trained) == 8
    for row in trained:
        assert row["wait/trainer/orchestrator"] <= row["time/trainer/step"]


def check_monitors(run_dir: Path, wandb: WandbServer) -> None:
    """Both processes' numbers are in one W&B run and one event file; nobody complained."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    for name in ("train/agg/all/reward/mean", "loss/mean"):
        assert [event.step for event in events.Scalars(name)] == list(range(1, 9))
    steps = {
        name: [row["step"] for row in wandb.history if name in row]
        for name in ("train/agg/all/reward/mean", "loss/mean", "rollouts")
    }
    assert steps["train/agg/all/reward/mean"] == list(range(1, 9))
    assert steps["loss/mean"] == list(range(1, 9))
    assert steps["rollouts"] == [1, 4, 7]
    tables = [name for name in wandb.files if name.startswith("media/table/")]
    assert len(tables) == 3
    assert wandb.runs[0]["project"] == "watched"
    assert wandb.runs[0]["displayName"] == run_dir.name
    assert {each["name"] for each in wandb.runs} == {(run_dir / "wandb" / "run_id").read_text()}
    plugins = json.loads((run_dir / "summary.json").read_text())["plugins"]
    assert {"prime-rl-core", "prime-rl-wandb", "prime-rl-tensorboard"} <= plugins.keys()
    log = (run_dir / "logs" / "latest" / "orchestrator.log").read_text()
    assert "monitor '" not in log


def test_a_run_is_asked_and_stopped_from_another_terminal(start, tmp_path, processes_of) -> None:
    """``prime-rl stop`` sends SIGTERM."""
    skip = ("--orchestrator.eval.skip_first_step", "true")
    process = start("mine", "--max_steps", "1000", *skip)
    run_dir = tmp_path / "mine"
    eventually((run_dir / "trainer.jsonl").exists, process)
    told = ask("status", "mine", "--output-dir", tmp_path)
    assert "running" in told.stdout and "orchestrator" in told.stdout, told.stderr
    pids = [json.loads(path.read_text())["pid"] for path in run_dir.glob("status/*.json")]
    stopped = ask("stop", "mine", "--output-dir", tmp_path)
    assert (stopped.returncode, stopped.stdout) == (0, f"{run_dir}: stopped\n"), stopped.stderr
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists() and pid != process.pid]
    output = process.communicate(timeout=LIMIT)[0]
    assert process.returncode == 130
    assert "Stopped at step" in output
    assert not processes_of(run_dir)
    (run,) = json.loads(ask("runs", "--output-dir", tmp_path, "--json").stdout)
    assert (run["name"], run["state"], run["max_steps"]) == ("mine", "stopped", 1000)
    assert run["step"] >= 1
    assert not [row for row in lines(run_dir) if "eval/reverse-text/policy_version" in row]
