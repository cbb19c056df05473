"""log π of packed documents by the kernels equals that of each by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from single_documents import by_document, called, reference
from torch import Tensor
from trainer_fixtures import VOCAB
from transformers import PreTrainedModel

from prime_rl.trainer.logprobs import token_logprobs
from prime_rl.trainer.packed_row import make_row
from prime_rl.trainer.packing import Packing
from prime_rl_kernels import kernels
from prime_rl_kernels.kernels import KernelConfig, Varlen
from prime_rl_kernels.packing import WholeRow

CPU = torch.device("cpu")
LENGTHS = [5, 9, 5, 1, 12, 9, 2]
MakeModel = Callable[..., PreTrainedModel]
AUTO = Varlen(KernelConfig())
FUSED = Varlen(KernelConfig(fused_lm_head=True))


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
    kernel = Varlen(KernelConfig(fused_lm_head=True))
    kernel.block_logits = 5 * 16
    found = token_logprobs(fused, row, kernel=kernel)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want)
    torch.autograd.backward(found[0].square().sum())
    torch.autograd.backward(expected[0].square().sum())
    for got, want in zip(fused.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad)


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
    packing = Packing() if attention == "sdpa" else WholeRow()
    row = make_row(micro_batch, CPU, packing)
    found, _ = token_logprobs(make_model(attention, **changes), row, packing)
    plain = make_model("sdpa", **changes)
    for document, got in zip(documents, by_document(micro_batch, found), strict=True):
        torch.testing.assert_close(got, reference(plain, document), atol=1e-6, rtol=0)
