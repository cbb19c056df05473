"""Whether the Triton kernels give the numbers of plain torch on a device.

Compilers and cards differ, and a kernel that is wrong trains a wrong model in silence. So each
kernel runs once at start-up, forward and backward, beside the same formula in float64. If one is
off or fails, none is used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from prime_rl_kernels import gpu_layers
from prime_rl_kernels.fused_head import fused_logprobs
from prime_rl_kernels.layers import rotate_half

logger = logging.getLogger("prime_rl.trainer.kernels")
"""The trainer's logger: only rank 0 shows its lines."""

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05}
"""By dtype of the inputs: largest difference, as a share of the largest expected number. One
rounding to bfloat16 is 0.004, and a few add up."""

Tensors = tuple[Tensor, ...]
Formula = Callable[..., Tensor]


@cache
def is_usable(device: torch.device) -> bool:
    """Whether the kernels run on ``device`` and are right there. Logs why not, on a GPU."""
    if device.type != "cuda":
        return False
    reason = "triton is not installed (pip install triton)"
    if find_spec("triton") is not None:
        reason = find_fault(device)
    if reason:
        logger.warning(
            "Triton kernels of norms, rotary embeddings, SwiGLU and the LM head are not used, "
            "which is slower: %s",
            reason,
        )
    return not reason


def find_fault(device: torch.device) -> str:
    """What is wrong with the kernels on ``device``, in words; empty if nothing is."""
    with torch.autocast(device.type, enabled=False):
        for dtype, tolerance in TOLERANCE.items():
            for name, (kernel, plain, inputs) in _cases().items():
                tensors = [each.to(device, dtype) for each in inputs]
                try:
                    gap = _gap(kernel, plain, tensors)
                except Exception as error:  # of triton's compiler, the driver, or a full card
                    return f"{name}: {type(error).__name__}: {error}".splitlines()[0]
                if not gap <= tolerance:
                    kind = str(dtype).removeprefix("torch.")
                    return f"{name} in {kind} is off by {gap:.1e}, expected at most {tolerance}"
    return ""


def _gap(kernel: Formula, plain: Formula, given: list[Tensor]) -> float:
    """The largest difference of the result and of each gradient from those of float64, as a share
    of the largest number."""
    with torch.enable_grad():
        ours = [each.clone().requires_grad_() for each in given]
        exact = [each.double().requires_grad_() for each in given]
        outputs = kernel(*ours)
        wanted = plain(*exact)
        slope = torch.linspace(-1, 2, wanted.numel(), device=wanted.device).view_as(wanted)
        slope = slope.to(outputs.dtype)
        torch.autograd.backward(outputs, slope)
        torch.autograd.backward(wanted, slope.double())

    pairs = [
        (outputs.detach(), wanted.detach()),
        *((a.grad, b.grad) for a, b in zip(ours, exact, strict=True)),
    ]
    return max(
        float((a.double() - b).abs().max() / b.abs().max().clamp(min=1e-6))
        for a, b in pairs
        if a is not None and b is not None
    )


def _cases() -> dict[str, tuple[Formula, Formula, Tensors]]:
    """By name: kernel, plain formula and inputs. Sizes are no powers of two."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    angles = 3 * draw(2, 1, 7, 24)

    def rotated(x: Tensor) -> Tensor:
        cos, sin = angles.to(x.device, x.dtype)
        turned: Tensor = gpu_layers.Rotary.apply(x.transpose(1, 2), cos, sin)  # type: ignore[no-untyped-call]
        return turned

    def rotated_plainly(x: Tensor) -> Tensor:
        # As exact as the angles are in the kernel's dtype.
        cos, sin = angles.to(x.device, x.dtype)
        turned = x.transpose(1, 2)
        result: Tensor = turned * cos + rotate_half(turned) * sin
        return result

    return {
        "RMS norm": (
            lambda x, w: gpu_layers.RMSNorm.apply(x, w, 0.1),  # type: ignore[no-untyped-call]
            lambda x, w: x * (x.square().mean(-1, keepdim=True) + 0.1).rsqrt() * w,
            (draw(3, 5, 100), draw(100)),
        ),
        "rotary embedding": (rotated, rotated_plainly, (draw(1, 7, 3, 24),)),
        "SwiGLU": (
            lambda gate, up: gpu_layers.SwiGLU.apply(gate, up),  # type: ignore[no-untyped-call]
            lambda gate, up: F.silu(gate) * up,
            (3 * draw(5, 300), draw(5, 300)),
        ),
        "LM head": (_head, _plain_head, (draw(9, 32), draw(2600, 32) / 4)),
    }


def _head(hidden: Tensor, weight: Tensor) -> Tensor:
    """Log-probabilities and entropies in two blocks of words."""
    labels = (torch.arange(len(hidden), device=hidden.device) * 311) % len(weight)
    logprobs, entropies = fused_logprobs(
        hidden,
        weight,
        bias=None,
        temperatures=_temperatures(hidden).float(),
        labels=labels,
        block_logits=len(hidden) * 1500,
        entropy_gradient=True,
        triton=True,
    )
    return torch.stack([logprobs, entropies])


def _plain_head(hidden: Tensor, weight: Tensor) -> Tensor:
    labels = (torch.arange(len(hidden), device=hidden.device) * 311) % len(weight)
    log_softmax = (hidden @ weight.T / _temperatures(hidden)[:, None]).log_softmax(-1)
    entropies = -(log_softmax.exp() * log_softmax).sum(-1)
    return torch.stack([log_softmax.gather(1, labels[:, None])[:, 0], entropies])


def _temperatures(hidden: Tensor) -> Tensor:
    return torch.linspace(0.7, 1.3, len(hidden), device=hidden.device, dtype=torch.float64)
