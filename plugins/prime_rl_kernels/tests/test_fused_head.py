"""The fused head against plain ``log_softmax``, in double precision."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from prime_rl_kernels.fused_head import block_shape, fused_logprobs

N, D, V = 7, 5, 11


@dataclass
class Case:
    """Inputs of the head; leaves."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    temperatures: Tensor | None
    labels: Tensor

    def plain(self) -> tuple[Tensor, Tensor]:
        logits = torch.nn.functional.linear(self.hidden, self.weight, self.bias)
        if self.temperatures is not None:
            logits = logits / self.temperatures[:, None]
        log_softmax = logits.log_softmax(-1)
        entropies = -(log_softmax.exp() * log_softmax).sum(-1)
        return log_softmax.gather(1, self.labels[:, None])[:, 0], entropies

    def fused(self, block_logits: int) -> tuple[Tensor, Tensor]:
        return fused_logprobs(
            self.hidden, self.weight, self.bias, self.temperatures, self.labels, block_logits
        )

    def gradients(self, logprobs: Tensor) -> list[Tensor]:
        """Of a sum with a weight of its own for each token."""
        leaves = [self.hidden, self.weight] + ([] if self.bias is None else [self.bias])
        weights = torch.linspace(-1, 2, len(logprobs), dtype=logprobs.dtype)
        return list(torch.autograd.grad((logprobs * weights).sum(), leaves))


def make(bias: bool = False, temperatures: bool = False, tokens: int = N, large: float = 1) -> Case:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    return Case(
        random(tokens, D).requires_grad_(),
        (large * random(V, D)).requires_grad_(),
        random(V).requires_grad_() if bias else None,
        random(tokens).exp() if temperatures else None,
        torch.randint(0, V, (tokens,), generator=generator),
    )


@pytest.mark.parametrize("block_logits", [7, 7 * 3, 7 * 11, 1000], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("temperatures", [False, True])
def test_it_equals_log_softmax(bias: bool, temperatures: bool, block_logits: int) -> None:
    """Blocks of 1, 3 and 11 words: 11 = 3 * 3 + 2, so that the last one is short."""
    case = make(bias, temperatures)
    expected, found = case.plain(), case.fused(block_logits)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want)
    gradients = zip(case.gradients(found[0]), case.gradients(expected[0]), strict=True)
    for got, want in gradients:
        torch.testing.assert_close(got, want)


def test_blocks_of_tokens_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """3 tokens x 4 words a block: 7 tokens are 3 + 3 + 1, 11 words 4 + 4 + 3."""
    monkeypatch.setattr("prime_rl_kernels.fused_head.MIN_TOKENS", 3)
    assert block_shape(N, V, 12) == (3, 4)
    case = make(bias=True, temperatures=True)
    expected, found = case.plain(), case.fused(12)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want)
    gradients = zip(case.gradients(found[0]), case.gradients(expected[0]), strict=True)
    for got, want in gradients:
        torch.testing.assert_close(got, want)


def test_the_gradient_is_that_of_finite_differences() -> None:
    case = make(bias=True, temperatures=True)
    assert case.bias is not None

    def logprobs(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return fused_logprobs(hidden, weight, bias, case.temperatures, case.labels, 7 * 3)[0]

    assert torch.autograd.gradcheck(logprobs, (case.hidden, case.weight, case.bias))


def test_logits_of_hundreds_do_not_overflow() -> None:
    case = make(large=500)
    expected, found = case.plain(), case.fused(7 * 3)
    assert expected[0].min() < -500
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want)


def test_equal_logits_are_uniform() -> None:
    case = make()
    uniform = Case(torch.zeros_like(case.hidden), case.weight, None, None, case.labels)
    logprobs, entropies = uniform.fused(7 * 3)
    assert logprobs.tolist() == pytest.approx([-math.log(V)] * N)
    assert entropies.tolist() == pytest.approx([math.log(V)] * N)


def test_no_tokens_give_no_logprobs_and_no_gradient() -> None:
    case = make(tokens=0)
    logprobs, entropies = case.fused(8)
    assert logprobs.shape == entropies.shape == (0,)
    assert not any(gradient.any() for gradient in case.gradients(logprobs))


@pytest.mark.parametrize("block_logits", [7, 7 * 3, 1000], ids=str)
@pytest.mark.parametrize("temperatures", [False, True])
def test_a_frozen_head_gets_no_gradient_and_passes_it_on(
    temperatures: bool, block_logits: int
) -> None:
    case = make(bias=True, temperatures=temperatures, large=30)
    weights = torch.linspace(-1, 2, N, dtype=torch.float64)
    plain = case.plain()
    expected = torch.autograd.grad((plain[0] * weights).sum(), case.hidden)[0]
    assert case.bias is not None
    case.weight.requires_grad_(False)
    case.bias.requires_grad_(False)
    logprobs, entropies = case.fused(block_logits)
    found = torch.autograd.grad((logprobs * weights).sum(), case.hidden)[0]
    torch.testing.assert_close((logprobs, entropies, found), (*plain, expected))


def test_a_frozen_weight_with_a_trained_bias_is_trained() -> None:
    case = make(bias=True)
    assert case.bias is not None
    expected = torch.autograd.grad(case.plain()[0].sum(), case.bias)[0]
    case.weight.requires_grad_(False)
    torch.testing.assert_close(torch.autograd.grad(case.fused(7)[0].sum(), case.bias)[0], expected)


def test_entropies_carry_no_gradient() -> None:
    logprobs, entropies = make().fused(7)
    assert logprobs.requires_grad
    assert not entropies.requires_grad


def test_under_autocast_factors_are_rounded_and_sums_are_not() -> None:
    """Gradients too: within bfloat16's rounding of the logits' gradient, 2**-9."""
    case = make(temperatures=True)
    narrow = Case(
        case.hidden.detach().float().requires_grad_(),
        case.weight.detach().float().requires_grad_(),
        None,
        None,
        case.labels,
    )
    rounded = Case(
        narrow.hidden.detach().bfloat16().double().requires_grad_(),
        narrow.weight.detach().bfloat16().double().requires_grad_(),
        None,
        None,
        case.labels,
    )
    with torch.autocast("cpu", torch.bfloat16):
        logprobs, entropies = narrow.fused(7 * 3)
    expected = rounded.plain()
    assert logprobs.dtype == entropies.dtype == torch.float32
    torch.testing.assert_close(logprobs, expected[0].float(), atol=1e-5, rtol=0)
    torch.testing.assert_close(entropies, expected[1].float(), atol=1e-5, rtol=0)
    gradients = zip(narrow.gradients(logprobs), rounded.gradients(expected[0]), strict=True)
    for got, want in gradients:
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want.float(), atol=2**-8 * float(want.abs().max()), rtol=0)


def test_blocks_take_as_many_tokens_as_leave_a_thousand_words() -> None:
    assert block_shape(100, 50_000, 2**20) == (100, 10_485)
    assert block_shape(5000, 50_000, 2**20) == (1024, 1024)
    assert block_shape(100, 500, 2**20) == (100, 500)
    assert block_shape(0, 500, 2**20) == (1, 500)
