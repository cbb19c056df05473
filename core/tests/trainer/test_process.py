"""The trainer as the supervisor starts it: a process, a run directory, a transport."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import warm
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from waiting import LIMIT, eventually

from prime_rl.config.run import RunConfig
from prime_rl.plugins.status import StatusReport, read_status
from prime_rl.rundir.launch import Launch
from prime_rl.wire import MicroBatch, encode_batch
from prime_rl.wire.transport import make_sender

Start = Callable[..., tuple[Launch, subprocess.Popen[str]]]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    for name in ("configs", "status"):
        (directory / name).mkdir(parents=True)
    return directory


@pytest.fixture
def start(run_dir: Path, model_dir: Path) -> Iterator[Start]:
    """Write the two configs and start the trainer; it is gone when the test is."""
    processes: list[subprocess.Popen[str]] = []

    def start(
        transport: str, wait_for_model: bool = False, **trainer: Any
    ) -> tuple[Launch, subprocess.Popen[str]]:
        table = {"device": "cpu", "loss": {"type": "plain"}} | trainer
        config = RunConfig.model_validate(
            {"model": {"name": "tiny"}, "max_steps": 3, "trainer": table}
        )
        (run_dir / "configs/run.json").write_text(config.model_dump_json())
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        launch = Launch(
            model_path=str(model_dir),
            wait_for_model=wait_for_model,
            served_model_name="tiny",
            engine_urls=[],
            transport_type=transport,
            transport_host="127.0.0.1",
            transport_ports=[port],
        )
        launch.write(run_dir)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        command = [sys.executable, "-W", "error::ResourceWarning", "-m", "prime_rl.trainer"]
        processes.append(
            warm.Popen([*command, str(run_dir)], env=environment, stderr=subprocess.PIPE, text=True)
        )
        return launch, processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def wait_for(
    run_dir: Path, what: Callable[[StatusReport], bool], process: subprocess.Popen[str]
) -> None:
    """Until the trainer's status says so."""

    def said() -> bool:
        report = read_status(run_dir / "status/trainer.json")
        return report is not None and what(report)

    eventually(said, process)


async def send_three(
    launch: Launch, run_dir: Path, row: MicroBatch, process: subprocess.Popen[str]
) -> None:
    """The same batch for steps 1 to 3, then wait for the trainer to end."""
    sender = make_sender(launch, run_dir)
    for step in (1, 2, 3):
        await sender.send(step, [encode_batch(step, [row])])
    await asyncio.to_thread(process.wait, LIMIT)
    sender.close()


@pytest.mark.parametrize("transport", ["filesystem", "zmq"])
async def test_three_steps_are_trained_published_and_measured(
    transport: str, start: Start, run_dir: Path, model_dir: Path, pack: Any, random_documents: Any
) -> None:
    launch, process = start(transport, optim={"lr": 1e-2})
    row = pack(random_documents([9, 5, 9]))
    await send_three(launch, run_dir, row, process)
    assert process.returncode == 0, process.stderr and process.stderr.read()

    lines = [json.loads(line) for line in (run_dir / "trainer.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    metrics = [line["metrics"] for line in lines]
    assert metrics[2]["loss/mean"] < metrics[0]["loss/mean"]  # advantages are 1 everywhere
    names = {"loss/mean", "loss/rl", "entropy/all/mean", "mismatch_kl/a/mean"}
    names |= {"mismatch_kl/all/max", "logprob_gap/max", "perf/throughput"}
    names |= {"optim/lr", "optim/grad_norm", "time/step", "time/wait_for_batch", "tokens/rl"}
    assert names | {"time/forward_backward", "time/broadcast_weights"} <= metrics[0].keys()

    assert sorted(path.name for path in (run_dir / "broadcasts").iterdir()) == ["step_2", "step_3"]
    assert (run_dir / "broadcasts/step_3/STABLE").exists()
    last = load_file(run_dir / "broadcasts/step_3/model.safetensors")
    exported = AutoModelForCausalLM.from_pretrained(run_dir / "weights")
    for name, tensor in last.items():
        assert tensor.equal(exported.state_dict()[name])
    first = AutoModelForCausalLM.from_pretrained(model_dir).state_dict()
    assert not last["model.norm.weight"].equal(first["model.norm.weight"])
    assert (report := read_status(run_dir / "status/trainer.json")) and report.state == "done"


def test_sigterm_while_waiting_ends_it_and_is_no_success(
    start: Start, run_dir: Path, model_dir: Path
) -> None:
    _, process = start("zmq", wait_for_model=True)
    wait_for(run_dir, lambda report: report.waiting_for == "model folder model", process)
    (model_dir / ".ready").touch()
    wait_for(run_dir, lambda report: report.waiting_for == "orchestrator (batch 1)", process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=LIMIT) == 143
    assert process.stderr is not None
    assert "Traceback" not in process.stderr.read()


def test_sigterm_ends_it_even_from_within_one_long_call() -> None:
    """A hash that takes minutes stands in for a backward pass: Python's own handler never runs."""
    code = (
        "import hashlib; from prime_rl.trainer.__main__ import exit_on_signal\n"
        "exit_on_signal(); print('ready', flush=True)\n"
        "hashlib.pbkdf2_hmac('sha256', b'', b'', 2_000_000_000)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=LIMIT) == 143
    finally:
        process.kill()
        process.communicate()


def test_a_loss_that_is_not_installed_fails_at_once_and_is_named(
    start: Start, run_dir: Path
) -> None:
    _, process = start("zmq", loss={"type": "plane"})
    assert process.wait(timeout=LIMIT) == 1
    report = read_status(run_dir / "status/trainer.json")
    assert report is not None
    assert report.state == "failed"
    assert "Did you mean 'plain'?" in str(report.detail["error"])
    assert process.stderr is not None
    assert "Traceback" not in process.stderr.read()
