"""log π of packed documents equals that of each by itself through the plain Hugging Face model."""

from __future__ import annotations

from collections.abc import Callable
from math import log
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from prime_rl.trainer.logprobs import token_logprobs
from prime_rl.trainer.packed_row import make_row
from prime_rl.trainer.packing import Packing
from prime_rl.wire import MicroBatch
from prime_rl_kernels import kernels
from prime_rl_kernels.kernels import KernelConfig, Varlen
from prime_rl_kernels.packing import Packed

CPU = torch.device("cpu")
VOCAB = 61
LENGTHS = [5, 9, 5, 1, 12, 9, 2]
MakeModel = Callable[..., PreTrainedModel]
AUTO = Varlen(KernelConfig())
FUSED = Varlen(KernelConfig(fused_lm_head=True))


def reference(model: PreTrainedModel, document: list[int], temperature: float = 1.0) -> Tensor:
    """[L]: the document by itself through ``model.forward``; log(1/V) for its first token."""
    logits = model(torch.tensor([document])).logits[0] / temperature
    chosen = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(document[1:])[:, None])[:, 0]
    return torch.cat([chosen.new_full((1,), -log(VOCAB)), chosen])


def by_document(micro_batch: MicroBatch, column: Tensor) -> list[Tensor]:
    """Split the row's column, and bring the documents back into the order they came in."""
    lengths = micro_batch.sequence_lengths
    order = np.argsort(-lengths, kind="stable")
    parts: dict[int, Tensor] = dict(
        zip(order.tolist(), column.split_with_sizes(lengths[order].tolist()), strict=True)
    )
    return [parts[index] for index in range(len(parts))]


@pytest.mark.parametrize("attention", ["sdpa", "varlen", "mask"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_word_embeddings": False, "num_key_value_heads": 4},
     {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}],
    ids=["grouped heads", "plain heads", "sliding window"],
)  # fmt: skip
def test_packed_equals_separate(
    make_model: MakeModel, pack: Any, random_documents: Any, attention: str, changes: dict[str, Any]
) -> None:
    documents = random_documents(LENGTHS)
    micro_batch = pack(documents)
    packing = Packing() if attention == "sdpa" else Packed()
    row = make_row(micro_batch, CPU, packing)
    found, _ = token_logprobs(make_model(attention, **changes), row, packing)
    plain = make_model("sdpa", **changes)
    for document, got in zip(documents, by_document(micro_batch, found), strict=True):
        torch.testing.assert_close(got, reference(plain, document), atol=1e-6, rtol=0)


def test_gradients_of_packed_equal_the_sum_of_separate(
    make_model: MakeModel, pack: Any, random_documents: Any
) -> None:
    documents = random_documents(LENGTHS)
    packed, plain = make_model(), make_model("sdpa")
    found, _ = token_logprobs(packed, make_row(pack(documents), CPU))
    torch.autograd.backward(found.sum())
    torch.autograd.backward([reference(plain, document).sum() for document in documents])
    for (name, got), expected in zip(packed.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, expected.grad, atol=1e-6, rtol=0, msg=name)


def test_no_document_sees_another(make_model: MakeModel, pack: Any, random_documents: Any) -> None:
    model = make_model()
    first, second, third = random_documents([7, 4, 7])
    changed = random_documents([7], seed=5)[0]
    with torch.no_grad():
        before = pack([first, second, third])
        after = pack([changed, second, third])
        old, _ = token_logprobs(model, make_row(before, CPU))
        new, _ = token_logprobs(model, make_row(after, CPU))
    same = zip(by_document(before, old)[1:], by_document(after, new)[1:], strict=True)
    assert all(torch.equal(a, b) for a, b in same)
    assert not torch.allclose(by_document(before, old)[0], by_document(after, new)[0])


def test_a_documents_first_token_is_uniform_and_has_no_gradient(
    make_model: MakeModel, pack: Any, random_documents: Any
) -> None:
    micro_batch = pack(random_documents([4, 4]), prompt=0)  # even the first tokens are members
    model = make_model()
    found, entropies = token_logprobs(model, make_row(micro_batch, CPU))
    assert found[[0, 4]].tolist() == pytest.approx([-log(VOCAB)] * 2)
    assert entropies[[0, 4]].tolist() == pytest.approx([log(VOCAB)] * 2)
    torch.autograd.backward(found[[0, 4]].sum())
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


