"""Operations worked out manually, by torch's own counter, and as shares of known peaks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GptOssConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
)

from prime_rl import Loss, LossInputs, LossOutputs
from prime_rl.trainer.loop import Trainer
from prime_rl.trainer.packed_row import make_row
from prime_rl_kernels.attention import Continuation, Documents
from prime_rl_kernels.packing import SharedPrompts
from prime_rl_kernels.prefix_sharing import RowLayout
from prime_rl_lora.model import add_lora
from prime_rl_lora.tuning import Lora, LoraConfig
from prime_rl_observers.device_usage import mfu, model_cost, num_pairs, peak_flops, peak_of

CPU = torch.device("cpu")
BLOCK = 32 * 4 * 8 * 2 + 2 * 32 * 2 * 8 + 3 * 32 * 64
"""Weights of the tiny model's block: q and o, k and v, the MLP."""
HEAD = 32 * 61


@pytest.fixture
def model(make_model: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    return make_model()


def pairs(documents: Documents, window: int | None) -> int:
    empty = torch.empty(0, dtype=torch.int64)
    return num_pairs(RowLayout(empty, documents.lengths, empty, empty, documents), window)


def test_a_packed_row(model: PreTrainedModel, pack: Any, random_documents: Any) -> None:
    """9 + 5 tokens, of which 8 + 4 are targets; each sequence's last one is not computed."""
    cost = model_cost(model)
    assert cost is not None
    shared = make_row(pack(random_documents([9, 5])), CPU, SharedPrompts())
    plain = make_row(pack(random_documents([9, 5])), CPU)
    head, pair = 6 * HEAD * 12, 12 * 4 * 8 * 2  # two layers
    assert cost.of(plain) == 6 * 2 * BLOCK * 14 + head + pair * (9 * 10 / 2 + 5 * 6 / 2)
    assert cost.of(shared) == 6 * 2 * BLOCK * 12 + head + pair * (8 * 9 / 2 + 4 * 5 / 2)


def test_it_counts_what_torch_counts(
    model: PreTrainedModel, pack: Any, random_documents: Any
) -> None:
    """Whose attention is the whole square here, without the causal half."""
    cost = model_cost(model)
    assert cost is not None
    row = make_row(pack(random_documents([9])), CPU)
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        out = model(input_ids=row.token_ids[None], use_cache=False).logits
        torch.autograd.backward(out.sum())
    counted = cost.of(row) + cost.per_target  # here the last token goes through the head, too
    ((_, per_pair),) = cost.per_pair
    causal_half = per_pair * (9 * 9 - 9 * 10 / 2)
    rotary = counter.get_total_flops() - counted - causal_half
    assert 0 <= rotary < 0.01 * counted


def test_frozen_matrices_need_no_gradient_of_their_own(model: PreTrainedModel, pack: Any) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    cost = model_cost(model)
    assert cost is not None
    assert (cost.per_token, cost.per_target) == (4 * 2 * BLOCK, 4 * HEAD)


def test_an_adapter_counts_beside_its_frozen_base_and_a_replacement_in_its_place(
    make_model: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    """Rank 4 beside q_proj [32, 32]; o_proj [32, 32] and the head train whole."""
    model = make_model(tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    saved = ["o_proj", "lm_head"]
    config = LoraConfig(rank=4, target_modules=["q_proj"], modules_to_save=saved)
    Lora(config).prepare(model, tmp_path, None)
    cost = model_cost(model)
    assert cost is not None
    adapter, whole = 4 * (32 + 32), 32 * 32
    assert cost.per_token == 2 * (4 * (BLOCK - whole) + 6 * (adapter + whole))
    assert cost.per_target == 6 * HEAD


def test_pairs_of_documents() -> None:
    documents = Documents((4, 4, 2), CPU)
    assert pairs(documents, None) == 10 + 10 + 3
    assert pairs(documents, 2) == 7 + 7 + 3  # 1 + 2 + 2 + 2
    assert pairs(documents, 1) == 4 + 4 + 2
    assert pairs(documents, 9) == 10 + 10 + 3


def test_pairs_of_continuations() -> None:
    """Two of 2 tokens after a prompt of 3: 4 + 5 keys each, beside the prompt's own 6 pairs."""
    empty = torch.empty(0, dtype=torch.int64)
    documents = Documents((3,), CPU, (Continuation(2, 2, 5, empty),))
    assert pairs(documents, None) == 6 + 2 * 9
    assert pairs(documents, 3) == 6 + 2 * 6
    assert pairs(documents, 5) == 6 + 2 * 9
    assert pairs(documents, 4) == 6 + 2 * 8


def test_every_mask_has_as_many_pairs_as_are_counted() -> None:
    documents = Documents((7, 3, 1), CPU)
    for window in (None, 1, 2, 5, 7, 20):
        assert pairs(documents, window) == int(documents.block_mask(window).sum())


def test_a_layer_with_a_window_costs_less(make_model: Callable[..., PreTrainedModel]) -> None:
    model = make_model(use_sliding_window=True, sliding_window=4, max_window_layers=1)
    cost = model_cost(model)
    assert cost is not None
    assert dict(cost.per_pair) == {4: 12 * 4 * 8, None: 12 * 4 * 8}


def test_a_mixture_of_experts_gets_no_figure_and_the_log_says_why(
    model: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    model.config.num_experts = 8
    assert model_cost(model) is None
    assert caplog.messages == [
        "no perf/mfu for Qwen3ForCausalLM: it has experts, of which a token uses only some"
    ]


@pytest.mark.parametrize("config_class", [Qwen3MoeConfig, GptOssConfig])
def test_the_experts_that_a_token_uses_count(config_class: Callable[..., Any]) -> None:
    """Two of eight, with three matrices of 32 x 16 each, and the router; no biases."""
    config = config_class(
        vocab_size=61, hidden_size=32, intermediate_size=16, moe_intermediate_size=16,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        num_local_experts=8, num_experts_per_tok=2, mlp_only_layers=[],
    )  # fmt: skip
    cost = model_cost(AutoModelForCausalLM.from_config(config))
    assert cost is not None
    attention = 32 * 4 * 8 * 2 + 2 * 32 * 2 * 8
    assert cost.per_token == 6 * 2 * (attention + 32 * 8 + 2 * 3 * 32 * 16)


def test_adapters_of_the_experts_that_a_token_uses_count() -> None:
    """Two of eight; the base is frozen: 4 operations per weight. A and B of rank 4 of the two
    products, 32 -> 32 and 16 -> 32, for each expert; of attention for o_proj, 32 -> 32."""
    config = Qwen3MoeConfig(
        vocab_size=61, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=8,
        num_experts_per_tok=2, mlp_only_layers=[],
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    add_lora(model, LoraConfig(rank=4, experts=True, target_modules=["o_proj"]))
    cost = model_cost(model)
    assert cost is not None
    attention = 32 * 4 * 8 * 2 + 2 * 32 * 2 * 8
    base = attention + 32 * 8 + 2 * 3 * 32 * 16
    adapters = 4 * (32 + 32) + 2 * (4 * (32 + 32) + 4 * (16 + 32))
    assert cost.per_token == 2 * (4 * base + 6 * adapters)


def test_layers_may_differ_in_head_size() -> None:
    """Gemma 4: 4 heads of 8 within a window, then 4 of 16; embeddings by layer are looked up."""
    config = Gemma4TextConfig(
        vocab_size=61,
        vocab_size_per_layer_input=61,
        hidden_size=32,
        hidden_size_per_layer_input=8,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        global_head_dim=16,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
    )
    cost = model_cost(Gemma4ForCausalLM(config))
    assert cost is not None
    assert dict(cost.per_pair) == {4: 12 * 4 * 8, None: 12 * 4 * 16}
    attention = [32 * size * (4 + 2 + 2 + 4) for size in (8, 16)]  # q, k, v and o
    by_layer = 32 * 8 * 2  # into the blocks' own inputs, and for each block a gate and a way out
    blocks = sum(attention) + 2 * (3 * 32 * 64 + 2 * 32 * 8) + by_layer
    assert cost.per_token == 6 * blocks


def test_a_config_that_raises_gets_no_figure_and_stops_nothing(
    model: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    model.config.num_attention_heads, model.config.head_dim = 0, 0
    assert model_cost(model) is None
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("no perf/mfu for Qwen3ForCausalLM: ")


@pytest.mark.parametrize("kinds", [["linear_attention", "full_attention"], ["conv"] * 2])
def test_layers_without_attention_get_no_figure(model: PreTrainedModel, kinds: list[str]) -> None:
    model.config.layer_types = kinds
    assert model_cost(model) is None


def test_peaks_by_name() -> None:
    assert peak_of("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_of("NVIDIA H100 PCIe") == 756e12
    assert peak_of("NVIDIA H200") == 989e12
    assert peak_of("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_of("NVIDIA L4") == 121e12
    assert peak_of("NVIDIA GeForce RTX 4090") == 165.2e12
    assert peak_of("NVIDIA L40") is None
    assert peak_of("NVIDIA GeForce RTX 4090 Laptop GPU") is None
    assert peak_flops(CPU, "bfloat16") is None


def test_upstreams_published_mfu_comes_out() -> None:
    """Qwen3-0.6B, one sequence of 16,384 tokens: 9.21 GFLOP per token, 11.1 % at 11,896 tok/s."""
    config = Qwen3Config(
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        cost = model_cost(Qwen3ForCausalLM(config))
    assert cost is not None
    ((_, per_pair),) = cost.per_pair
    number = pairs(Documents((16_384,), CPU), None)
    per_token = cost.per_token + cost.per_target + per_pair * number / 16_384
    assert per_token == pytest.approx(9.21e9, rel=1e-3)
    found = mfu(11_896 * per_token, 1.0, 989e12)
    assert found["perf/mfu"] == pytest.approx(11.1, abs=0.05)


def test_mfu_is_left_out_where_it_is_unknown() -> None:
    assert mfu(8e12, 2.0 * 4, 10e12) == {"perf/mfu": pytest.approx(10)}
    assert mfu(8e12, 2.0 * 4, None) == mfu(0.0, 2.0 * 4, 10e12) == {}


class Silent(Loss):
    """Trains nothing."""

    name = "silent"
    token_wise = True

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        return LossOutputs(inputs.trainer_logprobs.sum() * 0.0, {})


def test_each_step_counts_its_own_operations(
    make_trainer: Callable[..., Trainer], pack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prime_rl_observers.device_usage.peak_flops", lambda *_: 1e12)
    trainer = make_trainer(Silent, {})
    cost = model_cost(trainer.model)
    assert cost is not None
    for step, rows in ((1, 2), (2, 1)):
        metrics = trainer.train_step(step, [pack([[1, 2, 3]])] * rows)
        flops = rows * cost.of(make_row(pack([[1, 2, 3]]), CPU))
        share = flops / (metrics["time/forward_backward"] * 1e12)
        assert metrics["perf/mfu"] == pytest.approx(100 * share)
        assert 0 < metrics["perf/peak_memory"] < 1000
