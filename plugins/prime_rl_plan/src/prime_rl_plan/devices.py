"""GPUs by name: peaks from the makers' data sheets (dense, without sparsity), and the memory that
the driver shows, which is less than a card is sold with."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass, replace

from prime_rl import ConfigError
from prime_rl_observers.device_usage import peak_of

GIB = 2**30
ON_HOST = "optimizer state on the host"
"""A kind of memory: what ``adamw_offload`` keeps off the GPU."""
INPUTS_ON_HOST = "activations on the host"
"""Another: the inputs of recomputed blocks with ``offload_activations``."""

SHARED = "shared"
"""Traffic between ranks that overlaps with computation: gathered weights, gradients."""
SENT = "sent"
"""Traffic for which a rank waits: tokens to experts and back, tokens for heads and back, experts of
other groups."""

SHEETS: dict[str, tuple[float, float, float, float]] = {
    # name: memory GB as it is sold, float32 TFLOP/s, memory GB/s, link to the other GPUs GB/s in
    # one direction
    "B200": (180, 80, 8000, 900),
    "H200": (141, 67, 4800, 450),
    "H100": (80, 67, 3350, 450),
    "A100": (80, 19.5, 2039, 300),
    "L40S": (48, 91.6, 864, 32),
    "RTX A6000": (48, 38.7, 768, 32),
    "RTX 5090": (32, 104.8, 1792, 64),
    "RTX 4090": (24, 82.6, 1008, 32),
    "RTX 3090": (24, 35.6, 936, 32),
    "A10": (24, 31.2, 600, 32),
    "L4": (24, 30.3, 300, 32),
}
"""SXM versions of the data-center GPUs, linked by NVLink; PCIe for the others. The peak in bfloat16
is that of ``perf/mfu`` (``prime_rl_observers.device_usage``)."""
MIB: dict[tuple[str, int], int] = {
    ("B200", 180): 183359,
    ("H200", 141): 143771,
    ("H100", 80): 81559,
    ("H100", 94): 95830,
    ("A100", 80): 81920,
    ("A100", 40): 40960,
    ("L40S", 48): 46068,
    ("RTX A6000", 48): 49140,
    ("RTX 5090", 32): 32607,
    ("RTX 4090", 24): 24564,
    ("RTX 3090", 24): 24576,
    ("A10", 24): 23028,
    ("L4", 24): 23034,
}
"""What ``nvidia-smi`` shows as the memory of a card, by name and the size that it is sold with."""
OF_MEMORY = {("A100", 40): 1555.0}
"""Memory GB/s of a version with other memory."""
NETWORK = 50e9
"""Bytes/s of each GPU to other machines: one 400 Gbit/s port per GPU."""
HOST = 25e9
"""Bytes/s of each GPU to its host's memory in one direction: PCIe 4.0 with 16 lanes."""

SPEC = re.compile(r"(?:([1-9]\d*)x)?([1-9]\d*)x([A-Za-z][A-Za-z0-9_ ]*?)(?:-(\d+))?")


@dataclass(frozen=True)
class Machines:
    """``nodes`` machines with ``count`` equal GPUs each; no GPU: a CPU."""

    name: str = "CPU"
    nodes: int = 1
    count: int = 0
    memory: float = 0.0
    """Bytes of one GPU."""
    bfloat16: float = 0.0
    """Operations per second."""
    float32: float = 0.0
    bandwidth: float = 0.0
    """Bytes per second."""
    link: float = 0.0
    """Bytes per second between GPUs of a machine."""

    @property
    def total(self) -> int:
        return self.nodes * self.count


def parse(spec: str) -> Machines:
    """``8xH100-80``, or ``2x8xH100-80`` for two machines. Raises ``ConfigError``."""
    match = SPEC.fullmatch(spec.strip())
    names = {name.replace(" ", "").lower(): name for name in SHEETS}
    if match is None or (key := re.sub("[ _]", "", match[3]).lower()) not in names:
        raise ConfigError(
            f"--gpus {spec!r}: expected COUNTxNAME-GB or MACHINESxCOUNTxNAME-GB, such as 8xH100-80 "
            f"or 2x8xH100-80; the known names are {', '.join(sorted(names.values()))}"
        )

    name = names[key]
    memory, float32, bandwidth, link = SHEETS[name]
    size = int(match[4] or memory)
    return Machines(
        name=f"{name} {size} GB",
        nodes=int(match[1] or 1),
        count=int(match[2]),
        memory=card_memory(name, size),
        bfloat16=peak_of(name) or 0.0,
        float32=float32 * 1e12,
        bandwidth=OF_MEMORY.get((name, size), bandwidth) * 1e9,
        link=link * 1e9,
    )


def card_memory(name: str, size: int) -> float:
    """Bytes of a card that is sold with ``size`` GB. For a card that is not in the table, memory is
    the same share of the sold size as for the card in the sheet."""
    if (name, size) in MIB:
        return float(MIB[name, size] * 2**20)
    sold = int(SHEETS[name][0])
    return size * MIB[name, sold] * 2**20 / sold


def here() -> Machines:
    """This machine, as ``nvidia-smi`` describes it; a CPU if it lists no GPU that is known."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return Machines()

    lines = [line.rpartition(",") for line in done.stdout.splitlines() if "," in line]
    for name in SHEETS:
        if lines and re.search(rf"\b{name}\b", lines[0][0]):
            mebibytes = float(lines[0][2])
            size = min(
                (sold for known, sold in MIB if known == name),
                key=lambda sold: abs(MIB[name, sold] - mebibytes),
            )
            return replace(parse(f"{len(lines)}x{name}-{size}"), memory=mebibytes * 2**20)

    return Machines()
