"""The Triton kernels in Triton's interpreter, beside float64, and compiled for a Hopper GPU.

Triton is no package of ``make setup``: ``make test-triton`` has it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from prime_rl_kernels import gpu_check, gpu_layers, gpu_ops
from prime_rl_kernels.fused_head import fused_logprobs

if find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
    # Triton decides when it is imported whether it interprets.
    pytest.skip("needs triton and TRITON_INTERPRET=1: make test-triton", allow_module_level=True)


def check(kernel: Any, plain: Any, *inputs: Tensor, tolerance: float = 1e-5) -> None:
    """Numbers and gradients of ``kernel`` beside those of ``plain`` in float64."""
    ours = [each.clone().requires_grad_() for each in inputs]
    exact = [each.double().requires_grad_() for each in inputs]
    found = kernel(*ours)
    wanted = plain(*exact)
    slope = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(5))
    found.backward(slope.to(found.dtype))
    wanted.backward(slope.to(found.dtype).double())
    for one, other in ((found, wanted), *zip(ours, exact, strict=True)):
        a, b = (one, other) if one is found else (one.grad, other.grad)
        largest = float(b.detach().abs().max())
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance * largest)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 0.1).rsqrt() * weight


PRECISIONS = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)


@PRECISIONS
@pytest.mark.parametrize("shape", [(1, 8), (3, 5, 100), (2, 7, 3, 128), (40, 1)])
def test_an_rms_norm_and_its_gradients_are_those_of_float64(
    shape: tuple[int, ...], dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    x = (3 * torch.randn(shape)).to(dtype)
    weight = torch.randn(shape[-1]).to(dtype)
    kernel: Any = gpu_layers.RMSNorm.apply
    check(lambda x, w: kernel(x, w, 0.1), norm, x, weight, tolerance=tolerance)


def test_the_gradient_of_a_norm_s_weight_adds_up_over_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_ops, "TILE", 16)  # two rows
    monkeypatch.setattr(gpu_ops, "PROGRAMS", 3)  # three tiles each, the last one of one row
    torch.manual_seed(1)
    kernel: Any = gpu_layers.RMSNorm.apply
    check(lambda x, w: kernel(x, w, 0.1), norm, torch.randn(17, 8), torch.randn(8))
    x = torch.randn(17, 8)
    _, scale = gpu_ops.rms_norm(x, torch.ones(8), 0.1)
    _, parts = gpu_ops.rms_norm_backward(torch.ones(17, 8), x, torch.ones(8), scale)
    assert parts.shape == (3, 8)


def test_a_norm_rounds_before_the_weight_as_transformers_does() -> None:
    # In float16: rounding to bfloat16 is not the interpreter's, which cuts.
    torch.manual_seed(2)
    layer = qwen3.Qwen3RMSNorm(64).half()
    layer.weight.data.copy_(torch.randn(64))
    x = (5 * torch.randn(50, 64)).half()
    y, _ = gpu_ops.rms_norm(x, layer.weight.detach(), layer.variance_epsilon)
    # All but a few of 3200: a sum in another order may round to the neighbor.
    assert int((y != layer(x).detach()).sum()) <= 16


@PRECISIONS
def test_a_rotary_embedding_of_a_view_and_its_gradient_are_those_of_float64(
    dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(3)
    cos, sin = torch.randn(2, 2, 5, 24).to(dtype).unbind(0)  # not of one angle: each half counts
    kernel: Any = gpu_layers.Rotary.apply
    wide = [each.double()[:, None] for each in (cos, sin)]

    def plain(x: Tensor) -> Tensor:
        turned = x.transpose(1, 2)
        return turned * wide[0] + qwen3.rotate_half(turned) * wide[1]

    x = torch.randn(2, 5, 3, 24).to(dtype)
    check(lambda x: kernel(x.transpose(1, 2), cos, sin), plain, x, tolerance=tolerance)
    assert kernel(x.transpose(1, 2), cos, sin).stride() == x.transpose(1, 2).stride()


@PRECISIONS
def test_swiglu_and_its_gradients_are_those_of_float64(
    dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(4)
    gate = torch.cat([20 * torch.randn(3, 300), torch.tensor([[-90.0, 90.0, 0.0] * 100])])
    kernel: Any = gpu_layers.SwiGLU.apply
    check(
        lambda gate, up: kernel(gate, up),
        lambda gate, up: F.silu(gate) * up,
        gate.to(dtype),
        torch.randn(4, 300).to(dtype),
        tolerance=tolerance,
    )


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("num_labels", [1, 3])
@pytest.mark.parametrize("with_temperatures", [False, True])
def test_the_head_in_blocks_and_its_gradients_are_those_of_float64(
    entropy_gradient: bool, frozen: bool, num_labels: int, with_temperatures: bool
) -> None:
    torch.manual_seed(5)
    num_tokens, num_words = 9, 2600
    temperatures = torch.linspace(0.6, 1.4, num_tokens) if with_temperatures else None
    labels = torch.randint(0, num_words, (num_tokens, num_labels))
    labels[:, -1] = labels[:, 0]  # a label that stands twice counts twice

    def results(hidden: Tensor, weight: Tensor) -> Tensor:
        logprobs, entropies = fused_logprobs(
            hidden,
            weight.detach() if frozen else weight,
            bias=None,
            temperatures=temperatures,
            labels=labels,
            block_logits=num_tokens * 1100,
            entropy_gradient=entropy_gradient,
            triton=True,
        )
        return torch.cat([logprobs, entropies[:, None]], 1)

    def plain(hidden: Tensor, weight: Tensor) -> Tensor:
        weight = weight.detach() + 0 * weight if frozen else weight
        logits = hidden @ weight.T
        if temperatures is not None:
            logits = logits / temperatures.double()[:, None]
        log_softmax = logits.log_softmax(-1)
        entropies = -(log_softmax.exp() * log_softmax).sum(-1, keepdim=True)
        entropies = entropies if entropy_gradient else entropies.detach()
        return torch.cat([log_softmax.gather(1, labels), entropies], 1)

    def kernel(hidden: Tensor, weight: Tensor) -> Tensor:
        return results(hidden, weight) + (0 * weight).sum()

    check(kernel, plain, torch.randn(num_tokens, 32), torch.randn(num_words, 32) / 3)


@given(
    num_tokens=st.integers(1, 5),
    num_words=st.integers(2, 40),
    width=st.integers(1, 40),
    scale=st.floats(0.01, 50),
    seed=st.integers(0, 99),
)
def test_however_words_are_cut_into_blocks_probabilities_and_entropy_stay(
    num_tokens: int, num_words: int, width: int, scale: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(num_tokens, num_words, generator=generator)
    labels = torch.randint(0, num_words, (num_tokens, 1), generator=generator)
    peak = torch.full((num_tokens,), torch.finfo(torch.float32).min)
    total, moment = torch.zeros(2, num_tokens)
    chosen = torch.zeros(num_tokens, 1)
    for first in range(0, num_words, width):
        block = logits[:, first : first + width].contiguous()
        gpu_ops.fold_logits(block, None, labels, first, peak, total, moment, chosen, None)

    exact = logits.double().log_softmax(-1)
    found = chosen[:, 0] - peak - total.log()
    torch.testing.assert_close(
        found.double(), exact.gather(1, labels)[:, 0], rtol=1e-5, atol=1e-5 * (1 + scale)
    )
    entropies = total.log() - moment / total
    wanted = -(exact.exp() * exact).sum(-1)
    torch.testing.assert_close(entropies.double(), wanted, rtol=1e-4, atol=1e-4)


def test_the_check_at_start_up_passes_and_names_a_wrong_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert gpu_check.find_fault(torch.device("cpu")) == ""
    right = gpu_ops.swiglu_backward
    monkeypatch.setattr(
        gpu_ops, "swiglu_backward", lambda *each: tuple(2 * part for part in right(*each))
    )
    assert gpu_check.find_fault(torch.device("cpu")).startswith("SwiGLU in float32 is off by 1.0")

    def fail(*_: Any) -> None:
        raise RuntimeError("no such instruction\nand more")

    monkeypatch.setattr(gpu_ops, "swiglu", fail)
    fault = gpu_check.find_fault(torch.device("cpu"))
    assert fault == "SwiGLU: RuntimeError: no such instruction"


def test_all_kernels_compile_for_a_hopper_gpu() -> None:
    """In a process without the interpreter, for the shapes of Qwen3-0.6B."""
    environment = {name: each for name, each in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, os.path.join(os.path.dirname(__file__), "compile_triton.py")],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stderr
    assert done.stdout.split() == [
        *("rms_norm", "rms_norm_backward", "rotate", "rotate_backward"),
        *("swiglu", "swiglu_backward", "fold_logits", "fold_logits_frozen"),
        *("logit_gradients", "logit_gradients_entropies"),
    ]
