"""Whole runs over several engines, over engines that run elsewhere, and with one GPU for two."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import warm
from waiting import LIMIT, eventually, lines_so_far

from prime_rl.plugins.status import read_status
from prime_rl.weights.versions import has_files
from prime_rl_app.saved_rollouts import read_rollouts

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs" / "reverse_text" / "grpo.toml"
KEY = "the key of these tests"

pytestmark = pytest.mark.slow

UNTRAINED = ("--model.warmup_exact", "0.0")  # made in a second
SMALL = [
    *("--orchestrator.batch_size", "16"),
    *("--orchestrator.group_size", "4"),
    *("--orchestrator.eval.env.0.num_examples", "8"),
    *("--trainer.scheduler.type", "constant", "--trainer.scheduler.warmup_steps", "0"),
]

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(model_cache: Path) -> Iterator[Start]:
    """Starts a ``prime-rl`` command; whatever is left is ended."""
    started: list[subprocess.Popen[str]] = []

    def command(*words: str) -> subprocess.Popen[str]:
        process = warm.Popen(
            [sys.executable, "-c", "from prime_rl_app.cli import main; main()", *words],
            env=os.environ | {"PRIME_RL_CACHE": str(model_cache), "PRIME_RL_ADMIN_KEY": KEY},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield command
    for process in started:
        process.kill()
        process.communicate()


def run_of(tmp_path: Path, *overrides: str) -> list[str]:
    place = ("--output_dir", str(tmp_path), "--run.name", "run")
    return ["run", str(CONFIG), *UNTRAINED, *SMALL, *place, *overrides]


def rows(run_dir: Path, key: str) -> dict[int, float]:
    """One metric by step."""
    lines = lines_so_far(run_dir / "metrics.jsonl")
    return {line["step"]: line[key] for line in lines if key in line}


def status_of(run_dir: Path, name: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((run_dir / "status" / f"{name}.json").read_text())
    return report


def finish(process: subprocess.Popen[str]) -> str:
    output = process.communicate(timeout=LIMIT)[0]
    assert process.returncode == 0, output
    return output


def check_tokens(run_dir: Path, max_steps: int) -> None:
    """16 rollouts a step, each token sampled from a version that was there by then."""
    for step in range(1, max_steps + 1):
        _, rollouts, dropped = read_rollouts(run_dir / "rollouts" / f"step_{step}.msgpack")
        kept = [r for r, why in zip(rollouts, dropped, strict=True) if why is None]
        assert len(kept) >= 16
        for rollout in kept:
            (sample,) = rollout.samples
            versions = sample.policy_versions[sample.loss_mask]
            assert (versions >= rollout.policy_version).all() and (versions < step).all()


def test_of_two_engines_one_is_killed_and_started_again_and_nothing_is_lost(
    start: Start, tmp_path: Path
) -> None:
    words = ("--max_steps", "8", "--inference.replicas", "2", "--recovery.stopped_timeout", "900")
    process = start(*run_of(tmp_path, *words))
    run_dir = tmp_path / "run"
    eventually(lambda: 2 in rows(run_dir, "inference/0/serving"), process)
    os.kill(process.pid, signal.SIGSTOP)  # or the engine is back before the next batch
    os.kill(status_of(run_dir, "inference")["pid"], signal.SIGKILL)
    eventually(lambda: status_of(run_dir, "engines")["state"] == "1 of 2 serve", process)
    eventually(lambda: 0.0 in rows(run_dir, "inference/0/serving").values(), process)
    trainer = status_of(run_dir, "trainer")["pid"]
    os.kill(trainer, signal.SIGSTOP)  # or the run is over before the engine is back
    os.kill(process.pid, signal.SIGCONT)
    eventually(lambda: status_of(run_dir, "engines")["state"] == "2 of 2 serve", process)
    os.kill(trainer, signal.SIGCONT)
    output = finish(process)
    assert "inference was ended by SIGKILL: starting it again (1 of 3 times)" in output
    serving = rows(run_dir, "inference/0/serving")
    assert set(serving) == set(range(1, 9)) and 0.0 in serving.values() and serving[8] == 1.0
    assert set(rows(run_dir, "inference/1/serving").values()) == {1.0}
    assert rows(run_dir, "inference/0/version")[8] >= 6
    shown = status_of(run_dir, "engines")["detail"]
    assert [shown[name] for name in ("inference", "inference_1")] == ["version 8", "version 8"]
    check_tokens(run_dir, 8)


def test_weights_go_from_memory_and_an_engine_that_comes_back_reads_files(
    start: Start, tmp_path: Path
) -> None:
    """The only engine is killed: the trainer, out of work, writes what it has to begin with."""
    words = ("--max_steps", "5", "--weight_broadcast.type", "gloo")
    process = start(*run_of(tmp_path, *words, "--trainer.keep_broadcasts", "9"))
    run_dir = tmp_path / "run"
    eventually(lambda: 2 in rows(run_dir, "inference/0/serving"), process)
    os.kill(status_of(run_dir, "inference")["pid"], signal.SIGKILL)
    output = finish(process)
    assert "inference was ended by SIGKILL: starting it again (1 of 3 times)" in output
    files = {version: has_files(run_dir / f"broadcasts/step_{version}") for version in range(1, 6)}
    assert not files[1] and files[5]
    assert list(files.values()).count(True) == 2  # the last version, and the one it began with
    check_tokens(run_dir, 5)


def test_a_run_over_an_engine_that_runs_elsewhere(start: Start, tmp_path: Path) -> None:
    """It serves other weights under the same name and number; the run's own are loaded first."""
    server = start("serve", "tiny-reverse", *UNTRAINED, "--seed", "1", "--max-model-len", "128")
    assert server.stdout is not None
    url = ""
    while not url:
        line = server.stdout.readline()
        assert line or server.poll() is None
        url = (re.findall(r"^url +(\S+)", line) or [""])[0]
    words = run_of(tmp_path, "--max_steps", "2", "--inference.base_url", f'["{url}"]')
    finish(start(*words, "--orchestrator.eval.skip_first_step", "true"))
    run_dir = tmp_path / "run"
    assert not (run_dir / "status" / "inference.json").exists()
    engines = read_status(run_dir / "status" / "engines.json")
    assert engines is not None
    assert engines.detail == {url.removesuffix("/v1"): "version 2"}
    assert rows(run_dir, "mismatch_kl/all/mean")[1] < 1e-5  # with other weights, about 0.1
    check_tokens(run_dir, 2)


