"""A rank that fails, or gets SIGTERM, while the others wait for it in a collective.

The agent and its processes are real, and so is gloo; what the ranks do is three lines.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import warm
from waiting import LIMIT, eventually

RANK = """
import os, pathlib, sys, threading, time
import torch
from prime_rl import ConfigError
from prime_rl.trainer import __main__ as trainer, parallel
run_dir = pathlib.Path(sys.argv[1])

def run(path, status, rank):
    with parallel.joined(rank, torch.device("cpu")):
        group = parallel.host_group()
        if rank.number == 0:
            parallel.gather(None)  # the other rank never joins
        # As the thread that writes checkpoints does; Python would wait for it to end.
        threading.Thread(target=parallel.gather, args=(None, group)).start()
        (run_dir / "pid").with_suffix(".new").write_text(str(os.getpid()))
        (run_dir / "pid").with_suffix(".new").rename(run_dir / "pid")
        if run_dir.name == "waits":
            time.sleep(600)
        raise ConfigError("no such key")

trainer.run = run
sys.exit(trainer.main(sys.argv[1:]))
"""
START = "import sys; from prime_rl_app import agent; agent.MODULE = 'prime_rl_failing_rank'; " \
    "sys.exit(agent.main(sys.argv[1:]))"  # fmt: skip

Start = Callable[[str], tuple[Path, subprocess.Popen[str]]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """An agent with two ranks, in a run of the given name."""
    (tmp_path / "prime_rl_failing_rank.py").write_text(RANK)
    agents: list[subprocess.Popen[str]] = []

    def begin(name: str) -> tuple[Path, subprocess.Popen[str]]:
        (tmp_path / name / "status").mkdir(parents=True)
        agents.append(
            warm.Popen(
                [sys.executable, "-c", START, str(tmp_path / name), "--ranks", "2"],
                env=os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
        return tmp_path / name, agents[-1]

    yield begin
    for each in agents:
        with suppress(ProcessLookupError):
            os.killpg(each.pid, signal.SIGKILL)
        each.communicate()


def test_a_rank_that_fails_ends_the_trainer_with_its_error(start: Start) -> None:
    run_dir, process = start("fails")
    said = process.communicate(timeout=LIMIT)[1]
    assert process.returncode == 1
    lines = said.strip().splitlines()
    assert any("no such key" in line for line in lines)
    assert lines[-1] == "trainer rank 1 of 2 exited with code 1"
    report = json.loads((run_dir / "status/trainer.json").read_text())
    assert (report["state"], report["detail"]) == ("failed", {"error": "no such key"})


def test_a_single_rank_that_gets_sigterm_is_a_failure(start: Start) -> None:
    run_dir, process = start("waits")
    eventually((run_dir / "pid").exists, process)
    os.kill(int((run_dir / "pid").read_text()), signal.SIGTERM)
    said = process.communicate(timeout=LIMIT)[1]
    assert process.returncode == 1
    assert said.strip().splitlines()[-1] == "trainer rank 1 of 2 was ended by SIGTERM"