def test_each_token_is_divided_by_its_own_temperature(
    make_model: MakeModel, pack: Any, random_documents: Any
) -> None:
    documents, temperatures = random_documents([6, 3, 8]), [0.5, 1.0, 1.7]
    micro_batch = pack(documents, temperatures=temperatures)
    found, entropies = token_logprobs(make_model(), make_row(micro_batch, CPU))
    plain = make_model("sdpa")
    parts = by_document(micro_batch, found)
    for document, temperature, got in zip(documents, temperatures, parts, strict=True):
        expected = reference(plain, document, np.float32(temperature).item())
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)
    logits = plain(torch.tensor([documents[0]])).logits[0, -2] / 0.5
    expected_entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum()
    torch.testing.assert_close(by_document(micro_batch, entropies)[0][-1], expected_entropy)


def test_temperature_scales_the_gradient_too(
    make_model: MakeModel, pack: Any, random_documents: Any
) -> None:
    documents = random_documents([6])
    packed, plain = make_model(), make_model("sdpa")
    found, _ = token_logprobs(packed, make_row(pack(documents, temperatures=[0.5]), CPU))
    torch.autograd.backward(found[3])
    torch.autograd.backward(reference(plain, documents[0], 0.5)[3])
    torch.testing.assert_close(
        packed.get_input_embeddings().weight.grad, plain.get_input_embeddings().weight.grad
    )


@pytest.mark.parametrize("temperatures", [None, [0.5, 1.0, 2.0]])
@pytest.mark.parametrize("tied", [True, False])
def test_the_fused_head_changes_neither_values_nor_gradients(
    make_model: MakeModel,
    pack: Any,
    random_documents: Any,
    temperatures: list[float] | None,
    tied: bool,
) -> None:
    row = make_row(pack(random_documents([6, 9, 4]), temperatures=temperatures), CPU)
    plain, fused = (make_model(tie_word_embeddings=tied) for _ in range(2))
    expected = token_logprobs(plain, row)
    # 16 targets, 5 words
    kernel = Varlen(KernelConfig(fused_lm_head=True, lm_head_block=5 * 16))
    found = token_logprobs(fused, row, kernel=kernel)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want)
    torch.autograd.backward(found[0].square().sum())
    torch.autograd.backward(expected[0].square().sum())
    for got, want in zip(fused.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad)


def called(head: torch.nn.Module) -> list[tuple[int, ...]]:
    """Grows by the shape of what goes through the head, each time it is called."""
    shapes: list[tuple[int, ...]] = []
    head.register_forward_pre_hook(lambda _, inputs: shapes.append(tuple(inputs[0].shape)))
    return shapes


