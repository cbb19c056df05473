"""Entropies with a gradient: both heads against autograd of a plain ``log_softmax`` in float64."""

from __future__ import annotations

from collections.abc import Callable
from math import log
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_head import plain, random
from torch import Tensor
from transformers import PreTrainedModel

from prime_rl.config.trainer import TrainerConfig
from prime_rl.trainer.logprobs import LogprobAndEntropy, token_logprobs
from prime_rl.trainer.model import Policy
from prime_rl.trainer.packed_row import make_row
from prime_rl_kernels import fused_head
from prime_rl_kernels.fused_head import fused_logprobs
from prime_rl_kernels.kernels import KernelConfig, Varlen

CPU = torch.device("cpu")
D, V = 5, 11
MakeModel = Callable[..., PreTrainedModel]
Head = Callable[..., tuple[Tensor, Tensor]]


def kept(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperatures: Tensor | None, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """The head that keeps the softmax."""
    apply: Any = LogprobAndEntropy.apply
    logits = torch.nn.functional.linear(hidden, weight, bias)
    found: tuple[Tensor, Tensor] = apply(logits, temperatures, labels, True)
    return found


def fused(block_logits: int) -> Head:
    return lambda *inputs: fused_logprobs(*inputs, block_logits, entropy_gradient=True)


def mixed(logprobs: Tensor, entropies: Tensor) -> Tensor:
    """A loss that weighs every logprob and every entropy differently."""
    a, b = (random(len(logprobs), seed=seed).to(logprobs.dtype) for seed in (8, 9))
    return (a * logprobs + b * entropies).sum()


def test_the_slope_of_two_words_is_that_worked_out_on_paper() -> None:
    """p = (3/4, 1/4) of z / 2 = (log 3, 0): dH / dz_0 = -p_0 p_1 (z_0 - z_1) / 4 = -3/32 log 3 and
    dH / dz_1 is its negative. d log p_0 / dz_0 = p_1 / 2 = 1/8."""
    weight = torch.tensor([[2 * log(3)], [0.0]], dtype=torch.float64, requires_grad=True)
    rest = torch.ones(1, 1, dtype=torch.float64), weight, None, torch.tensor([2.0]).double()
    for head in (kept, fused(1), fused(9)):
        logprobs, entropies = head(*rest, torch.tensor([0]))
        (found,) = torch.autograd.grad(entropies.sum(), weight, retain_graph=True)
        assert found[:, 0].tolist() == pytest.approx([-3 / 32 * log(3), 3 / 32 * log(3)])
        (found,) = torch.autograd.grad(logprobs.sum() + 2 * entropies.sum(), weight)
        assert found[0].item() == pytest.approx(1 / 8 - 3 / 16 * log(3))


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**20),
    tokens=st.integers(0, 9),
    rows=st.integers(1, 9),
    block_logits=st.none() | st.integers(1, 120),
    bias=st.booleans(),
    temperatures=st.booleans(),
    trained=st.booleans(),
    large=st.sampled_from([0.1, 1.0, 300.0]),
)
def test_gradients_of_a_mixed_loss_equal_autograd(
    seed: int,
    tokens: int,
    rows: int,
    block_logits: int | None,
    bias: bool,
    temperatures: bool,
    trained: bool,
    large: float,
) -> None:
    """``block_logits`` None: the head that keeps the softmax. With ``large``, softmaxes underflow.
    Not ``trained``: weight and bias are frozen."""
    hidden, weight = random(tokens, D, seed=seed), large * random(V, D, seed=seed + 1)
    offset = random(V, seed=seed + 2) if bias else None
    scales = random(tokens, seed=seed + 3).exp() if temperatures else None
    labels = torch.arange(tokens) * 7 % V
    leaves = [hidden, *([weight] if trained else []), *([offset] if trained and bias else [])]
    for leaf in filter(lambda leaf: leaf is not None, leaves):
        leaf.requires_grad_()
    inputs = hidden, weight, offset, scales, labels
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_head, "MIN_TOKENS", rows)
        patch.setattr(fused_head, "MIN_VOCAB", 4)
        found = (fused(block_logits) if block_logits else kept)(*inputs)
        gradients = torch.autograd.grad(mixed(*found), leaves)
    expected = plain(*inputs)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        gradients, torch.autograd.grad(mixed(*expected), leaves), atol=1e-9, rtol=1e-7
    )


@pytest.mark.parametrize("head", [kept, fused(9)], ids=["kept", "fused"])
def test_gradients_are_those_of_finite_differences(head: Head) -> None:
    labels, temperatures = torch.tensor([0, 10, 3]), torch.tensor([0.5, 1.0, 2.0]).double()
    leaves = [random(*shape, seed=7).requires_grad_() for shape in ((3, D), (V, D), (V,))]
    assert torch.autograd.gradcheck(lambda h, w, b: head(h, w, b, temperatures, labels), leaves)


