"""Experts by grouped products."""

from __future__ import annotations

import torch
from transformers import (
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from prime_rl_kernels.experts import grouped_mm

MIXTURE = Qwen3MoeConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=128,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    num_experts=4,
    head_dim=8,
)


def test_experts_are_multiplied_in_autocasts_type_and_keep_float32_gradients() -> None:
    """The oracle is transformers' own loop over experts, whose linear layers autocast rounds."""
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(MIXTURE)
    experts = model.model.layers[0].mlp.experts
    hidden, weights = torch.randn(24, 32), torch.rand(24, 2)
    chosen = torch.stack([torch.randperm(4)[:2] for _ in range(24)])
    found = {}
    for name, run in (("ours", grouped_mm), ("loop", type(experts).forward)):
        model.set_experts_implementation("eager")
        experts.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            output = run(experts, hidden, chosen, weights)
        output.float().square().sum().backward()
        found[name] = (output.detach().float(), experts.gate_up_proj.grad, experts.down_proj.grad)
    assert all(gradient.dtype == torch.float32 for gradient in found["ours"][1:])
    plain = grouped_mm(experts, hidden, chosen, weights).detach()
    for ours, loop in zip(found["ours"], found["loop"], strict=True):
        assert (ours - loop).norm() < 0.02 * loop.norm()
    # As far from float32 as bfloat16 is.
    gap = float((found["ours"][0] - plain).norm() / plain.norm())
    assert 1e-3 < gap < 2e-2
