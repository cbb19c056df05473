"""Norms and rotary embeddings: the numbers of float64, and only what computes the same."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from prime_rl_kernels import gpu_check, gpu_layers
from prime_rl_kernels.layers import RMSNorm, Rotary, models_own, replace_layers

TINY: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def check_gradients(function: Any, expected: Any, *tensors: Tensor) -> None:
    """``function`` in float32 beside ``expected``, plain torch in float64."""
    torch.manual_seed(0)
    ours = [each.detach().requires_grad_() for each in tensors]
    exact = [each.detach().double().requires_grad_() for each in tensors]
    found, wanted = function(*ours), expected(*exact)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    slope = torch.randn_like(found)
    found.backward(slope)
    wanted.backward(slope.double())
    for own, each in zip(ours, exact, strict=True):
        assert own.grad is not None and each.grad is not None
        torch.testing.assert_close(own.grad.double(), each.grad, rtol=1e-5, atol=1e-5)


def test_a_norm_and_its_gradients_are_those_of_float64() -> None:
    apply: Any = RMSNorm.apply
    torch.manual_seed(1)
    check_gradients(
        lambda x, w: apply(x, w, 0.1),
        lambda x, w: x * (x.pow(2).mean(-1, keepdim=True) + 0.1).rsqrt() * w,
        torch.randn(2, 5, 3, 8),
        torch.randn(8),
    )


def test_a_rotary_embedding_of_a_view_and_its_gradient_are_those_of_float64() -> None:
    apply: Any = Rotary.apply
    torch.manual_seed(2)
    cos, sin = torch.randn(2, 1, 2, 1, 5, 8).unbind(0)  # not of one angle: each half counts
    check_gradients(
        lambda x: apply(x.transpose(1, 2), cos, sin),
        lambda x: x.transpose(1, 2) * cos + qwen3.rotate_half(x.transpose(1, 2)) * sin,
        torch.randn(2, 5, 3, 8),
    )


def test_a_frozen_norm_has_no_gradient_of_its_weight() -> None:
    x, weight = torch.randn(3, 4, requires_grad=True), torch.ones(4)
    RMSNorm.apply(x, weight, 1e-6).sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is None and x.grad is not None


def test_replaced_layers_of_a_model_give_its_logits_and_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(qwen3, "apply_rotary_pos_emb", qwen3.apply_rotary_pos_emb)  # restored
    torch.manual_seed(3)
    model = Qwen3ForCausalLM(Qwen3Config(**TINY))
    ids = torch.arange(10)[None]
    plain = model(input_ids=ids).logits
    plain.square().sum().backward()
    wanted = {name: each.grad for name, each in model.named_parameters()}
    replaced = copy.deepcopy(model)
    replace_layers(replaced)
    replace_layers(replaced)  # again: nothing to do
    norm = replaced.model.layers[0].self_attn.q_norm
    assert isinstance(norm, qwen3.Qwen3RMSNorm) and type(norm) is not qwen3.Qwen3RMSNorm
    assert type(norm).__mro__[1] is qwen3.Qwen3RMSNorm
    assert type(model.model.norm) is qwen3.Qwen3RMSNorm
    replaced.zero_grad()
    found = copy.deepcopy(replaced)(input_ids=ids).logits
    torch.testing.assert_close(found, plain)
    replaced(input_ids=ids).logits.square().sum().backward()
    for name, each in replaced.named_parameters():
        torch.testing.assert_close(each.grad, wanted[name], rtol=1e-4, atol=1e-5)


def test_other_dtypes_and_autocast_are_computed_by_the_model_itself() -> None:
    norm = qwen3.Qwen3RMSNorm(8)
    replace_layers(nn.Sequential(norm))
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    own = qwen3.Qwen3RMSNorm(8)
    assert torch.equal(norm(x), own(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert type(norm(x.float().requires_grad_()).grad_fn).__name__ == "MulBackward0"


def test_a_norm_with_another_formula_stays() -> None:
    model = Gemma3ForCausalLM(Gemma3TextConfig(**TINY, layer_types=["full_attention"]))
    kinds = [type(module) for module in model.modules()]
    replace_layers(model)
    assert [type(module) for module in model.modules()] == kinds


def test_a_gate_is_computed_by_the_model_itself() -> None:
    torch.manual_seed(3)
    # Since transformers 5.24 it divides by the root mean square of a group: another formula.
    by_groups = "group_size" in inspect.signature(MambaRMSNormGated).parameters
    norm = MambaRMSNormGated(6, group_size=3) if by_groups else MambaRMSNormGated(6)
    x, gate = torch.randn(2, 4, 6), torch.randn(2, 4, 6)
    expected, plain = norm(x, gate), norm(x)
    replace_layers(norm)
    assert (type(norm) is MambaRMSNormGated) == by_groups
    assert torch.equal(norm(x, gate=gate), expected)
    torch.testing.assert_close(norm(x), plain)


def test_layers_of_a_gpu_replace_the_same_formulas_and_leave_cpus_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = models_own(qwen3.apply_rotary_pos_emb)
    monkeypatch.setattr(qwen3, "apply_rotary_pos_emb", own)  # restored
    torch.manual_seed(3)
    model = Qwen3ForCausalLM(Qwen3Config(**TINY))
    ids = torch.arange(10)[None]
    plain = model(input_ids=ids).logits
    replace_layers(Qwen3ForCausalLM(Qwen3Config(**TINY)))  # of another model, on the CPU
    gpu_layers.replace_layers(model)
    gpu_layers.replace_layers(model)  # again: nothing to do
    block = model.model.layers[0]
    replaced = [block.mlp, block.input_layernorm, block.self_attn.q_norm, model.model.norm]
    for module, kind in zip(replaced, [qwen3.Qwen3MLP] + [qwen3.Qwen3RMSNorm] * 3, strict=True):
        assert type(module).__mro__[1] is kind
        assert type(module).__name__ == kind.__name__
    rotate: Any = qwen3.apply_rotary_pos_emb
    assert rotate.replaces is own and rotate.__module__ == gpu_layers.__name__
    assert torch.equal(model(input_ids=ids).logits, plain)


def test_an_mlp_with_another_activation_and_a_norm_with_another_formula_stay() -> None:
    gelu = Qwen3ForCausalLM(Qwen3Config(**TINY, hidden_act="gelu"))
    gpu_layers.replace_layers(gelu)
    assert type(gelu.model.layers[0].mlp) is qwen3.Qwen3MLP
    model = Gemma3ForCausalLM(Gemma3TextConfig(**TINY, layer_types=["full_attention"]))
    kinds = [type(module) for module in model.modules()]
    gpu_layers.replace_layers(model)
    assert [type(module) for module in model.modules()] == kinds


def test_triton_kernels_are_not_used_without_a_gpu_or_triton(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", "prime_rl.trainer.kernels")
    gpu_check.is_usable.cache_clear()
    assert not gpu_check.is_usable(torch.device("cpu"))
    assert not caplog.text  # none is expected there
    monkeypatch.setattr(gpu_check, "find_spec", lambda name: None)
    assert not gpu_check.is_usable(torch.device("cuda"))
    assert "not used, which is slower: triton is not installed" in caplog.text
    gpu_check.is_usable.cache_clear()
    monkeypatch.setattr(gpu_check, "find_spec", lambda name: object())
    monkeypatch.setattr(gpu_check, "find_fault", lambda device: "SwiGLU is off")
    assert not gpu_check.is_usable(torch.device("cuda"))
    assert "SwiGLU is off" in caplog.text
    gpu_check.is_usable.cache_clear()
    monkeypatch.setattr(gpu_check, "find_fault", lambda device: "")
    assert gpu_check.is_usable(torch.device("cuda"))
    gpu_check.is_usable.cache_clear()
