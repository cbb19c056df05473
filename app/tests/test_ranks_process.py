"""The trainer's ranks as the supervisor starts them: an agent, its children, a wire."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import warm
from safetensors.torch import load_file
from trainer_fixtures import model_dir as model_dir
from trainer_fixtures import pack as pack
from trainer_fixtures import random_documents as random_documents

from prime_rl.plugins.status import read_status
from prime_rl.rundir.launch import Launch
from prime_rl.rundir.machine import free_ports
from prime_rl.wire import encode_batch
from prime_rl.wire.transport import make_sender
from prime_rl_app.commands import trainer_command
from prime_rl_app.config import build_config

Start = Callable[..., tuple[Launch, list[subprocess.Popen[str]]]]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    for name in ("configs", "status"):
        (directory / name).mkdir(parents=True)
    return directory


@pytest.fixture
def start(run_dir: Path, model_dir: Path) -> Iterator[Start]:
    """Start the trainer of two ranks; nothing of it is left when the test is over."""
    agents: list[subprocess.Popen[str]] = []

    def start(nodes: int = 1) -> tuple[Launch, list[subprocess.Popen[str]]]:
        trainer = {"device": "cpu", "optim": {"lr": 1e-2}}
        config = build_config({"model": {"name": "tiny"}, "max_steps": 2, "trainer": trainer})
        (run_dir / "configs/run.json").write_text(config.model_dump_json())
        *wire, meeting = free_ports(3)
        launch = Launch(
            model_path=str(model_dir),
            served_model_name="tiny",
            engine_urls=[],
            transport_type="zmq",
            transport_host="127.0.0.1",
            transport_ports=wire,
            num_ranks=2,
            trainer_nodes=nodes,
            rendezvous=f"127.0.0.1:{meeting}",
        )
        launch.write(run_dir)
        env = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        if nodes > 1:  # gloo would ask for the name of this machine
            env |= {"GLOO_SOCKET_IFNAME": "lo"}
        agents.extend(
            warm.Popen(
                trainer_command(launch, run_dir),
                env=env,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            for _ in range(nodes)
        )
        return launch, agents

    yield start
    for agent in agents:
        with suppress(ProcessLookupError):
            os.killpg(agent.pid, signal.SIGKILL)
        agent.communicate()


def frames(step: int, pack: Any, random_documents: Any) -> list[bytes]:
    """Other tokens for each rank."""
    rows = [pack(random_documents([9, 5 + rank], seed=rank)) for rank in range(2)]
    return [encode_batch(step, [row]) for row in rows]


async def train(
    launch: Launch, run_dir: Path, agents: list[subprocess.Popen[str]], make: Callable[..., Any]
) -> None:
    """Both steps, until the trainer is done."""
    sender = make_sender(launch, run_dir)
    for step in (1, 2):
        await sender.send(step, make(step))
    for agent in agents:
        await asyncio.to_thread(agent.wait, 90)
    sender.close()


def check_trained(run_dir: Path, model_dir: Path) -> None:
    lines = [json.loads(line) for line in (run_dir / "trainer.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["metrics"]["tokens/rl"] == 8 + 4 + 8 + 5  # of both ranks
    last = load_file(run_dir / "broadcasts/step_2/model.safetensors")
    exported = load_file(run_dir / "weights/model.safetensors")
    assert all(exported[name].equal(tensor) for name, tensor in last.items())
    first = load_file(model_dir / "model.safetensors")
    assert not last["model.norm.weight"].equal(first["model.norm.weight"])
    assert (report := read_status(run_dir / "status/trainer.json")) and report.state == "done"


@pytest.mark.slow
async def test_two_ranks_train_from_one_wire_and_rank_0_reports_for_both(
    start: Start, run_dir: Path, model_dir: Path, pack: Any, random_documents: Any
) -> None:
    launch, (agent,) = start()
    await train(launch, run_dir, [agent], lambda step: frames(step, pack, random_documents))
    assert agent.stderr is not None
    said = agent.stderr.read()
    assert agent.returncode == 0, said
    check_trained(run_dir, model_dir)
    assert said.count("prime_rl.trainer.loop: Step 1/2") == 1  # rank 0 speaks for all
    assert "[rank 1]" in said


@pytest.mark.slow
async def test_two_nodes_of_one_rank_each_meet_through_torchrun(
    start: Start, run_dir: Path, model_dir: Path, pack: Any, random_documents: Any
) -> None:
    launch, nodes = start(nodes=2)
    await train(launch, run_dir, nodes, lambda step: frames(step, pack, random_documents))
    said = [agent.stderr and agent.stderr.read() for agent in nodes]
    assert [agent.returncode for agent in nodes] == [0, 0], said
    check_trained(run_dir, model_dir)