def test_a_row_of_many_logits_is_fused(
    make_model: MakeModel, pack: Any, random_documents: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    shapes = called(model.get_output_embeddings())
    row = make_row(pack(random_documents([6])), CPU)  # 5 targets
    monkeypatch.setitem(kernels.FEW_LOGITS, "cpu", 5 * VOCAB)
    token_logprobs(model, row, kernel=AUTO)
    assert shapes == [(5, 32)]
    monkeypatch.setitem(kernels.FEW_LOGITS, "cpu", 5 * VOCAB - 1)
    token_logprobs(model, row, kernel=AUTO)
    token_logprobs(model, row, kernel=FUSED)
    assert shapes == [(5, 32)]


def test_a_head_that_is_more_than_linear_is_called(
    make_model: MakeModel, pack: Any, random_documents: Any
) -> None:
    class Doubled(torch.nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    model = make_model(tie_word_embeddings=False)
    row = make_row(pack(random_documents([6])), CPU)
    doubled = Doubled(32, VOCAB, bias=False, dtype=torch.float64)
    with torch.no_grad():
        doubled.weight.copy_(model.get_output_embeddings().weight / 2)
        expected, _ = token_logprobs(model, row)
        model.set_output_embeddings(doubled)
        found, _ = token_logprobs(model, row, kernel=FUSED)
        torch.testing.assert_close(found, expected)
        model.float()
        with torch.autocast("cpu", torch.bfloat16):
            rounded = [token_logprobs(model, row, kernel=AUTO)[0]]
        model.base_model.register_forward_hook(lambda *a: rounded.append(a[2].last_hidden_state))
        with torch.autocast("cpu", torch.bfloat16):
            token_logprobs(model, row, kernel=AUTO)
        logits = 2 * rounded[1][0].double() @ doubled.weight.double().T  # of float32, not rounded
        exact = logits.log_softmax(-1)[row.layout.sources, row.token_ids[row.targets]]
    torch.testing.assert_close(rounded[0][row.targets].double(), exact, atol=1e-5, rtol=0)


def test_under_autocast_logits_are_not_rounded(
    make_model: MakeModel, pack: Any, random_documents: Any
) -> None:
    """The hidden state and the weight are rounded to bfloat16, their products summed exactly."""
    model = make_model().float()
    row = make_row(pack(random_documents([6])), CPU)
    hidden: list[Tensor] = []
    model.base_model.register_forward_hook(lambda *a: hidden.append(a[2].last_hidden_state[0]))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found, entropies = token_logprobs(model, row, kernel=AUTO)
    weight = model.get_output_embeddings().weight.bfloat16().double()
    log_softmax = (hidden[0].bfloat16().double() @ weight.T).log_softmax(-1)
    sources, targets = row.layout.sources, row.targets
    expected = log_softmax[sources, row.token_ids[targets]].float()
    torch.testing.assert_close(found[targets], expected, atol=1e-5, rtol=0)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)[sources].float()
    torch.testing.assert_close(entropies[targets], entropy, atol=1e-5, rtol=0)


def test_only_targets_go_through_the_head(
    make_model: MakeModel, pack: Any, random_documents: Any
) -> None:
    model = make_model()
    shapes = called(model.get_output_embeddings())
    token_logprobs(model, make_row(pack(random_documents([10, 7]), prompt=4), CPU))
    assert shapes == [(6 + 3, 32)]


def test_a_row_without_targets_still_has_a_graph(
    make_model: MakeModel, pack: Any, random_documents: Any
) -> None:
    model = make_model()
    row = make_row(pack(random_documents([4, 3]), prompt=9), CPU)
    found, _ = token_logprobs(model, row)
    assert found.tolist() == pytest.approx([-log(VOCAB)] * 7)
    torch.autograd.backward(found.sum())
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    ("keys", "factor", "cap"),
    [
        ({"logit_scale": 0.25}, 0.25, None),  # Cohere
        ({"logits_scaling": 8.0}, 1 / 8, None),  # Granite
        ({"lm_head_multiplier": 3.0}, 3.0, None),  # Falcon-H1
        ({"final_logit_softcapping": 2.0}, 1.0, 2.0),  # Gemma 2 and 4
        ({"logits_scaling": 2.0, "logits_soft_cap": 1.5}, 0.5, 1.5),
    ],
)
def test_a_factor_and_a_cap_on_the_logits_apply(
    make_model: MakeModel,
    pack: Any,
    random_documents: Any,
    keys: dict[str, float],
    factor: float,
    cap: float | None,
    fused: bool,
) -> None:
    """log softmax of factor * z, or of cap * tanh(factor * z / cap), each divided by 0.5."""
    (document,) = random_documents([9])
    model, plain = make_model(), make_model("sdpa")
    vars(model.config).update(keys)
    row = make_row(pack([document], temperatures=[0.5]), CPU)
    found, _ = token_logprobs(model, row, kernel=FUSED if fused else None)
    logits = plain(torch.tensor([document])).logits[0, :-1] * factor
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    chosen = torch.tensor(document[1:])[:, None]
    expected = (logits / 0.5).log_softmax(-1).gather(1, chosen)[:, 0]
    torch.testing.assert_close(found[1:], expected, atol=1e-6, rtol=0)
    torch.autograd.backward([found.sum(), expected.sum()])
    for (name, got), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, other.grad, atol=1e-6, rtol=0, msg=name)
