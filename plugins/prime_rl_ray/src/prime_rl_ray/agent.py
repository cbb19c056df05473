"""The actor on a node of the cluster. It starts one child process at a time.

If Ray ends the actor, or the driver exits, the kernel ends the child (``exit_with_parent``).
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import ray

from prime_rl.rundir.machine import free_ports
from prime_rl_app.children import Child, end, start
from prime_rl_env_workers.placed import give_up

POLL_SECONDS = 0.1
STARTS = 3
"""Times in a row that a server may end before it is ready."""
NODE_ADDRESS = "PRIME_RL_NODE_ADDRESS"
"""Where a process listens for the others of a broadcast of weights, and of a process group."""
SIOCGIFADDR = 0x8915
"""Linux: asks for an interface's address."""


class Agent:
    """A Ray actor. Its methods are coroutines, so that all run on one thread, which lives as long
    as the actor: the kernel ends a child with the thread that started it."""

    def __init__(self) -> None:
        self._child: Child | None = None

    async def place(self, num_ports: int) -> tuple[str, list[int]]:
        """This node's address, and free ports on it."""
        address = str(ray.util.get_node_ip_address())
        return address, free_ports(num_ports, address)

    async def run(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        log: str,
        cwd: str,
        needs: Sequence[str],
        patience: float,
        inherits: Sequence[str] | None = None,
    ) -> int | str:
        """Start the process and wait for its end. Returns the exit code, or the reason why it was
        not started if a needed file does not appear within ``patience`` seconds. Processes that an
        earlier one left running are ended first: they might use the GPU. ``inherits``: see
        ``ProcessCommand``."""
        await self.end()
        deadline = time.monotonic() + patience
        for needed in (argv[0], *needs):
            if not await _appears(Path(needed), deadline):
                return (
                    f"{needed} does not exist on node {socket.gethostname()}. The environment, "
                    "the run directory and the model must be on every node under the same path."
                )

        popen: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen
        there = partial(popen, cwd=cwd) if os.path.isdir(cwd) else None
        address = str(ray.util.get_node_ip_address())
        env = interfaces(address) | {NODE_ADDRESS: address} | dict(env)
        self._child = start(name, argv, env, log=Path(log), popen=there, inherits=inherits)
        while (code := self._child.exit_code) is None:
            await asyncio.sleep(POLL_SECONDS)
        return code

    async def keep(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        log: str,
        cwd: str,
        needs: Sequence[str],
        patience: float,
        file: str,
    ) -> None:
        """Run a server, which writes to ``file`` when it is ready, and start it again when it
        ends. If it ends ``STARTS`` times in a row before, ``file`` gets the reason."""
        failed = 0
        announced = Path(file)
        argv = [*argv, "--host", str(ray.util.get_node_ip_address())]
        while failed < STARTS:
            announced.unlink(missing_ok=True)
            result = await self.run(
                name, argv, env=env, log=log, cwd=cwd, needs=needs, patience=patience
            )
            if isinstance(result, str):
                return give_up(announced, result)
            failed = 0 if _is_there(announced) else failed + 1

        last = "".join(self._child.last_lines(1)) if self._child is not None else ""
        give_up(announced, f"{name} ended {STARTS} times before it was ready: {last} ({log})")

    async def end(self) -> None:
        """End the process, and all processes that it started."""
        if self._child is not None:
            await asyncio.to_thread(end, [self._child])


def interfaces(address: str) -> dict[str, str]:
    """The environment that has gloo and NCCL listen at ``address``, where Ray reaches this node.
    Otherwise they resolve the host's name, perhaps to loopback, or take another network. Variables
    that the environment has already are kept."""
    name = interface_of(address)
    keys = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {key: name for key in keys if key not in os.environ} if name else {}


def interface_of(address: str) -> str | None:
    """The network interface with this IPv4 address. None: it is not found."""
    if sys.platform != "linux":
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name

    return None


async def _appears(path: Path, deadline: float) -> bool:
    while not _is_there(path):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(POLL_SECONDS)
    return True


def _is_there(path: Path) -> bool:
    """Whether a look at a shared disk sees it. One that the disk refuses has seen nothing."""
    with suppress(OSError):
        return path.exists()
    return False
