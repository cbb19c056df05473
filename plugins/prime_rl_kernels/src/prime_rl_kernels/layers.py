"""Norms and rotary embeddings of float32 tensors on CPU, with their gradients.

transformers writes them for readability: each is six to ten passes over its tensors forward, and
more backward. Here they are three and five, some in place. Models differ in what they call a norm,
so a class or function is replaced only if it returns the same numbers for random inputs.

Shapes: B = batch, H = heads, T = tokens, D = size of the last dimension.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from prime_rl_kernels.products import is_plain

ROTARY = "apply_rotary_pos_emb"
"""In transformers' modules of models."""


def replace_layers(model: nn.Module) -> None:
    """Replace the norms of the model, and the rotary embedding of the modules of its classes."""
    for module in model.modules():
        kind: Any = type(module)
        if hasattr(module, "variance_epsilon") and is_rms_norm(kind):
            module.__class__ = _fast_norm(kind)

    for name in sorted({type(module).__module__ for module in model.modules()}):
        namespace = sys.modules.get(name)
        rotate = models_own(getattr(namespace, ROTARY, None))
        if rotate is not None and is_rotary(rotate):
            setattr(namespace, ROTARY, _fast_rotary(rotate))


def models_own(rotate: Any) -> Any:
    """The function that a faster one replaced, else the same. A process has one namespace, and
    perhaps one model after another, on a CPU and on a GPU: the last replacement holds."""
    return getattr(rotate, "replaces", rotate)


def agree(found: Callable[[], Any], expected: Callable[[], Any]) -> bool:
    """Whether both return the same numbers; False if one fails."""
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
        try:
            torch.testing.assert_close(found(), expected(), rtol=1e-5, atol=1e-6)
        except Exception:  # other arguments, attributes or numbers: another layer
            return False
    return True


# -- norms ------------------------------------------------------------------------------------


class RMSNorm(torch.autograd.Function):
    """y = w x r, with r = (mean(x^2) + eps)^(-1/2) of each row (Zhang and Sennrich, "Root Mean
    Square Layer Normalization", 2019). x: [..., D]; w: [D].

    With the gradient g of y and c = sum(g w x) r^3 / D: dx = g w r - c x; dw = sum(g x r).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        normalized: Tensor = x * scale
        return normalized.mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        rows = (grad * x).flatten(0, -2)
        of_x = of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = scale.flatten() @ rows
        if ctx.needs_input_grad[0]:
            slope = (rows @ weight).view_as(scale).mul_(scale**3).div_(x.shape[-1])
            of_x = (grad * weight).mul_(scale).addcmul_(x, slope, value=-1)

        return of_x, of_weight, None


@cache
def is_rms_norm(kind: Any) -> bool:
    """Whether a norm of this class, with ``weight`` and ``variance_epsilon``, is ``RMSNorm``."""
    if getattr(kind, "_is_fast", False) or kind.__init__ is nn.Module.__init__:
        return False
    x = torch.linspace(-3, 2, 24).view(2, 12)
    weight = torch.linspace(0.5, 2, 12)
    norm: Any = SimpleNamespace(weight=weight, variance_epsilon=0.1)
    return agree(lambda: kind.forward(norm, x), lambda: RMSNorm.apply(x, weight, 0.1))  # type: ignore[no-untyped-call]


@cache
def _fast_norm(kind: Any) -> type[nn.Module]:
    """A subclass with the name of the class ``kind``: reports show it."""

    def forward(self: Any, x: Tensor, *others: Any, **named: Any) -> Tensor:
        if others or named or not is_plain(x, self.weight):  # others: the gate of a state's output
            return cast(Tensor, kind.forward(self, x, *others, **named))
        return cast(Tensor, RMSNorm.apply(x, self.weight, self.variance_epsilon))  # type: ignore[no-untyped-call]

    made = type(kind.__name__, (kind,), {"forward": forward, "_is_fast": True})
    made.__module__ = kind.__module__
    return made


# -- rotary embeddings ------------------------------------------------------------------------


class Rotary(torch.autograd.Function):
    """y = x cos + (-x2, x1) sin of the halves x = (x1, x2) (Su et al., "RoFormer", 2021). x:
    [B, H, T, D], of which D may be next to any dimension in memory; cos, sin: [B, 1, T, D]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin=_halves(sin), sign=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        first, second = _halves(sin)
        return _rotated(grad, cos, sin=(second, first), sign=1), None, None


def rotate_half(x: Tensor) -> Tensor:
    """(-x2, x1) of the halves x = (x1, x2)."""
    x1, x2 = _halves(x)
    return torch.cat((-x2, x1), dim=-1)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _rotated(x: Tensor, cos: Tensor, sin: tuple[Tensor, Tensor], sign: int) -> Tensor:
    """x cos + sign (x2 sin1, -x1 sin2), with the halves ``sin`` = (sin1, sin2)."""
    total = x * cos
    (x1, x2) = _halves(x)
    for part, other, factor, value in zip(
        _halves(total), (x2, x1), sin, (sign, -sign), strict=True
    ):
        part.addcmul_(other, factor, value=value)
    return total


def is_rotary(rotate: Callable[..., Any]) -> bool:
    """Whether the function rotates queries and keys [B, H, T, D] by angles [B, T, D]."""
    numbers = torch.linspace(-2, 3, 2 * 3 * 5 * 8).view(2, 3, 5, 8)
    angles = torch.linspace(0, 4, 2 * 5 * 8).view(2, 5, 8)
    inputs = (numbers, numbers[:, :1] + 1, angles.cos(), angles.sin())
    return agree(lambda: _fast_rotary(rotate)(*inputs), lambda: rotate(*inputs))


def _fast_rotary(rotate: Callable[..., Any]) -> Callable[..., Any]:
    """``rotate``, for plain tensors by ``Rotary``."""

    def fast(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *others: Any, **named: Any) -> Any:
        is_whole = cos.dim() == 3 and cos.shape[-1] == q.shape[-1]
        if others or named or not is_whole or not is_plain(q, k, cos, sin):
            return rotate(q, k, cos, sin, *others, **named)
        angles = (cos[:, None], sin[:, None])
        return tuple(Rotary.apply(x, *angles) for x in (q, k))  # type: ignore[no-untyped-call]

    fast.replaces = rotate  # type: ignore[attr-defined]
    return fast
