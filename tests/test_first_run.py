"""Whole runs, as a user starts them: real engine, trainer and orchestrator processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import warm
from safetensors.numpy import load_file
from waiting import LIMIT, eventually

from prime_rl_app.saved_rollouts import read_rollouts

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs" / "reverse_text" / "grpo.toml"


SMALL = [
    *("--model.warmup_exact", "0.0"),  # an untrained policy is made in a second
    *("--orchestrator.batch_size", "16"),
    *("--orchestrator.group_size", "4"),
    *("--orchestrator.eval.env.0.num_examples", "8"),
    *("--trainer.scheduler.type", "constant", "--trainer.scheduler.warmup_steps", "0"),
]


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(model_cache: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts ``prime-rl run`` with small settings; whatever is left is ended."""
    with starting(model_cache, tmp_path) as run:
        yield run


@contextmanager
def starting(cache: Path, folder: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def run(name: str, *overrides: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", "from prime_rl_app.cli import main; main()", "run"]
        command += [str(CONFIG), *SMALL, "--output_dir", str(folder), "--run.name", name]
        process = warm.Popen(
            [*command, *overrides],
            env=os.environ | {"PRIME_RL_CACHE": str(cache)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    try:
        yield run
    finally:
        for process in started:
            process.kill()
            process.communicate()


def rows(run_dir: Path, key: str) -> dict[int, float]:
    """One metric by step."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line[key] for line in lines if key in line}


def wait_for_step(run_dir: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Until the trainer has taken ``step``."""
    log = run_dir / "trainer.jsonl"
    while not log.exists() or log.read_bytes().count(b"\n") < step:
        if process.poll() is not None:
            pytest.fail(f"the run ended early:\n{process.stdout.read()}")
        time.sleep(0.05)


@dataclass
class Finished:
    """Two runs side by side."""

    folder: Path
    """Holds their directories, by name."""
    output: dict[str, str]


@pytest.fixture(scope="module")
def pair(model_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """``first`` as shipped, and ``sync``, which never trains on what an older policy sampled."""
    folder = tmp_path_factory.mktemp("pair")
    four = ("--max_steps", "4", "--orchestrator.post_batch_filters", "[]")
    sync = ("--orchestrator.max_off_policy_steps", "0", "--rollout_transport.type", "filesystem")
    with starting(model_cache, folder) as start:
        both = {
            "first": start("first", *four),
            "sync": start("sync", *four, *sync),
        }
        output = {name: process.communicate(timeout=LIMIT)[0] for name, process in both.items()}
        assert [each.returncode for each in both.values()] == [0, 0], output
    return Finished(folder, output)


def test_a_run_goes_through_every_room_and_leaves_its_records(pair: Finished, processes_of) -> None:
    run_dir, output = pair.folder / "first", pair.output["first"]
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


def test_on_the_same_weights_trainer_and_engine_agree_to_1e_4(pair: Finished) -> None:
    run_dir = pair.folder / "sync"
    gaps = rows(run_dir, "logprob_gap/max")
    assert sorted(gaps) == [1, 2, 3, 4]
    assert max(gaps.values()) < 1e-4
    assert max(rows(run_dir, "mismatch_kl/all/max").values()) < 1e-6
    assert set(rows(run_dir, "off_policy/max").values()) == {0.0}


def test_two_runs_side_by_side_keep_apart(pair: Finished) -> None:
    runs = [pair.folder / name for name in ("first", "sync")]
    for run_dir in runs:
        assert sorted(rows(run_dir, "train/agg/all/reward/mean")) == [1, 2, 3, 4]
        log = (run_dir / "trainer.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in log] == [1, 2, 3, 4]
    here, there = (load_file(run_dir / "weights" / "model.safetensors") for run_dir in runs)
    assert any(not np.array_equal(here[name], there[name]) for name in here)


def arguments_at(pid: int) -> int:
    """Where a process has its arguments: elsewhere in each that was not forked (proc(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[45])


NO_RECOVERY = ("--recovery.max_restarts", "0")


@pytest.mark.parametrize("victim", ["inference", "orchestrator"])  # trainer: test_resume.py
def test_a_child_that_dies_ends_the_run_with_its_name_and_no_orphan(
    start, tmp_path, processes_of, victim: str
) -> None:
    process = start(victim, "--max_steps", "1000", "--inference.max_restarts", "0", *NO_RECOVERY)
    run_dir = tmp_path / victim
    wait_for_step(run_dir, 1, process)
    pid = json.loads((run_dir / "status" / f"{victim}.json").read_text())["pid"]
    os.kill(pid, signal.SIGKILL)
    output = process.communicate(timeout=LIMIT)[0]
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


def test_an_algorithm_that_fails_ends_the_run_with_its_reason(
    start, tmp_path, processes_of, monkeypatch
) -> None:
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
    output = process.communicate(timeout=LIMIT)[0]
    assert process.returncode == 1
    assert "orchestrator exited with code 1" in output
    assert "advantages: got nan, expected finite numbers" in output
    assert not processes_of(tmp_path / "faulty")


def test_killing_the_supervisor_takes_every_child_with_it(start, tmp_path, processes_of) -> None:
    """While it lives, each child is a fork of the nursery, in its address space: a run whose
    processes import torch themselves takes four times the CPU (``warm.py``)."""
    process = start("killed", "--max_steps", "1000")
    run_dir = tmp_path / "killed"
    wait_for_step(run_dir, 1, process)
    for name in ("inference", "trainer", "orchestrator"):
        child = json.loads((run_dir / "status" / f"{name}.json").read_text())["pid"]
        assert arguments_at(child) == arguments_at(process.pid), name
    process.kill()
    eventually(lambda: not processes_of(run_dir))