@pytest.mark.parametrize("transport", ["filesystem", "ipc"])
def test_with_one_gpu_for_two_engine_and_trainer_take_turns(
    start: Start, tmp_path: Path, transport: str
) -> None:
    words = run_of(tmp_path, "--max_steps", "3", "--deployment.colocated", "true")
    words = [*words, "--weight_broadcast.type", transport, "--trainer.keep_broadcasts", "9"]
    words = [*words, "--orchestrator.max_off_policy_steps", "0"]  # what differs is the weights
    finish(start(*words, "--orchestrator.eval.env.0.interval", "2"))
    run_dir = tmp_path / "run"
    check_tokens(run_dir, 3)
    files = [has_files(run_dir / f"broadcasts/step_{version}") for version in (1, 2, 3)]
    assert files == [transport == "filesystem"] * 2 + [True]  # no engine loads the last
    assert max(rows(run_dir, "mismatch_kl/all/mean").values()) < 1e-5  # the engine has all of them
    asleep = rows(run_dir, "time/sleep_engines")
    assert set(asleep) == {1, 2, 3} and all(seconds > 0 for seconds in asleep.values())
    # Batch n goes out when version n - 1 is there.
    assert rows(run_dir, "watcher/policy_version") == {1: 0, 2: 1, 3: 2}
    assert set(rows(run_dir, "time/trainer/offload")) == {1, 2, 3}
    evaluated = rows(run_dir, "eval/reverse-text/all/reward/mean")
    assert set(evaluated) == {0, 2, 3}


def test_taking_turns_a_killed_engine_reads_files_and_then_shares_memory_again(
    start: Start, tmp_path: Path
) -> None:
    in_shared_memory = set(os.listdir("/dev/shm"))
    words = run_of(tmp_path, "--max_steps", "6", "--deployment.colocated", "true")
    words = [*words, "--weight_broadcast.type", "ipc", "--trainer.keep_broadcasts", "9"]
    words = [*words, "--orchestrator.max_off_policy_steps", "0"]  # what differs is the weights
    process = start(*words)
    run_dir = tmp_path / "run"
    eventually(lambda: 2 in rows(run_dir, "inference/0/serving"), process)
    os.kill(status_of(run_dir, "inference")["pid"], signal.SIGKILL)
    output = finish(process)
    assert "inference was ended by SIGKILL: starting it again (1 of 3 times)" in output
    files = [has_files(run_dir / f"broadcasts/step_{version}") for version in range(1, 7)]
    assert not files[0] and files[-1]
    assert files.count(True) <= 2  # the last version, and the one that the new engine began with
    assert max(rows(run_dir, "mismatch_kl/all/mean").values()) < 1e-5
    check_tokens(run_dir, 6)
    ours = {"prime", "torch_"}
    left = set(os.listdir("/dev/shm")) - in_shared_memory
    assert not [name for name in left if any(word in name for word in ours)]


def test_engines_join_and_leave_a_run_and_none_serves_for_a_while(
    start: Start, tmp_path: Path
) -> None:
    process = start(*run_of(tmp_path, "--max_steps", "100000"))
    run_dir = tmp_path / "run"
    eventually(lambda: 1 in rows(run_dir, "inference/0/serving"), process)

    def scale(wanted: int) -> None:
        finish(start("scale", str(run_dir), str(wanted)))
        served = f"{wanted} of {wanted} serve"
        eventually(lambda: status_of(run_dir, "engines")["state"] == served, process)

    scale(2)
    assert len(json.loads((run_dir / "configs" / "launch.json").read_text())["engine_urls"]) == 2
    scale(0)
    waits = "all engines have left: one has to join"
    eventually(lambda: status_of(run_dir, "orchestrator")["waiting_for"] == waits, process)
    before = max(rows(run_dir, "train/agg/all/reward/mean"))
    scale(1)
    eventually(lambda: max(rows(run_dir, "train/agg/all/reward/mean")) > before + 2, process)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=LIMIT)[0]
    assert process.returncode == 130, output
    check_tokens(run_dir, before + 1)
    refused = start("scale", str(run_dir), "2")
    assert "does not run" in refused.communicate(timeout=LIMIT)[0] and refused.returncode == 2
