"""What a GPU's flash kernel is called with: a stand-in with its documented meaning, on CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.attention.varlen
from torch import Tensor
from transformers import PreTrainedModel

from prime_rl.trainer import attention
from prime_rl.trainer.logprobs import token_logprobs
from prime_rl.trainer.packed_row import PackedRow, make_row

CPU = torch.device("cpu")
MakeModel = Callable[..., PreTrainedModel]


@pytest.fixture
def row(pack: Any, random_documents: Any) -> PackedRow:
    return make_row(pack(random_documents([9, 5, 12, 1])), CPU, share=False)


@pytest.fixture
def dtypes(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """What the stand-in was given."""
    seen: list[torch.dtype] = []

    def stand_in(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float | None,
        window_size: tuple[int, int],
        enable_gqa: bool,
    ) -> Tensor:
        """[T, H, D]: query i of a document sees its keys i - left to i + right; -1: all."""
        seen.extend(each.dtype for each in (query, key, value))
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
        lengths = (cu_seq_q[1:] - cu_seq_q[:-1]).tolist()
        assert torch.equal(cu_seq_q, cu_seq_k) and max_q == max_k == max(lengths)
        assert enable_gqa == (query.shape[1] != key.shape[1])
        outputs = []
        for start, length in zip(cu_seq_q.tolist(), lengths, strict=False):
            parts = [each[start : start + length].transpose(0, 1) for each in (query, key, value)]
            left, right = (length if reach < 0 else reach for reach in window_size)
            distance = torch.arange(length)[:, None] - torch.arange(length)
            output = torch.nn.functional.scaled_dot_product_attention(
                *parts,
                attn_mask=(distance <= left) & (distance >= -right),
                scale=scale,
                enable_gqa=enable_gqa,
            )
            outputs.append(output.transpose(0, 1))
        return torch.cat(outputs)

    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", stand_in)
    return seen


@pytest.mark.parametrize(
    "changes",
    [{}, {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}],
    ids=["all before", "window"],
)
def test_the_kernel_computes_what_the_loop_does(
    make_model: MakeModel,
    row: PackedRow,
    dtypes: list[torch.dtype],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
) -> None:
    model = make_model(**changes)
    expected = token_logprobs(model, row)
    assert not dtypes
    monkeypatch.setattr(attention, "_has_varlen_kernel", lambda query: True)
    found = token_logprobs(model, row)
    assert len(dtypes) == 3 * 2  # one call a layer
    torch.testing.assert_close(found, expected)


def test_under_autocast_the_kernel_gets_one_half_dtype(
    make_model: MakeModel,
    row: PackedRow,
    dtypes: list[torch.dtype],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Qwen3's norms leave queries and keys in float32, which the kernel would refuse."""
    asked: list[torch.dtype] = []
    monkeypatch.setattr(
        attention, "_has_varlen_kernel", lambda query: asked.append(query.dtype) or True
    )
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        token_logprobs(make_model().float(), row)
    assert {*dtypes, *asked} == {torch.bfloat16}


def test_this_torch_has_the_kernel_that_is_called() -> None:
    """Its signature is what the choice looks at; a torch without is not called."""
    assert attention._torch_has_grouped_varlen()


def test_the_kernel_takes_no_tensor_of_the_host() -> None:
    assert not attention._has_varlen_kernel(torch.zeros(1, 4, 3, 8, dtype=torch.bfloat16))
