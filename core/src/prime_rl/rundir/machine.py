"""What this machine offers to a run: GPUs and free ports. This module does not import torch, which
would hold a CUDA context in the supervisor."""

from __future__ import annotations

import os
import random
import socket
import subprocess
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path

from prime_rl.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
ASK = ("nvidia-smi", "--query-gpu=index", "--format=csv,noheader")
ASK_SECONDS = 120.0

FIRST_PORT = 20000
"""Lowest port that a run chooses, above the ports of well-known services."""
TRIES = 100
"""Random ports to try before the kernel chooses."""


def visible_gpus() -> list[str]:
    """CUDA's names of the GPUs that this process may use, in CUDA's order: those of
    ``CUDA_VISIBLE_DEVICES``, else all that ``nvidia-smi`` lists. Empty: none."""
    visible = os.environ.get(VISIBLE)
    if visible is None:
        return list(_counted(os.environ.get("PATH", "")))

    names = [name.strip() for name in visible.split(",") if name.strip()]
    # CUDA stops at the first invalid entry: -1 hides all that follow.
    return names[: names.index("-1")] if "-1" in names else names


@cache
def _counted(path: str) -> tuple[str, ...]:
    """Cached for each search path, because the driver takes a second to answer."""
    try:
        done = subprocess.run(ASK, capture_output=True, text=True, timeout=ASK_SECONDS, check=True)
    except subprocess.TimeoutExpired as error:  # silence does not mean that there is none
        raise ConfigError(
            f"nvidia-smi has not answered for {ASK_SECONDS:g} s, so the GPUs are unknown. Start "
            "again when it answers, or name the GPUs in CUDA_VISIBLE_DEVICES (empty: none)."
        ) from error
    except (OSError, subprocess.SubprocessError):
        return ()

    return tuple(line.strip() for line in done.stdout.splitlines() if line.strip().isdecimal())


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Distinct ports without a listener.

    The caller binds them seconds later. They are therefore outside the kernel's ephemeral range,
    and random, so that two runs hardly choose the same.
    """
    try:
        last = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text("utf-8").split()[0])
    except (OSError, ValueError):  # not Linux
        last = 32768

    numbers = range(FIRST_PORT, last)
    with ExitStack() as stack:
        # All sockets stay bound until the end, so no two get the same port.
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            for number in random.SystemRandom().sample(numbers, min(TRIES, len(numbers))):
                with suppress(OSError):
                    each.bind((host, number))
                    break
            else:
                each.bind((host, 0))  # any port; or raise why none can be bound
        return [each.getsockname()[1] for each in sockets]
