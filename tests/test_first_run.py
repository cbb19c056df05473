"""Whole runs, as a user starts them: real engine, trainer and orchestrator processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from prime_rl.orchestrator.store import read_rollouts

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs" / "reverse_text" / "grpo.toml"

pytestmark = pytest.mark.slow

SMALL = [
    *("--model.warmup_exact", "0.0"),  # an untrained policy is made in a second
    *("--orchestrator.batch_size", "16"),
    *("--orchestrator.group_size", "4"),
    *("--orchestrator.eval.env.0.num_examples", "8"),
    *("--trainer.scheduler.type", "constant", "--trainer.scheduler.warmup_steps", "0"),
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model cache for all runs of this file."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def start(cache: Path, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts ``prime-rl run`` with small settings; whatever is left is ended."""
    started: list[subprocess.Popen[str]] = []

    def run(name: str, *overrides: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", "from prime_rl.cli import main; main()", "run"]
        command += [str(CONFIG), *SMALL, "--output_dir", str(tmp_path), "--run.name", name]
        process = subprocess.Popen(
            [*command, *overrides],
            env=os.environ | {"PRIME_RL_CACHE": str(cache)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # A shell that starts the tests in the background has them ignore Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def rows(run_dir: Path, key: str) -> dict[int, float]:
    """One metric by step."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line[key] for line in lines if key in line}


def processes_of(run_dir: Path) -> list[int]:
    """Processes whose command line names this run."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if str(run_dir) in (entry / "cmdline").read_text() and entry.name != str(os.getpid()):
                found.append(int(entry.name))
        except (OSError, ValueError):
            continue
    return found


def wait_for_step(run_dir: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Until the trainer has taken ``step``."""
    log = run_dir / "trainer.jsonl"
    while not log.exists() or log.read_bytes().count(b"\n") < step:
        if process.poll() is not None:
            pytest.fail(f"the run ended early:\n{process.stdout.read()}")
        time.sleep(0.05)


def test_a_run_goes_through_every_room_and_leaves_its_records(start, tmp_path) -> None:
    process = start("first", "--max_steps", "4", "--orchestrator.post_batch_filters", "[]")
    output = process.communicate(timeout=240)[0]
    run_dir = tmp_path / "first"
    assert process.returncode == 0, output
    assert "Held-out reward" in output and "Learning curve" in output
    assert sorted(rows(run_dir, "train/agg/all/reward/mean")) == [1, 2, 3, 4]
    assert sorted(rows(run_dir, "optim/grad_norm")) == [1, 2, 3, 4]
    assert rows(run_dir, "eval/reverse-text/policy_version") == {0: 0.0, 4: 4.0}
    summary = json.loads((run_dir / "summary.json").read_text())
    assert [len(summary["eval"][when][0]["shown"]) for when in ("before", "after")] == [3, 3]
    assert (run_dir / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert not processes_of(run_dir)
    check_rollouts(run_dir)
    check_exported_model(run_dir)


def check_rollouts(run_dir: Path) -> None:
    """What was saved is whole: 16 rollouts a step, each token of known version, credit centred."""
    for step in range(1, 5):
        saved_step, rollouts, dropped = read_rollouts(run_dir / "rollouts" / f"step_{step}.msgpack")
        assert saved_step == step
        kept = [r for r, why in zip(rollouts, dropped, strict=True) if why is None]
        assert len(kept) >= 16
        for rollout in kept:
            (sample,) = rollout.samples
            assert (sample.policy_versions[sample.loss_mask] >= rollout.policy_version).all()
            assert (sample.inference_logprobs[sample.loss_mask] < 0).all()
            assert step - 1 - rollout.policy_version <= 4
        groups: dict[int, list[float]] = {}
        for rollout in rollouts:
            groups.setdefault(rollout.group_id, []).append(float(rollout.advantages[0]))
        assert np.allclose([sum(credit) for credit in groups.values()], 0.0, atol=1e-6)


def check_exported_model(run_dir: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(run_dir / "weights")
    assert AutoTokenizer.from_pretrained(run_dir / "weights").encode("abc")


def test_on_the_same_weights_trainer_and_engine_agree_to_1e_4(start, tmp_path) -> None:
    process = start(
        "sync",
        *("--max_steps", "4", "--orchestrator.max_off_policy_steps", "0"),
        *("--orchestrator.post_batch_filters", "[]", "--rollout_transport.type", "filesystem"),
    )
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 0, output
    gaps = rows(tmp_path / "sync", "logprob_gap/max")
    assert sorted(gaps) == [1, 2, 3, 4]
    assert max(gaps.values()) < 1e-4
    assert max(rows(tmp_path / "sync", "mismatch_kl/all/max").values()) < 1e-6
    assert set(rows(tmp_path / "sync", "off_policy/max").values()) == {0.0}


def test_two_runs_side_by_side_keep_apart(start, tmp_path) -> None:
    pair = [start(name, "--max_steps", "2", "--seed", str(i)) for i, name in enumerate("ab")]
    for process in pair:
        output = process.communicate(timeout=300)[0]
        assert process.returncode == 0, output
    curves = [rows(tmp_path / name, "train/agg/all/reward/mean") for name in "ab"]
    assert sorted(curves[0]) == sorted(curves[1]) == [1, 2]


@pytest.mark.parametrize("victim", ["trainer", "inference", "orchestrator"])
def test_a_child_that_dies_ends_the_run_with_its_name_and_no_orphan(
    start, tmp_path, victim: str
) -> None:
    process = start(victim, "--max_steps", "1000", "--inference.max_restarts", "0")
    run_dir = tmp_path / victim
    wait_for_step(run_dir, 1, process)
    pid = json.loads((run_dir / "status" / f"{victim}.json").read_text())["pid"]
    os.kill(pid, signal.SIGKILL)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 1
    assert f"{victim} was ended by SIGKILL" in output
    assert f"{victim}.log" in output
    assert not processes_of(run_dir)


FAULTY = """
from prime_rl import Algorithm, hookimpl

class Faulty(Algorithm):
    name = "faulty"

    @hookimpl
    def score_group(self, group):
        for rollout in group:
            rollout.assign_advantages(float("nan"))

@hookimpl
def register_algorithms():
    return [Faulty]
"""


def test_an_algorithm_that_fails_ends_the_run_with_its_reason(start, tmp_path, monkeypatch) -> None:
    """It fails while scores of rollouts are in flight: none of them may keep the process alive."""
    package = tmp_path / "plugin"
    (package / "faulty-0.1.dist-info").mkdir(parents=True)
    (package / "faulty.py").write_text(FAULTY)
    metadata = "Metadata-Version: 2.1\nName: faulty\nVersion: 0.1\n"
    (package / "faulty-0.1.dist-info" / "METADATA").write_text(metadata)
    entry_points = "[prime_rl]\nfaulty = faulty\n"
    (package / "faulty-0.1.dist-info" / "entry_points.txt").write_text(entry_points)
    monkeypatch.setenv("PYTHONPATH", str(package))
    process = start("faulty", "--orchestrator.algo.type", "faulty", "--max_steps", "3")
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 1
    assert "orchestrator exited with code 1" in output
    assert "advantages: got nan, expected a finite number" in output
    assert not processes_of(tmp_path / "faulty")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_being_stopped_is_clean(start, tmp_path, number: signal.Signals) -> None:
    process = start("stopped", "--max_steps", "1000")
    run_dir = tmp_path / "stopped"
    wait_for_step(run_dir, 1, process)
    process.send_signal(number)
    output = process.communicate(timeout=30)[0]
    assert process.returncode == 130
    assert f"stopped; what was done so far is in {run_dir}" in output.replace("\n", "")
    assert not processes_of(run_dir)


def test_killing_the_supervisor_takes_every_child_with_it(start, tmp_path) -> None:
    process = start("killed", "--max_steps", "1000")
    run_dir = tmp_path / "killed"
    wait_for_step(run_dir, 1, process)
    process.kill()
    deadline = time.monotonic() + 30
    while processes_of(run_dir) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not processes_of(run_dir)
