"""Servers of environments on a real Ray cluster, and a driver that is killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from local_cluster import processes_with, ray_cluster, with_default_signals
from waiting import LIMIT, eventually, exists

from prime_rl_app.saved_rollouts import read_step

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
STEPS = 8
WORDS = [
    *(str(ROOT / "configs" / "reverse_text" / "grpo.toml"), "--model.warmup_exact", "0.15"),
    *("--max_steps", str(STEPS), "--orchestrator.eval.env", "[]", "--view.type", "lines"),
    *("--orchestrator.batch_size", "8", "--orchestrator.group_size", "4"),
    *("--orchestrator.max_off_policy_steps", "0", "--inference.embedded.num_slots", "1"),
    *("--trainer.scheduler.type", "constant", "--trainer.scheduler.warmup_steps", "0"),
    *("--ckpt.interval", "1", "--orchestrator.env_workers", "2", "--trainer.optim.lr", "2e-3"),
]


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster(cpus=4) as found:
        yield found


def start(folder: Path, name: str, *words: str) -> subprocess.Popen[Any]:
    """Start a run; its output goes to a file."""
    command = [sys.executable, "-c", "from prime_rl_app.cli import main; main()", "run", *WORDS]
    with (folder / f"{name}.log").open("a") as log:
        return subprocess.Popen(
            [*command, "--output_dir", str(folder), "--run.name", name, *words],
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=with_default_signals,
        )


def on_ray(folder: Path, cluster: Any, *words: str) -> subprocess.Popen[Any]:
    where = ("--launcher", "ray", "--launcher.address", cluster.address)
    return start(folder, "ray", *where, "--launcher.env_servers", "2", *words)


def completed(run: subprocess.Popen[Any], folder: Path, name: str) -> str:
    run.wait(LIMIT)
    output = (folder / f"{name}.log").read_text()
    assert run.returncode == 0, output
    return output


def frames(run_dir: Path) -> list[Any]:
    """Digests of each step's frames."""
    steps = range(1, STEPS + 1)
    return [read_step(run_dir / "rollouts" / f"step_{step}.msgpack").frames for step in steps]


def trained(run_dir: Path) -> int:
    file = run_dir / "trainer.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


@pytest.fixture(scope="module")
def calm(tmp_path_factory) -> Path:
    """The same run on this machine, undisturbed; its workers are beside the orchestrator."""
    folder = tmp_path_factory.mktemp("calm")
    completed(start(folder, "calm"), folder, "calm")
    return folder / "calm"


def test_a_server_of_environments_whose_actor_dies_is_replaced(cluster, calm, tmp_path):
    # The rate of this run lets rewards become equal, and without a filter that ends no long run.
    words = ("--max_steps", "1000000", "--orchestrator.post_batch_filters", "[]")
    run, run_dir = on_ray(tmp_path, cluster, *words), tmp_path / "ray"
    status = run_dir / "status" / "env_workers.json"

    def servers() -> list[psutil.Process]:
        return [psutil.Process(pid) for pid in processes_with(f"serve-env {run_dir}")]

    def described() -> str:
        return str(json.loads(status.read_text())["detail"].get("env reverse-text", ""))

    try:
        eventually(lambda: trained(run_dir) >= 2, run)
        early = [read_step(run_dir / "rollouts" / f"step_{n}.msgpack").frames for n in (1, 2)]
        assert early == frames(calm)[:2]
        eventually(lambda: described() == "2/2", run)
        first, second = servers()
        keys = {key for key in first.environ() if key.startswith("PRIME_RL_") and "KEY" in key}
        # Engines on a cluster answer no request without the first, and it answers none without
        # the second.
        assert keys == {"PRIME_RL_ENGINE_API_KEY", "PRIME_RL_ENV_SERVER_KEY"}
        first.parent().kill()
        eventually(lambda: "1 replaced" in described() and described().startswith("2/2"), run)
        assert len(servers()) == 2 and second in servers() and first not in servers()
        before = trained(run_dir)
        eventually(lambda: trained(run_dir) > before + 1, run)
        assert not (run_dir / "recoveries.jsonl").exists()  # nothing else started again
        run.send_signal(signal.SIGINT)
        run.wait(LIMIT)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 130, (tmp_path / "ray.log").read_text()
    eventually(lambda: not processes_with(str(run_dir)))


def test_a_run_whose_driver_is_killed_resumes_with_the_same_frames_and_weights(
    cluster, calm, tmp_path
):
    run, run_dir = on_ray(tmp_path, cluster), tmp_path / "ray"
    try:
        eventually((run_dir / "checkpoints" / "step_3" / "STABLE").exists, run)
        assert trained(run_dir) < STEPS
        processes = processes_with(str(run_dir))
        actors = {psutil.Process(pid).ppid() for pid in processes} - {run.pid}
    finally:
        run.kill()
        run.wait()
    eventually(lambda: not processes_with(str(run_dir)))
    eventually(lambda: not any(map(exists, actors)))
    resumed = on_ray(tmp_path, cluster, "--resume")
    try:
        output = completed(resumed, tmp_path, "ray")
    finally:
        resumed.kill()
        resumed.wait()
    assert "resuming from step" in output
    assert frames(run_dir) == frames(calm)
    weights = Path("weights", "model.safetensors")
    assert (run_dir / weights).read_bytes() == (calm / weights).read_bytes()
    eventually(lambda: not processes_with(str(run_dir)))


SLOW_WORDS = """
from text_reversal import InProcessHarness, TextReversalTaskset
class SlowWordsTaskset(TextReversalTaskset):
    RUNS_IN_PROCESS = False
__all__ = ["InProcessHarness", "SlowWordsTaskset"]
"""


def test_env_workers_auto_puts_a_server_on_each_node(cluster, tmp_path):
    """Two nodes of four CPUs spare two each; the launcher has no setting of it."""
    (tmp_path / "slow_words.py").write_text(SLOW_WORDS)
    env = ("--orchestrator.train.env", '[{id = "slow-words"}]')
    words = (*env, "--orchestrator.env_workers", "auto", "--max_steps", "3")
    where = ("--launcher", "ray", "--launcher.address", cluster.address)
    forwarded = ("--launcher.forward_env", '["PYTHONPATH"]')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        run = start(tmp_path, "ray", *where, *forwarded, *words)
    try:
        status = tmp_path / "ray" / "status" / "env_workers.json"
        eventually(lambda: trained(tmp_path / "ray") >= 1, run)
        assert json.loads(status.read_text())["detail"]["env slow-words"] == "4/4"
        assert len(processes_with(f"serve-env {tmp_path / 'ray'}")) == 2
        completed(run, tmp_path, "ray")
    finally:
        run.kill()
        run.wait()
    announced = sorted((tmp_path / "ray" / "configs").glob("env_train_0_*.json"))
    found = [len(json.loads(file.read_text())["addresses"]) for file in announced]
    assert found == [2, 2]
