"""The Triton kernels of ``triton_kernels.py`` as operations of torch, without gradients.

torch knows their results' shapes, so that ``prime-rl plan`` counts each as one kernel on a machine
without a GPU or triton.

Shapes: as in ``triton_kernels.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

TILE = 4096
"""Numbers that a program of a norm holds at once."""
BLOCK = 1024
"""Numbers that a program of the other kernels holds at once."""
PROGRAMS = 1024
"""Most programs of a norm's backward pass: each writes a sum of the weight's gradient."""
LIBRARY: Any = torch.library.Library("prime_rl", "FRAGMENT")  # type: ignore[no-untyped-call]
Shapes = TypeVar("Shapes", bound=Callable[..., Any])


def operation(mutates: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function an operation of torch. ``mutates``: the parameters that it writes.

    ``torch.library.custom_op`` does the same with layers in Python around each call, for gradients
    and for versions of tensors. These take 7 microseconds, and nothing here needs them.
    """

    def define(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__
        schema = torch.library.infer_schema(function, mutates_args=mutates)
        LIBRARY.define(name + schema)
        LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        made: Callable[..., Any] = getattr(torch.ops.prime_rl, name).default
        return made

    return define


def shapes_of(name: str) -> Callable[[Shapes], Shapes]:
    """Make a function the one that says what the operation ``name`` returns."""

    def register(function: Shapes) -> Shapes:
        torch.library.register_fake(f"prime_rl::{name}", function, lib=LIBRARY)
        return function

    return register


def power_of_two(number: int) -> int:
    """The least one that is not smaller. Sides of a kernel's tiles are powers of two."""
    return 1 << max(number - 1, 0).bit_length()


def _tile(size: int) -> tuple[int, int]:
    """Rows and columns of a tile of rows of ``size`` numbers."""
    columns = power_of_two(size)
    return max(TILE // columns, 1), columns


# -- norms


@operation()
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y [N, D] and the scales [N] in float32 of x [N, D], contiguous."""
    from prime_rl_kernels import triton_kernels

    y, scale = _rms_norm_outputs(x, weight, eps)
    num_rows, size = x.shape
    rows, columns = _tile(size)
    if num_rows:
        triton_kernels.rms_norm[-(-num_rows // rows),](
            x, weight, y, scale, num_rows, size, eps, ROWS=rows, SIZE=columns
        )
    return y, scale


@shapes_of("rms_norm")
def _rms_norm_outputs(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(x.dtype, weight.dtype)
    return torch.empty_like(x, dtype=dtype), x.new_empty(len(x), dtype=torch.float32)


@operation()
def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of x [N, D], and of the weight in parts: [P, D] in float32."""
    from prime_rl_kernels import triton_kernels

    of_x, of_weight = _rms_norm_gradients(grad, x, weight, scale)
    num_rows, size = x.shape
    rows, columns = _tile(size)
    num_tiles = -(-num_rows // (rows * len(of_weight)))
    triton_kernels.rms_norm_backward[len(of_weight),](
        grad,
        x,
        weight,
        scale,
        of_x,
        of_weight,
        num_rows,
        size,
        num_tiles,
        ROWS=rows,
        SIZE=columns,
    )
    return of_x, of_weight


@shapes_of("rms_norm_backward")
def _rms_norm_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    num_rows, size = x.shape
    rows, _ = _tile(size)
    num_programs = min(max(-(-num_rows // rows), 1), PROGRAMS)
    return torch.empty_like(x), x.new_empty(num_programs, size, dtype=torch.float32)


# -- rotary embeddings


@operation()
def rotate(x: Tensor, cos: Tensor, sin: Tensor, backward: bool) -> Tensor:
    """x [B, H, T, D], of which D is contiguous, by cos, sin [B or 1, T, D], contiguous.
    ``backward``: by the transposed rotation. The result lies in memory as ``x``."""
    from prime_rl_kernels import triton_kernels

    y = torch.empty_like(x)
    batch, heads, tokens, size = x.shape
    half = size // 2
    if x.numel():
        triton_kernels.rotate[batch * tokens,](
            x,
            cos,
            sin,
            y,
            tokens,
            heads,
            half,
            *x.stride()[:3],
            *y.stride()[:3],
            cos.stride(0) if len(cos) > 1 else 0,
            BACKWARD=backward,
            HEADS=power_of_two(heads),
            HALF=power_of_two(half),
        )
    return y


@shapes_of("rotate")
def _rotated(x: Tensor, cos: Tensor, sin: Tensor, backward: bool) -> Tensor:
    return torch.empty_like(x)


# -- SwiGLU


@operation()
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) up, of contiguous tensors of one shape and dtype."""
    from prime_rl_kernels import triton_kernels

    y = torch.empty_like(gate)
    size = gate.numel()
    if size:
        triton_kernels.swiglu[-(-size // BLOCK),](gate, up, y, size, BLOCK=BLOCK)
    return y


@shapes_of("swiglu")
def _swiglu_output(gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty_like(gate)


@operation()
def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of both."""
    from prime_rl_kernels import triton_kernels

    of_gate, of_up = _swiglu_gradients(grad, gate, up)
    size = gate.numel()
    if size:
        triton_kernels.swiglu_backward[-(-size // BLOCK),](
            grad, gate, up, of_gate, of_up, size, BLOCK=BLOCK
        )
    return of_gate, of_up


@shapes_of("swiglu_backward")
def _swiglu_gradients(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gate), torch.empty_like(up)


# -- the LM head


@operation(mutates=("peak", "total", "moment", "chosen"))
def fold_logits(
    logits: Tensor,
    temperatures: Tensor | None,
    labels: Tensor,
    first: int,
    peak: Tensor,
    total: Tensor,
    moment: Tensor,
    chosen: Tensor,
    weights_dtype: torch.dtype | None,
) -> Tensor:
    """Fold a block of logits [N, W] in float32, the words from ``first`` on, into the running sums
    ``peak``, ``total``, ``moment`` [N], and those of ``labels`` [N, L] into ``chosen`` [N, L].
    Returns exp(logits / temperature - peak) [N, W] in ``weights_dtype``; without one nothing [0].
    """
    from prime_rl_kernels import triton_kernels

    weights = _weights(logits, weights_dtype)
    num_rows, width = logits.shape
    if num_rows:
        triton_kernels.fold_logits[num_rows,](
            logits,
            peak if temperatures is None else temperatures,
            labels,
            peak,
            total,
            moment,
            chosen,
            weights,
            first,
            width,
            labels.shape[1],
            HAS_TEMPERATURES=temperatures is not None,
            WRITES=weights_dtype is not None,
            BLOCK=BLOCK,
        )
    return weights


@shapes_of("fold_logits")
def _fold_outputs(logits: Tensor, *others: Any) -> Tensor:
    *_, weights_dtype = others
    return _weights(logits, weights_dtype)


def _weights(logits: Tensor, dtype: torch.dtype | None) -> Tensor:
    return logits.new_empty(0) if dtype is None else torch.empty_like(logits, dtype=dtype)


@operation()
def logit_gradients(
    logits: Tensor,
    temperatures: Tensor | None,
    labels: Tensor,
    first: int,
    log_normalizers: Tensor,
    grad: Tensor,
    entropies: Tensor | None,
    entropy_grad: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient in ``dtype`` of a block of logits [N, W] in float32, with those of the
    log-probabilities, ``grad`` [N, L], and of the entropies [N]."""
    from prime_rl_kernels import triton_kernels

    of_logits = torch.empty_like(logits, dtype=dtype)
    num_rows, width = logits.shape
    if num_rows:
        triton_kernels.logit_gradients[num_rows,](
            logits,
            log_normalizers if temperatures is None else temperatures,
            labels,
            log_normalizers,
            grad,
            log_normalizers if entropies is None else entropies,
            log_normalizers if entropy_grad is None else entropy_grad,
            of_logits,
            first,
            width,
            labels.shape[1],
            HAS_TEMPERATURES=temperatures is not None,
            HAS_ENTROPIES=entropies is not None,
            BLOCK=BLOCK,
        )
    return of_logits


@shapes_of("logit_gradients")
def _logit_gradients(logits: Tensor, *others: Any) -> Tensor:
    *_, dtype = others
    return torch.empty_like(logits, dtype=dtype)
