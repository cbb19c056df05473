"""log π of several tokens in one place: both heads against a plain ``log_softmax`` in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import log
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_head import plain, random
from torch import Tensor
from trainer_fixtures import kernel_of
from transformers import PreTrainedModel

from prime_rl import Loss, LossInputs, LossOutputs, PluginConfig
from prime_rl.config.trainer import TrainerConfig
from prime_rl.errors import StreamError
from prime_rl.registry.components import Component, installed_losses
from prime_rl.trainer.logprobs import LogprobAndEntropy, token_logprobs
from prime_rl.trainer.loop import Trainer
from prime_rl.trainer.packed_row import make_row
from prime_rl.trainer.update import BatchUpdate
from prime_rl_kernels import fused_head
from prime_rl_kernels.fused_head import fused_logprobs
from prime_rl_kernels.kernels import KernelConfig, Varlen

CPU = torch.device("cpu")
D, V = 5, 11
ABSENT = np.iinfo(np.int32).min
MakeModel = Callable[..., PreTrainedModel]


def computed(
    block_logits: int | None, entropy: bool, *inputs: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The fused head, or for None the one that keeps the softmax."""
    hidden, weight, bias, temperatures, labels = inputs
    assert hidden is not None and weight is not None and labels is not None
    if block_logits is not None:
        return fused_logprobs(hidden, weight, bias, temperatures, labels, block_logits, entropy)
    apply: Any = LogprobAndEntropy.apply
    logits = torch.nn.functional.linear(hidden, weight, bias)
    found: tuple[Tensor, Tensor] = apply(logits, temperatures, labels, entropy)
    return found


def mixed(logprobs: Tensor, entropies: Tensor, entropy: bool) -> Tensor:
    """A loss that weighs every number differently."""
    a, b = (random(*x.shape, seed=8).to(x.dtype) for x in (logprobs, entropies))
    return (a * logprobs).sum() + ((b * entropies).sum() if entropy else 0.0)


def test_two_words_of_two_have_the_slopes_worked_out_on_paper() -> None:
    """z / 2 = (log 3, 0): p = (3/4, 1/4), d log p_0 / dz = (1/8, -1/8) and d log p_1 / dz =
    (-3/8, 3/8)."""
    weight = torch.tensor([[2 * log(3)], [0.0]], dtype=torch.float64, requires_grad=True)
    inputs = torch.ones(1, 1).double(), weight, None, torch.tensor([2.0]).double()
    for block_logits in (None, 1, 9):
        logprobs, _ = computed(block_logits, False, *inputs, torch.tensor([[1, 0]]))
        assert logprobs.tolist() == [pytest.approx([log(1 / 4), log(3 / 4)])]
        (found,) = torch.autograd.grad((logprobs * torch.tensor([[1.0, 2.0]])).sum(), weight)
        assert found[:, 0].tolist() == pytest.approx([-3 / 8 + 2 / 8, 3 / 8 - 2 / 8])


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**20),
    tokens=st.integers(0, 9),
    num_labels=st.integers(1, 14),
    rows=st.integers(1, 9),
    block_logits=st.none() | st.integers(1, 120),
    bias=st.booleans(),
    temperatures=st.booleans(),
    trained=st.booleans(),
    entropy=st.booleans(),
    large=st.sampled_from([0.1, 1.0, 300.0]),
)
def test_values_and_gradients_equal_autograd(
    seed: int,
    tokens: int,
    num_labels: int,
    rows: int,
    block_logits: int | None,
    bias: bool,
    temperatures: bool,
    trained: bool,
    entropy: bool,
    large: float,
) -> None:
    """With a label twice in one place too. Not ``trained``: weight and bias are frozen."""
    hidden, weight = random(tokens, D, seed=seed), large * random(V, D, seed=seed + 1)
    offset = random(V, seed=seed + 2) if bias else None
    scales = random(tokens, seed=seed + 3).exp() if temperatures else None
    labels = torch.arange(tokens * num_labels).reshape(tokens, num_labels) * 7 % V
    leaves = [hidden, *([weight] if trained else []), *([offset] if trained and bias else [])]
    for leaf in filter(lambda leaf: leaf is not None, leaves):
        leaf.requires_grad_()
    inputs = hidden, weight, offset, scales, labels
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_head, "MIN_TOKENS", rows)
        patch.setattr(fused_head, "MIN_VOCAB", 4)
        found = computed(block_logits, entropy, *inputs)
        gradients = torch.autograd.grad(mixed(*found, entropy), leaves)
    expected = plain(*inputs)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        gradients, torch.autograd.grad(mixed(*expected, entropy), leaves), atol=1e-9, rtol=1e-7
    )


