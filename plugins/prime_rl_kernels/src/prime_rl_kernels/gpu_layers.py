"""Norms, rotary embeddings and SwiGLU on a GPU: one Triton kernel forward and one backward.

transformers computes each by four to ten kernels, which all read and write their tensors. What
``torch.compile`` makes of compiled blocks is as fast, so only blocks that run as they are get
these. Models differ in what they call a norm: a class or function is replaced only if it has our
formula (``layers.py`` compares numbers).

Shapes: B = batch, H = heads, T = tokens, D = size of the last dimension.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from prime_rl_kernels import gpu_ops, layers

MOST_COLUMNS = 16_384
"""A norm of larger rows is left to the model: a program holds a row."""
Hidden = Callable[[Tensor], Tensor]


def replace_layers(model: nn.Module) -> None:
    """Replace the norms and gated MLPs of the model, and the rotary embedding of the modules of its
    classes, in place. On other devices they compute as before."""
    for module in model.modules():
        kind: Any = type(module)
        if hasattr(module, "variance_epsilon") and layers.is_rms_norm(kind):
            module.__class__ = _fast_norm(kind)
        elif _is_silu(getattr(module, "act_fn", None)) and _is_swiglu(kind):
            module.__class__ = _fast_mlp(kind)

    for name in sorted({type(module).__module__ for module in model.modules()}):
        namespace = sys.modules.get(name)
        rotate_both = layers.models_own(getattr(namespace, layers.ROTARY, None))
        if rotate_both is not None and layers.is_rotary(rotate_both):
            setattr(namespace, layers.ROTARY, _fast_rotary(rotate_both))


def _are_on_gpu(*tensors: Tensor) -> bool:
    return all(each.is_cuda and each.dtype != torch.float64 for each in tensors)


# -- norms


class RMSNorm(torch.autograd.Function):
    """``layers.RMSNorm`` of x [..., D] with w [D]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        y, scale = gpu_ops.rms_norm(rows, weight.contiguous(), eps)
        ctx.save_for_backward(rows, weight, scale)
        return cast(Tensor, y.view(x.shape))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, scale = ctx.saved_tensors
        slopes = grad.reshape(rows.shape).contiguous()
        of_x, parts = gpu_ops.rms_norm_backward(slopes, rows, weight.contiguous(), scale)
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = parts.sum(0).to(weight.dtype)

        return of_x.view(grad.shape), of_weight, None


@cache
def _fast_norm(kind: Any) -> type[nn.Module]:
    """A subclass with the name of the class ``kind``: reports show it."""

    def forward(self: Any, x: Tensor, *others: Any, **named: Any) -> Tensor:
        is_plain = not others and not named and x.shape[-1] <= MOST_COLUMNS
        if not is_plain or not _are_on_gpu(x, self.weight):
            return cast(Tensor, kind.forward(self, x, *others, **named))
        return cast(Tensor, RMSNorm.apply(x, self.weight, self.variance_epsilon))  # type: ignore[no-untyped-call]

    return _subclass(kind, forward)


# -- rotary embeddings


class Rotary(torch.autograd.Function):
    """``layers.Rotary`` of x [B, H, T, D] by cos, sin [B or 1, T, D]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return cast(Tensor, gpu_ops.rotate(_dense(x), cos, sin, False))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return gpu_ops.rotate(_dense(grad), cos, sin, True), None, None


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _fast_rotary(rotate_both: Callable[..., Any]) -> Callable[..., Any]:
    """``rotate_both``, on a GPU by ``Rotary``."""

    def fast(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *others: Any, **named: Any) -> Any:
        is_whole = cos.dim() == 3 and cos.shape[-1] == q.shape[-1]
        if others or named or not is_whole or not _are_on_gpu(q, k, cos, sin):
            return rotate_both(q, k, cos, sin, *others, **named)
        angles = (cos.contiguous(), sin.contiguous())
        return tuple(Rotary.apply(x, *angles) for x in (q, k))  # type: ignore[no-untyped-call]

    fast.replaces = rotate_both  # type: ignore[attr-defined]
    return fast


# -- SwiGLU


class SwiGLU(torch.autograd.Function):
    """y = silu(gate) up (Shazeer, "GLU Variants Improve Transformer", 2020)."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        columns = (gate.contiguous(), up.contiguous())
        ctx.save_for_backward(*columns)
        return cast(Tensor, gpu_ops.swiglu(*columns))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gradients = gpu_ops.swiglu_backward(grad.contiguous(), *ctx.saved_tensors)
        return cast(tuple[Tensor, Tensor], gradients)


def _is_silu(activation: Any) -> bool:
    """Whether an activation of transformers is silu; some have learned parameters."""
    if not isinstance(activation, nn.Module) or any(True for _ in activation.parameters()):
        return activation is F.silu
    x = torch.linspace(-4, 4, 9)
    return layers.agree(lambda: activation(x), lambda: F.silu(x))


@cache
def _is_swiglu(kind: Any) -> bool:
    """Whether a module of this class is down_proj(silu(gate_proj(x)) up_proj(x))."""
    if getattr(kind, "_is_fast", False) or kind.__init__ is nn.Module.__init__:
        return False
    gate: Hidden = lambda x: 2 * x - 1  # noqa: E731  # three unlike stand-ins for products
    up: Hidden = lambda x: 1 - x  # noqa: E731
    down: Hidden = lambda x: 3 * x + 2  # noqa: E731
    parts = {"gate_proj": gate, "up_proj": up, "down_proj": down, "act_fn": F.silu}
    module: Any = SimpleNamespace(**parts)
    x = torch.linspace(-3, 2, 24).view(2, 12)
    return layers.agree(lambda: kind.forward(module, x), lambda: down(F.silu(gate(x)) * up(x)))


@cache
def _fast_mlp(kind: Any) -> type[nn.Module]:
    """A subclass with the name of the class ``kind``."""

    def forward(self: Any, x: Tensor) -> Any:
        gate = self.gate_proj(x)
        up = self.up_proj(x)
        if gate.dtype == up.dtype and _are_on_gpu(gate, up):
            product = SwiGLU.apply(gate, up)  # type: ignore[no-untyped-call]
        else:
            product = self.act_fn(gate) * up
        return self.down_proj(product)

    return _subclass(kind, forward)


def _subclass(kind: Any, forward: Callable[..., Any]) -> type[nn.Module]:
    made = type(kind.__name__, (kind,), {"forward": forward, "_is_fast": True})
    made.__module__ = kind.__module__
    return made
