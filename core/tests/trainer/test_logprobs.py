"""log π of packed documents equals that of each by itself through the plain Hugging Face model."""

from __future__ import annotations

from collections.abc import Callable
from math import log
from typing import Any

import numpy as np
import pytest
import torch
from single_documents import by_document, called, reference
from trainer_fixtures import VOCAB
from transformers import PreTrainedModel

from prime_rl.trainer.logprobs import token_logprobs
from prime_rl.trainer.packed_row import make_row

CPU = torch.device("cpu")
LENGTHS = [5, 9, 5, 1, 12, 9, 2]
MakeModel = Callable[..., PreTrainedModel]


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