@pytest.mark.parametrize("block_logits", [None, 9])
@pytest.mark.parametrize("frozen", [True, False])
def test_one_label_gives_bit_for_bit_the_same_as_a_column_of_labels(
    block_logits: int | None, frozen: bool
) -> None:
    """But for a frozen head, which takes another way to the same gradient."""
    hidden, weight = random(7, D).requires_grad_(), random(V, D, seed=1).requires_grad_(not frozen)
    labels = torch.arange(7) * 5 % V
    found = [computed(block_logits, False, hidden, weight, None, None, each)[0].flatten()
             for each in (labels, labels[:, None])]  # fmt: skip
    gradients = [torch.autograd.grad(each.square().sum(), hidden)[0] for each in found]
    assert torch.equal(*found)
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
    assert frozen or torch.equal(*gradients)


def test_under_autocast_gradients_are_rounded_once() -> None:
    """Within bfloat16's rounding of the logits' gradient, 2**-9; frozen and trained."""
    labels = torch.tensor([[0, 4, 7], [10, 10, 1], [3, 0, 9]])
    narrow = [random(3, D).float().requires_grad_(), random(V, D, seed=1).float().requires_grad_()]
    wide = [leaf.detach().bfloat16().double().requires_grad_() for leaf in narrow]
    expected = plain(*wide, None, None, labels)
    slopes = torch.autograd.grad(mixed(*expected, False), wide)
    for leaves in (narrow, narrow[:1]):
        narrow[1].requires_grad_(len(leaves) == 2)
        with torch.autocast("cpu", torch.bfloat16):
            found = computed(3 * 4, False, *narrow, None, None, labels)
        assert found[0].dtype == torch.float32
        torch.testing.assert_close(found[0], expected[0].float(), atol=1e-5, rtol=0)
        for got, want in zip(torch.autograd.grad(mixed(*found, False), leaves), slopes,
                             strict=False):  # fmt: skip
            tolerance = 2**-8 * float(want.abs().max())
            torch.testing.assert_close(got, want.float(), atol=tolerance, rtol=0)


def with_ids(micro_batch: Any, ids: Any) -> Any:
    return replace(micro_batch, streams={**micro_batch.streams, "top_ids": ids})


def numbered_ids(num_tokens: int, k: int, vocabulary: int = 61) -> np.ndarray:
    return np.random.default_rng(0).integers(0, vocabulary, (num_tokens, k)).astype(np.int32)


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("cap", [None, 1.5])
def test_weights_of_a_model_get_the_gradient_of_every_id(
    make_model: MakeModel,
    pack: Any,
    random_documents: Any,
    cap: float | None,
    frozen: bool,
    is_fused: bool,
) -> None:
    """Against transformers, document by document, at temperatures 0.5 and 2."""
    documents, temperatures = random_documents([9, 6]), [2.0, 0.5]
    model, reference = (make_model(kind, tie_word_embeddings=False) for kind in ("sdpa", "sdpa"))
    vars(model.config).update({} if cap is None else {"logits_soft_cap": cap})
    for each in (model, reference):
        each.get_output_embeddings().requires_grad_(not frozen)
    ids = numbered_ids(15, 4)
    row = make_row(with_ids(pack(documents, temperatures=temperatures), ids), CPU)
    kernel = Varlen(KernelConfig(fused_lm_head=is_fused))
    kernel.block_logits = 5 * 13
    found, entropies = token_logprobs(model, row, kernel=kernel, top=True)
    assert found.shape == (15, 5) and entropies.shape == (15,)
    torch.autograd.backward(mixed(found[row.targets], entropies[row.targets], False))
    parts, start = [], 0
    for document, temperature in zip(documents, temperatures, strict=True):
        logits = reference(torch.tensor([document])).logits[0, :-1]
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        end = start + len(document)
        top = torch.from_numpy(ids[start + 1 : end].astype(np.int64))
        labels = torch.cat([torch.tensor(document[1:])[:, None], top], 1)
        parts.append((logits / temperature).log_softmax(-1).gather(1, labels))
        start = end
    expected = torch.cat(parts)
    torch.autograd.backward(mixed(expected, entropies[row.targets], False))
    torch.testing.assert_close(found[row.targets], expected)
    for (name, got), want in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (got.grad is None) == (want.grad is None), name
        if want.grad is not None:
            torch.testing.assert_close(got.grad, want.grad, atol=1e-9, rtol=1e-6, msg=name)


