"""Any process may die or be stopped at any time: the run goes on, with the same result."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
import warm
from waiting import LIMIT, eventually, exists

pytestmark = pytest.mark.slow


def test_random_faults_leave_frames_and_weights_as_they_are(
    tmp_path: Path, model_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``python -m bench.faults`` does the same with thirty."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1]))
    monkeypatch.setenv("PRIME_RL_CACHE", str(model_cache))
    from bench import faults

    found = faults.storm(tmp_path, 4, seed=1, popen=warm.Popen)
    assert found["faults"] == 4 and found["restarts"], found


def test_a_killed_supervisor_is_followed_by_another_one_which_completes_the_run(
    tmp_path: Path, model_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first step, with a stopped process that does not see its parent's death; and after
    the last one. By ordinary processes: forks of the nursery have its environment."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1]))
    monkeypatch.setenv("PRIME_RL_CACHE", str(model_cache))
    from bench import faults

    run_dir, words = tmp_path / "run", ("--run.name", "run", "--max_steps", "1", "--resume", "auto")
    words += ("--inference.replicas", "1", "--trainer.num_ranks", "1")
    words += ("--orchestrator.env_workers", "1")

    def begin() -> subprocess.Popen[Any]:
        command = [*faults.COMMAND, *faults.CONFIG, *words, "--output_dir", str(tmp_path)]
        output = subprocess.PIPE
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, text=True)

    first = begin()
    status = run_dir / "status" / "orchestrator.json"
    eventually(status.exists, first)
    stopped = json.loads(status.read_text())["pid"]
    os.kill(stopped, signal.SIGSTOP)
    refused = begin()
    output = refused.communicate(timeout=LIMIT)[0]
    assert (refused.returncode, "another process runs this run" in output) == (3, True), output
    first.kill()
    first.communicate()
    second = begin()
    try:
        eventually((run_dir / "checkpoints" / "step_1" / "STABLE").exists, second)
        assert not exists(stopped)
        left = [each.pid for each in psutil.Process(second.pid).children(recursive=True)]
    finally:
        second.kill()
        second.communicate()
    for _ in range(2):  # the second time there is nothing to do
        last = begin()
        output = last.communicate(timeout=LIMIT)[0]
        assert last.returncode == 0, output
        assert (run_dir / "weights" / "model.safetensors").exists()
        assert not any(map(exists, left))
    assert "nothing is left to train" in output
