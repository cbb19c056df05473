"""Replaying the choices of routers: a mixture by its formula, and the layers of routes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from prime_rl.trainer.routes import Recorder, Replay, choosing, observe_routers

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "initializer_range": 0.3,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}


def qwen(**changes: Any) -> Qwen3MoeForCausalLM:
    """Three layers of four experts; the first layer is dense."""
    torch.manual_seed(0)
    settings = {"num_experts": 4, "moe_intermediate_size": 8, "mlp_only_layers": [0]}
    settings |= {"norm_topk_prob": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES | settings | changes)).eval()


def logits_of(model: Any, tokens: Tensor, chooser: Any = None) -> Tensor:
    with torch.no_grad(), choosing(chooser):
        found: Tensor = model(input_ids=tokens[None], use_cache=False).logits[0]
    return found


TOKENS = torch.arange(2, 9)


def test_a_mixture_computes_by_the_replayed_experts_with_its_own_weights() -> None:
    """y = sum_e w_e down_e(silu(gate_e x) up_e x), with w the router's softmax over all experts,
    normalized over the replayed ones."""
    model = qwen(mlp_only_layers=[])
    mixtures = observe_routers(model)
    block = model.model.layers[1].mlp
    x = torch.randn(1, 5, 16)
    routes = torch.tensor([[0, 1], [3, 2], [1, 3], [2, 0], [-1, -1]])
    whole = routes[:, None].expand(-1, 3, -1)
    with torch.no_grad(), choosing(Replay(whole, mixtures, 3)):
        output = block(x)[0]
        scores = (x[0] @ block.gate.weight.T).softmax(-1)

    for token, experts in enumerate(routes.tolist()):
        if experts == [-1, -1]:
            experts = scores[token].topk(2).indices.tolist()
        weights = scores[token, experts] / scores[token, experts].sum()
        expected = torch.zeros(16)
        for weight, expert in zip(weights, experts, strict=True):
            gate, up = (block.experts.gate_up_proj[expert] @ x[0, token]).chunk(2)
            hidden = torch.nn.functional.silu(gate) * up
            expected += weight * (block.experts.down_proj[expert] @ hidden)
        torch.testing.assert_close(output[token], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("by_layer", [False, True])
def test_routes_count_mixtures_or_all_layers(by_layer: bool) -> None:
    """The first of three layers is dense: an engine that counts all layers has zeros there."""
    model = qwen()
    mixtures = observe_routers(model)
    assert [(mixture.number, mixture.layer) for mixture in mixtures] == [(0, 1), (1, 2)]

    recorder = Recorder(mixtures)
    own = logits_of(model, TOKENS, recorder)
    routes = recorder.routes
    assert routes.shape == (7, 2, 2)
    if by_layer:
        routes = torch.cat([torch.zeros_like(routes[:, :1]), routes], dim=1)
    replay = Replay(routes, mixtures, 3)
    torch.testing.assert_close(logits_of(model, TOKENS, replay), own, atol=0, rtol=0)
    assert [int(count) for count in replay.flips] == [0, 7 * 2 * 2]


def test_flips_are_the_replayed_experts_that_the_router_did_not_take() -> None:
    """Four experts of which a token has two: with the two others every choice is flipped, and with
    one of them a half. Tokens without routes count nowhere."""
    model = qwen()
    mixtures = observe_routers(model)
    recorder = Recorder(mixtures)
    logits_of(model, TOKENS, recorder)
    first = recorder.routes[:, 0]
    others = torch.tensor([sorted({0, 1, 2, 3} - set(row)) for row in first.tolist()])
    half = torch.stack([first[:, 0], others[:, 0]], 1)

    for chosen, expected in ((others, 10), (half, 5)):
        replay = Replay(torch.stack([chosen, chosen], 1), mixtures, 3)
        replay.present[5:] = False
        with choosing(replay):
            model.model.layers[1].mlp(model_input_of_layer(model, TOKENS))
        assert [int(count) for count in replay.flips] == [expected, 10]


def model_input_of_layer(model: Any, tokens: Tensor) -> Tensor:
    """What the mixture of layer 1 gets."""
    seen: list[Tensor] = []
    handle = model.model.layers[1].mlp.register_forward_pre_hook(lambda _, x: seen.append(x[0]))
    logits_of(model, tokens)
    handle.remove()
    return seen[0].detach()


def test_a_router_that_scores_before_its_softmax_is_replayed_too() -> None:
    """GPT-OSS takes the softmax over the chosen experts only."""
    torch.manual_seed(0)
    settings = {"num_local_experts": 4, "layer_types": ["full_attention"] * 3}
    model = GptOssForCausalLM(GptOssConfig(**SIZES | settings)).eval()
    mixtures = observe_routers(model)
    routes = torch.from_numpy(np.tile([[0, 3]], (7, 3, 1)))
    replay = Replay(routes, mixtures, 3)
    recorder = Recorder(mixtures)
    moved = logits_of(model, TOKENS, replay)
    own = logits_of(model, TOKENS, recorder)
    assert not torch.allclose(moved, own)
    assert int(replay.flips[0]) > 0
    again = Replay(recorder.routes, mixtures, 3)
    torch.testing.assert_close(logits_of(model, TOKENS, again), own, atol=0, rtol=0)


def test_a_dense_model_has_no_mixtures_and_no_chooser_changes_nothing() -> None:
    dense = qwen(mlp_only_layers=[0, 1, 2])
    assert observe_routers(dense) == []
    model = qwen()
    before = logits_of(model, TOKENS)
    observe_routers(model)
    torch.testing.assert_close(logits_of(model, TOKENS), before, atol=0, rtol=0)
