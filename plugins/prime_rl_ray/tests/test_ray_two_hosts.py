"""Ranks, Ray nodes and engines of two machines find each other, though both machines' names resolve
to loopback and each has a second network. The machines are network namespaces, which takes root."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from waiting import LIMIT, eventually

from prime_rl_ray.agent import interfaces

ROOT = Path(__file__).resolve().parents[3]
ADDRESSES = ("10.77.18.1", "10.77.18.2")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[list[str]]]:
    """Of each machine, the command that runs another there."""
    if sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("network namespaces need Linux, root and iproute2")
    names = [f"prl{os.getpid()}{letter}" for letter in "ab"]
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n127.0.1.1 machine-a machine-b\n")
    try:
        for name in names:
            ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    try:
        for link in ("wire0", "other0"):
            ip(*f"link add {link} netns {names[0]} type veth".split(),
               *f"peer {link} netns {names[1]}".split())  # fmt: skip
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", "192.168.77.1/24", "dev", "other0")  # on both the same
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "wire0")
            for device in ("lo", "other0", "wire0"):
                ip("-n", name, "link", "set", device, "up")
        yield [
            ["ip", "netns", "exec", name, "unshare", "--uts", "--mount", "sh", "-c",
             f'hostname machine-{letter}; mount --bind {tmp_path}/hosts /etc/hosts; exec "$@"', "-"]
            for name, letter in zip(names, "ab", strict=True)
        ]  # fmt: skip
    finally:
        for name in names:
            ip("netns", "delete", name)


@pytest.mark.slow
def test_ranks_of_two_machines_meet_at_the_address_that_they_were_given(
    hosts: list[list[str]], tmp_path: Path
) -> None:
    folder = Path(__file__).parent
    processes = []
    for host, address in zip(hosts, ADDRESSES, strict=True):
        command = [*host, sys.executable, str(folder / "netns_rank.py"), "agent"]
        command += [f"{ADDRESSES[0]}:29518", "two-hosts", str(tmp_path)]
        environment = os.environ | {"PRIME_RL_NODE_ADDRESS": address, "PYTHONPATH": str(folder)}
        environment |= {"OMP_NUM_THREADS": "1"}
        with (tmp_path / f"{address}.log").open("w") as log:
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    try:
        codes = [process.wait(300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    logs = "".join((tmp_path / f"{address}.log").read_text()[-2000:] for address in ADDRESSES)
    assert codes == [0, 0], logs
    assert [(tmp_path / f"rank_{rank}").read_text() for rank in (0, 1)] == ["3", "3"]


RAY = [sys.executable, "-W", "ignore", "-m", "ray.scripts.scripts"]
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}
TWO_STEPS = [
    *("--model.warmup_exact", "0.0", "--max_steps", "2", "--inference.replicas", "4"),
    *("--orchestrator.batch_size", "16", "--orchestrator.group_size", "4"),
    *("--orchestrator.eval.env.0.num_examples", "8"),
    *("--trainer.scheduler.type", "constant", "--trainer.scheduler.warmup_steps", "0"),
    *("--trainer.num_ranks", "2", "--deployment.trainer_nodes", "2"),
    *("--weight_broadcast.type", "gloo"),
]


@pytest.fixture
def cluster(hosts: list[list[str]], tmp_path: Path) -> Iterator[str]:
    """Of Ray: its head on the first machine, a worker on the second; its address."""
    pytest.importorskip("ray", reason="ray is not installed")
    port, size = 26379, ["--num-cpus=4", "--object-store-memory=83886080", "--block"]
    address = f"{ADDRESSES[0]}:{port}"
    head = ["--head", f"--port={port}", "--include-dashboard=false"]
    with ExitStack() as stack, tempfile.TemporaryDirectory(prefix="ray") as folder:
        for host, own, joins in zip(
            hosts, ADDRESSES, (head, [f"--address={address}"]), strict=True
        ):
            log = stack.enter_context((tmp_path / f"ray_{own}.log").open("w"))
            command = [*host, *RAY, "start", *joins, f"--node-ip-address={own}", *size]
            # Short: the path of a Unix socket has 107 bytes.
            command += [f"--temp-dir={folder}"] if joins is head else []
            ray = subprocess.Popen(command, env=os.environ | QUIET, stdout=log, stderr=log)
            stack.callback(ray.wait)
            stack.callback(ray.send_signal, signal.SIGTERM)
            text = tmp_path / f"ray_{own}.log"
            eventually(lambda text=text: "Ray runtime started" in text.read_text(), ray)
        yield address


@pytest.mark.slow
def test_a_run_on_two_machines_starts_by_ray_and_publishes_weights_by_gloo(
    hosts: list[list[str]], cluster: str, tmp_path: Path
) -> None:
    """Each machine has four cores, one of which is a rank's, so both have some of the four engines:
    rank 0 sends across."""
    config = ROOT / "configs" / "reverse_text" / "grpo.toml"
    command = [*hosts[0], sys.executable, "-c", "from prime_rl_app.cli import main; main()", "run"]
    command += [str(config), *TWO_STEPS, "--output_dir", str(tmp_path), "--run.name", "ray"]
    command += ["--launcher", "ray", "--launcher.address", cluster]
    with (tmp_path / "output").open("wb") as output:
        environment = os.environ | QUIET | {"OMP_NUM_THREADS": "1"}
        run = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        code = run.wait(LIMIT)
    finally:
        run.kill()
        run.wait()
    assert code == 0, (tmp_path / "output").read_text()[-4000:]
    launch = json.loads((tmp_path / "ray/configs/launch.json").read_text())
    assert sorted(launch["trainer_addresses"]) == [*ADDRESSES]
    assert {urlsplit(url).hostname for url in launch["engine_urls"]} == {*ADDRESSES}
    published = {path.name for path in (tmp_path / "ray/broadcasts/step_1").iterdir()}
    assert {"STABLE", "MEMORY", "meeting.json"} == published  # no file had to follow
    meeting = json.loads((tmp_path / "ray/broadcasts/step_1/meeting.json").read_text())
    assert (meeting["world_size"], meeting["loopback"]) == (5, False)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_gloo_and_nccl_listen_at_the_nodes_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("GLOO", "NCCL"):
        monkeypatch.delenv(f"{library}_SOCKET_IFNAME", raising=False)
    assert interfaces("127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    assert interfaces("192.0.2.1") == {}  # reserved for documentation: no interface has it
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    assert interfaces("127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo"}
