"""The ranks of two machines find each other, though both machines' names resolve to loopback and
each has a second network. The machines are network namespaces, which takes root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from prime_rl_ray.agent import interfaces

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


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_gloo_and_nccl_listen_at_the_nodes_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("GLOO", "NCCL"):
        monkeypatch.delenv(f"{library}_SOCKET_IFNAME", raising=False)
    assert interfaces("127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    assert interfaces("192.0.2.1") == {}  # reserved for documentation: no interface has it
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    assert interfaces("127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo"}
