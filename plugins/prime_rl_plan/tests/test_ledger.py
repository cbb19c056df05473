"""Bytes that operations move, in whole numbers, as they are and in compiled blocks."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from prime_rl_plan.ledger import LAYOUTS, Ledger

SIDE = 1000
MB = 4 * SIDE * SIDE
"""A matrix in float32."""


def charged(run: object, fuses: bool) -> dict[str, float]:
    """Matrices that each operation reads or writes, by name, in the order of the program."""
    ledger = Ledger(pairs=0, rounds=False, fuses=fuses)
    with FakeTensorMode():
        x = torch.empty(SIDE, SIDE)
        with ledger:
            ledger.region, ledger.charges = "forward", True
            kept = run(x)  # type: ignore[operator]
            ledger.charges = False
    del kept
    moved: dict[str, float] = {}
    for (_, name, _, _, size), number in ledger.costs.items():
        moved[name] = moved.get(name, 0) + size * number / MB
    return {name: round(size, 3) for name, size in moved.items() if name != "zeros"}


def chain(x: Tensor) -> Tensor:
    y = (x * 2 + 1).exp()
    return y @ x


def reused(x: Tensor) -> list[Tensor]:
    """What one run makes and a later one reads."""
    y = x * 2
    z = x @ x
    return [y + z, y, z]


def in_place(x: Tensor) -> Tensor:
    return x.mul_(2).add_(1)


def views(x: Tensor) -> Tensor:
    return torch.ops.aten._unsafe_view(x.detach().view(-1), [SIDE, SIDE]).t()


def optimizer(x: Tensor) -> list[Tensor]:
    """One step of AdamW on a weight: reads it, its gradient and two moments, and writes all but the
    gradient. Halving a list of gradients reads and writes each."""
    weight, grad, mean, square = (torch.empty_like(x) for _ in range(4))
    torch._foreach_mul_([grad], 0.5)
    count = torch.zeros(())
    torch._fused_adamw_(
        [weight], [grad], [mean], [square], [], [count],
        lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip
    return [weight, mean, square]


def allocated(x: Tensor) -> list[Tensor]:
    """Memory that is taken, of which a half is written; and shapes that change in place."""
    taken = [torch.empty(SIDE, SIDE), torch.empty_like(x), torch.empty_strided(x.shape, (1, SIDE))]
    taken += [x.new_empty(SIDE, SIDE), x.new_empty_strided(x.shape, (SIDE, 1))]
    taken[0].copy_(x)
    taken[1].fill_(1.0)
    taken[2].unsqueeze_(0).squeeze_(0).t_()
    return taken


OPTIMIZER = {"_foreach_mul_": 2, "_fused_adamw_": 7}


@pytest.mark.parametrize(
    ("run", "plain", "fused"),
    [
        # mm reads y and x, and writes; fused, y is written for it.
        (chain, {"mul": 2, "add": 2, "exp": 2, "mm": 3}, {"mul": 1, "add": 0, "exp": 0, "mm": 4}),
        # y is written for the later run, which also reads z. No operation reads its own result.
        (reused, {"mul": 2, "mm": 3, "add": 3}, {"mul": 1, "mm": 3, "add": 3}),
        (in_place, {"mul_": 2, "add_": 2}, {"mul_": 2, "add_": 1}),
        (views, {}, {}),
        (optimizer, OPTIMIZER, OPTIMIZER),
        # copy_ reads one matrix and writes one, fill_ writes one.
        (allocated, {"copy_": 2, "fill_": 1}, {"copy_": 2, "fill_": 1}),
    ],
)
def test_compiled_blocks_move_what_kernels_exchange(
    run: object, plain: dict[str, float], fused: dict[str, float]
) -> None:
    assert charged(run, fuses=False) == plain
    assert charged(run, fuses=True) == fused


def test_tensors_by_which_dtensor_asks_for_a_shape_are_no_memory() -> None:
    """torch 2.11 makes them where the ledger sees them. As code of that module would."""
    (module,) = LAYOUTS
    assert hasattr(importlib.import_module(module), "ShardingPropagator")
    asks: dict[str, Any] = {"__name__": module, "torch": torch}
    exec("def shape_of(size): return (torch.empty(size, dtype=torch.uint8) + 1).shape", asks)
    ledger = Ledger(pairs=0, rounds=False)
    with FakeTensorMode(), ledger:
        assert asks["shape_of"](1000) == (1000,)
        assert ledger.total == 0 and not ledger.peaks
        kept = torch.empty(1000, dtype=torch.uint8)
        assert ledger.total == 1000
    del kept