def test_under_autocast_gradients_are_rounded_once() -> None:
    """Within bfloat16's rounding of the logits' gradient, 2**-9; frozen and trained."""
    labels = torch.tensor([0, 10, 3])
    narrow = [random(3, D).float().requires_grad_(), random(V, D, seed=1).float().requires_grad_()]
    wide = [leaf.detach().bfloat16().double().requires_grad_() for leaf in narrow]
    expected = plain(*wide, None, None, labels)
    slopes = torch.autograd.grad(mixed(*expected), wide)
    for leaves in (narrow, narrow[:1]):
        narrow[1].requires_grad_(len(leaves) == 2)
        with torch.autocast("cpu", torch.bfloat16):
            found = fused(3 * 4)(*narrow, None, None, labels)
        torch.testing.assert_close(found[1], expected[1].float(), atol=1e-5, rtol=0)
        gradients = torch.autograd.grad(mixed(*found), leaves)
        for got, want in zip(gradients, slopes, strict=False):
            assert got.dtype == torch.float32
            tolerance = 2**-8 * float(want.abs().max())
            torch.testing.assert_close(got, want.float(), atol=tolerance, rtol=0)


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize(
    ("keys", "factor", "cap"),
    [({}, 1.0, None), ({"logits_scaling": 8.0}, 1 / 8, None),
     ({"logits_scaling": 0.5, "logits_soft_cap": 1.5}, 2.0, 1.5)],
    ids=["plain", "scaled", "capped"],
)  # fmt: skip
def test_weights_of_a_model_get_the_gradient_of_a_mixed_loss(
    make_model: MakeModel,
    pack: Any,
    random_documents: Any,
    keys: dict[str, Any],
    factor: float,
    cap: float | None,
    frozen: bool,
    is_fused: bool,
) -> None:
    """Against transformers, document by document, at temperatures 0.5 and 2."""
    documents = random_documents([6, 9])  # packed in descending order of length
    temperatures = [0.5, 2.0]
    model, reference = (make_model(kind, tie_word_embeddings=False) for kind in ("sdpa", "sdpa"))
    vars(model.config).update(keys)
    for each in (model, reference):
        each.get_output_embeddings().requires_grad_(not frozen)
    row = make_row(pack(documents, temperatures=temperatures), CPU)
    kernel = Varlen(KernelConfig(fused_lm_head=is_fused))
    kernel.block_logits = 5 * 13
    found = token_logprobs(model, row, kernel=kernel, entropy_gradient=True)
    torch.autograd.backward(mixed(*(column[row.targets] for column in found)))
    parts = []
    for document, temperature in [(documents[1], 2.0), (documents[0], 0.5)]:
        logits = reference(torch.tensor([document])).logits[0, :-1] * factor
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        log_softmax = (logits / temperature).log_softmax(-1)
        chosen = log_softmax.gather(1, torch.tensor(document[1:])[:, None])[:, 0]
        parts.append((chosen, -(log_softmax.exp() * log_softmax).sum(-1)))
    expected = [torch.cat(columns) for columns in zip(*parts, strict=True)]
    torch.autograd.backward(mixed(*expected))
    torch.testing.assert_close([column[row.targets] for column in found], expected)
    for (name, got), want in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (got.grad is None) == (want.grad is None), name
        if want.grad is not None:
            torch.testing.assert_close(got.grad, want.grad, atol=1e-9, rtol=1e-6, msg=name)


@pytest.mark.parametrize("is_fused", [True, False])
def test_the_policy_gives_entropies_a_gradient_only_if_asked(
    make_model: MakeModel, pack: Any, random_documents: Any, is_fused: bool
) -> None:
    kernel = Varlen(KernelConfig(fused_lm_head=is_fused))
    kernel.block_logits = 5 * 13
    policy = Policy(make_model("varlen"), TrainerConfig(device="cpu"), kernel=kernel)
    row = make_row(pack(random_documents([6, 4])), CPU, policy.packing)
    logprobs, entropies, _ = policy(row)
    assert logprobs.requires_grad and not entropies.requires_grad
    policy.read = {"entropies"}
    again = policy(row)
    assert again[1].requires_grad
    assert torch.equal(again[0], logprobs) and torch.equal(again[1], entropies)
    gradients = [torch.autograd.grad(each.sum(), list(policy.parameters())) for each in
                 (logprobs, again[0])]  # fmt: skip
    torch.testing.assert_close(*gradients)


def test_a_row_without_targets_still_has_a_graph_for_its_entropies(
    make_model: MakeModel, pack: Any, random_documents: Any
) -> None:
    model = make_model()
    row = make_row(pack(random_documents([4, 3]), prompt=9), CPU)
    _, entropies = token_logprobs(model, row, entropy_gradient=True)
    assert entropies.tolist() == pytest.approx([log(model.config.vocab_size)] * 7)
    torch.autograd.backward(entropies.sum())
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
