"""What plan's ledger counts of the kernels' own operations, in whole numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from prime_rl_kernels import gpu_ops, offload
from prime_rl_plan.ledger import Ledger

SIDE = 1000
MB = 4 * SIDE * SIDE
"""A matrix in float32."""


def charged(run: Callable[[Tensor], Tensor], fuses: bool) -> dict[str, float]:
    """Matrices that each operation reads or writes, by name."""
    ledger = Ledger(pairs=0, rounds=False, fuses=fuses)
    with FakeTensorMode():
        x = torch.empty(SIDE, SIDE)
        with ledger:
            ledger.region, ledger.charges = "forward", True
            kept = run(x)
            ledger.charges = False
    del kept
    return {name: size * number / MB for (_, name, _, _, size), number in ledger.costs.items()}


def test_a_triton_kernel_moves_what_it_reads_and_writes() -> None:
    def swiglu(x: Tensor) -> Tensor:
        return gpu_ops.swiglu(x, x + 1)

    assert charged(swiglu, fuses=False) == {"add": 2, "swiglu": 3}
    # The sum is written for the kernel.
    assert charged(swiglu, fuses=True) == {"add": 1, "swiglu": 4}


def test_inputs_on_the_host_are_no_memory_of_the_gpu_and_cross_the_bus() -> None:
    ledger = Ledger(pairs=0, rounds=False)
    with FakeTensorMode():
        x = torch.empty(SIDE, SIDE)
        with ledger:
            ledger.region, ledger.charges = "forward", True
            copy = offload.to_host(x)
            assert (ledger.total, ledger.on_host) == (0, MB)
            back = offload.to_device(copy, x.device)
            assert ledger.total == MB
            del copy
            assert (ledger.on_host, ledger.most_on_host) == (0, MB)
            ledger.charges = False
    assert back.shape == x.shape
    crossed = {
        name: size * number
        for (_, name, dtype, _, size), number in ledger.costs.items()
        if dtype == "host"
    }
    assert crossed == {"copy_": 2 * MB}
