"""Matrix products of float32 tensors on CPU, by oneDNN.

torch computes them by MKL, which reaches less than half of an AMD processor's rate (measured on
EPYC: 90 against 200 GFLOP/s per core). oneDNN, which torch has too, uses the same wide instructions
on every maker's processors. torch offers it for float32 as an operator of its compiler only.

Shapes: N = rows, D = inputs, E = outputs.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers import PreTrainedModel

MIN_OPERATIONS = 2**20
"""N D E of a product. Smaller ones take as long as the call of the operator: 10 microseconds."""


def _found(name: str) -> Any:
    """An operator of torch 2.9 to 2.13, or None: this torch is built without oneDNN."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    return getattr(torch.ops.mkldnn, name, None)


_operator = _found("_linear_pointwise")
_reorder = _found("_reorder_linear_weight")
HAS_ONEDNN = _operator is not None


def padded_rows(rows: int) -> int:
    """The number of rows to compute in place of ``rows``: at least two, and with five significant
    bits. oneDNN compiles each shape anew: 1 ms, and 1 MiB that stays. So of the numbers between N
    and 2 N, 16 are in use, for 3 % more rows in the mean."""
    step = 1 << max(0, rows.bit_length() - 5)
    return max(2, -(-rows // step) * step)


def pad_rows(x: Tensor) -> Tensor:
    """x [N, D], followed by ``padded_rows(N) - N`` rows of zeros if it is for oneDNN."""
    missing = padded_rows(len(x)) - len(x) if HAS_ONEDNN and is_plain(x) else 0
    return functional.pad(x, (0, 0, 0, missing)) if missing else x


def independent_rows(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T without a gradient, by oneDNN: a row of the result has the same bits whatever
    the other rows are. x: [N, D]; weight: [E, D], which may be a view; float32 on CPU."""
    # A row alone may be summed in another order.
    return cast(Tensor, _operator(pad_rows(x), weight, None, "none", [], ""))[: len(x)]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias without a gradient, in the dtype of ``x``. x: [..., D]; weight: [E, D];
    bias: [E]. Both may be views. Small products, other dtypes and other devices are torch's."""
    if not _is_for_onednn(x, weight):
        return functional.linear(x, weight, bias)
    return cast(Tensor, _operator(x, weight, bias, "none", [], ""))


class PackedWeight:
    """A weight [E, D] that many products without a gradient share. On CPU it has a copy in the
    layout that oneDNN reads. With 8 rows such products take 0.6 times as long, with 64 rows 0.9
    times. A row of the result has the same bits whatever the other rows are, for which small
    weights take 20 microseconds instead of 2."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.pack()

    def pack(self) -> None:
        """Copy the weight again. Call it whenever it has changed."""
        on_cpu = self.weight.device.type == "cpu" and self.weight.dtype == torch.float32
        self._copy = _reorder(self.weight, None) if _reorder is not None and on_cpu else None

    def __call__(
        self, x: Tensor, bias: Tensor | None = None, added: Tensor | None = None
    ) -> Tensor:
        """x @ weight.T + bias or + added. x: [N, D], of the weight's dtype; bias: [E]; added and
        result: [N, E]. At most one of ``bias`` and ``added`` is given."""
        if self._copy is None:
            product = functional.linear(x, self.weight, bias)
            return product if added is None else added + product

        rows = pad_rows(x)  # a row alone may be summed in another order
        if added is None:
            product = _operator(rows, self._copy, bias, "none", [], "")
        else:
            product = _operator.binary(rows, pad_rows(added), self._copy, None, "add")

        return cast(Tensor, product)[: len(x)]


def is_plain(*tensors: Tensor) -> bool:
    """Whether all are float32 on CPU, outside of autocast."""
    if torch.is_autocast_enabled("cpu"):
        return False
    return all(x.device.type == "cpu" and x.dtype == torch.float32 for x in tensors)


def _is_for_onednn(x: Tensor, weight: Tensor) -> bool:
    return (
        _operator is not None
        and x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and x.numel() * len(weight) >= MIN_OPERATIONS
    )


class _Linear(torch.autograd.Function):
    """``linear`` with its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = grad.flatten(0, -2)
        return (
            linear(grad, weight.T) if of_x else None,
            linear(rows.T, x.flatten(0, -2).T) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``linear`` with its gradients; under autocast torch's."""
    if torch.is_autocast_enabled("cpu") or not _is_for_onednn(x, weight):
        return functional.linear(x, weight, bias)
    return cast(Tensor, _Linear.apply(x, weight, bias))  # type: ignore[no-untyped-call]


class Linear(nn.Linear):
    """A linear layer of the trainer on CPU."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., E] of [..., D]."""
        return product(x, self.weight, self.bias)


def replace_linears(model: nn.Module) -> None:
    """Make the model's linear layers ``Linear``, in place; their parameters and names stay. Not the
    LM head: the trainer fuses what is exactly ``nn.Linear``."""
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    for module in model.modules():
        if type(module) is nn.Linear and module is not head:
            module.__class__ = Linear
