"""Products by oneDNN: the numbers of float64, and torch's own way for what is not for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from prime_rl_embedded.testing import write_model
from prime_rl_kernels import products
from prime_rl_kernels.products import (
    Linear,
    PackedWeight,
    linear,
    pad_rows,
    padded_rows,
    replace_linears,
)

SIZES = [(), (3,), (2, 5)]
"""Shapes of x before its last dimension."""


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small products go to oneDNN too."""
    monkeypatch.setattr(products, "MIN_OPERATIONS", 0)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_this_torch_has_the_operator() -> None:
    assert products._operator is not None


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("bias", [False, True])
def test_views_have_the_numbers_of_float64(bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, b = (torch.randn(shape, generator=generator) for shape in ((40, 7), (9, 40), (9,)))
    expected = x.T.double() @ weight.double().T + (b.double() if bias else 0.0)
    close(linear(x.T, weight, b if bias else None), expected)
    close(linear(x.T, weight.T.contiguous().T, b if bias else None), expected)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("shape", SIZES[1:])
@pytest.mark.parametrize("frozen", [(), ("weight",), ("x", "bias")])
def test_gradients_are_those_of_float64(shape: tuple[int, ...], frozen: tuple[str, ...]) -> None:
    torch.manual_seed(1)
    layer = nn.Linear(6, 4)
    x, wanted = torch.randn(*shape, 6), torch.randn(*shape, 4)
    replace_linears(nn.Sequential(layer))
    assert type(layer) is Linear
    names = {"x": x, "weight": layer.weight, "bias": layer.bias}
    exact = {name: each.detach().double().requires_grad_() for name, each in names.items()}
    for name, each in names.items():
        each.requires_grad_(name not in frozen)
    found, expected = layer(x), exact["x"] @ exact["weight"].T + exact["bias"]
    close(found.detach(), expected.detach())
    (found * wanted).sum().backward()
    (expected * wanted.double()).sum().backward()
    for name, each in names.items():
        if name in frozen:
            assert each.grad is None
        else:
            assert each.grad is not None and exact[name].grad is not None
            close(each.grad, exact[name].grad)


@pytest.mark.usefixtures("always")
def test_a_packed_weight_follows_its_weight_when_it_is_told() -> None:
    weight, x = torch.randn(40, 24), torch.randn(8, 24)
    packed = PackedWeight(weight)
    close(packed(x), x.double() @ weight.double().T)
    weight.mul_(2.0)
    packed.pack()
    close(packed(x, torch.ones(40)), x.double() @ weight.double().T + 1.0)


@pytest.mark.parametrize("shape", [(5, 3), (32, 32), (128, 256), (256, 128), (1536, 576)])
def test_a_row_has_the_same_bits_whatever_the_other_rows_are(shape: tuple[int, int]) -> None:
    """So the engine's log-probabilities do not depend on which requests share a step."""
    generator = torch.Generator().manual_seed(0)
    packed = PackedWeight(torch.randn(shape[::-1], generator=generator))
    x = torch.randn(130, shape[0], generator=generator)
    whole = packed(x)
    for count in (1, 2, 3, 7, 16, 33, 64, 129):
        assert torch.equal(packed(x[:count]), whole[:count]), count
        assert torch.equal(packed(x[-count:]), whole[-count:]), count


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_computed_by_torch(dtype: torch.dtype) -> None:
    x, weight = torch.ones(3, 4, dtype=dtype), torch.full((2, 4), 0.5, dtype=dtype)
    assert torch.equal(linear(x, weight), torch.full((3, 2), 2.0, dtype=dtype))


@pytest.mark.usefixtures("always")
def test_autocast_decides_the_dtype() -> None:
    layer = nn.Linear(4, 2)
    replace_linears(layer)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.ones(3, 4)).dtype == torch.bfloat16


def test_names_and_parameters_stay_and_subclasses_are_left() -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(2, 3), Own(3, 2))
    before = dict(model.named_parameters())
    replace_linears(model)
    assert [type(each) for each in model] == [Linear, Own]
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)


def test_the_head_of_a_language_model_stays_for_the_fused_one(tmp_path: Path) -> None:
    write_model(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    replace_linears(model)
    assert type(model.get_output_embeddings()) is nn.Linear
    assert type(model.model.layers[0].mlp.up_proj) is Linear


def test_few_numbers_of_rows_are_in_use() -> None:
    """Each costs oneDNN a millisecond and a mebibyte."""
    found = [padded_rows(count) for count in range(1, 8193)]
    for count, rows in enumerate(found, 1):
        assert count <= rows <= max(2, count * 17 / 16)
    assert len({rows for rows in found if rows >= 1024}) == 3 * 16 + 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_only_rows_for_onednn_are_padded(dtype: torch.dtype) -> None:
    assert len(pad_rows(torch.ones(33, 2))) == 34
    other = torch.ones(33, 2, dtype=dtype)
    assert pad_rows(other) is other