def test_a_row_without_targets_still_has_a_graph(
    make_model: MakeModel, pack: Any, random_documents: Any
) -> None:
    model = make_model()
    row = make_row(with_ids(pack(random_documents([4, 3]), prompt=9), numbered_ids(7, 2)), CPU)
    found, _ = token_logprobs(model, row, top=True)
    assert found.flatten().tolist() == pytest.approx([-log(61)] * 21)
    torch.autograd.backward(found.sum())
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_a_document_without_ids_does_not_stop_its_neighbor(
    make_model: MakeModel, pack: Any, random_documents: Any
) -> None:
    model, batch, ids = make_model(), pack(random_documents([5, 4])), numbered_ids(9, 2)
    whole, _ = token_logprobs(model, make_row(with_ids(batch, ids), CPU), top=True)
    ids[5:] = ABSENT
    half, _ = token_logprobs(model, make_row(with_ids(batch, ids), CPU), top=True)
    assert torch.equal(half[:5], whole[:5]) and torch.isfinite(half).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ids: ids.astype(np.float32), r"torch.float32 of shape \[T, k\], expected int32"),
        (lambda ids: ids[:, 0], r"torch.int32 of shape \[T\], expected int32 of \[T, k\]"),
        (lambda ids: np.where(ids == ids[7], 61, ids), "id 61, expected 0 to 60"),
        (lambda ids: np.where(ids == ids[7], -1, ids), "id -1, expected 0 to 60"),
    ],
    ids=["floats", "one dimension", "beyond the vocabulary", "negative"],
)
@pytest.mark.parametrize("is_fused", [True, False])
def test_what_are_no_ids_is_refused(
    make_model: MakeModel,
    pack: Any,
    random_documents: Any,
    change: Any,
    message: str,
    is_fused: bool,
) -> None:
    row = make_row(with_ids(pack(random_documents([5, 4])), change(numbered_ids(9, 2))), CPU)
    kernel = Varlen(KernelConfig(fused_lm_head=is_fused))
    kernel.block_logits = 5 * 13
    with pytest.raises(StreamError, match=f"envs: a.*'top_ids' has .*{message}.*tokenizer"):
        token_logprobs(make_model(), row, kernel=kernel, top=True)


class TopSum(Loss):
    """The sum of all top_logprobs, by two ways to see them."""

    name = "top_sum"
    reads = ("top_logprobs",)

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        found, ids = inputs.top_logprobs, inputs.streams["top_ids"]
        assert found is not None and ids is not None
        assert found.shape == ids.shape == (len(inputs.loss_mask), 3)
        return LossOutputs(found[inputs.loss_mask].sum(), {})


class Wise(TopSum):
    name = "wise"
    token_wise = True


def trained(
    make_model: MakeModel, loss: type[Loss], rows: list[Any], **table: Any
) -> tuple[Trainer, float]:
    """The gradients of one minibatch, and its loss."""
    config = TrainerConfig.model_validate({"device": "cpu"} | table)
    trainer = Trainer(
        make_model(), installed_losses().with_rl(loss(PluginConfig())), config, 20,
        kernel=kernel_of(config),
    )  # fmt: skip
    update = BatchUpdate(trainer, 1, rows, None)
    return trainer, update.forward_backward(rows, update.counts[0])[0].result()["loss/mean"]


@pytest.mark.parametrize("loss", [TopSum, Wise])
@pytest.mark.parametrize("is_fused", [True, False])
def test_a_loss_gets_the_column_in_whole_rows_and_in_sequences(
    make_model: MakeModel, pack: Any, random_documents: Any, loss: type[Loss], is_fused: bool
) -> None:
    documents, ids = random_documents([6, 4]), numbered_ids(10, 3)
    _, value = trained(make_model, loss, [with_ids(pack(documents), ids)], fused_lm_head=is_fused)
    plain = make_model("sdpa")
    expected, start = 0.0, 0
    for document in documents:
        log_softmax = plain(torch.tensor([document])).logits[0, :-1].log_softmax(-1)
        top = torch.from_numpy(ids[start + 1 : start + len(document)].astype(np.int64))
        expected += float(log_softmax.gather(1, top).sum().detach())
        start += len(document)
    assert value == pytest.approx(expected / 8)


def test_a_loss_that_reads_the_column_requires_the_ids(
    make_model: MakeModel, pack: Any, random_documents: Any
) -> None:
    assert Component("x", TopSum).required == ["top_ids"]
    with pytest.raises(StreamError, match="'top_sum' reads the stream 'top_ids', which they lack"):
        trained(make_model, TopSum, [pack(random_documents([6, 4]))])


def test_where_no_loss_reads_the_column_nothing_more_goes_through_the_head(
    make_model: MakeModel, pack: Any, random_documents: Any
) -> None:
    batch, ids = pack(random_documents([6, 4])), numbered_ids(10, 3)
    ids[:] = 99  # not even looked at
    first, second = (
        trained(make_model, type("Plain", (Loss,), {"name": "p", "__call__": call}), [each])
        for each in (batch, with_ids(batch, ids))
    )
    assert first[1] == second[1]
    pairs = zip(first[0].model.parameters(), second[0].model.parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)  # type: ignore[arg-type]
    assert second[0].forward(with_ids(batch, ids))[3] == {}


def call(self: Loss, inputs: LossInputs) -> LossOutputs:
    assert inputs.top_logprobs is None
    return LossOutputs(-inputs.trainer_logprobs[inputs.loss_mask].sum(), {})
