"""Every document of a row has the log π, and gives the gradient, that it has alone in transformers:
for families whose layers or attention would mix documents, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.utils import logging as transformers_logging

from prime_rl import ConfigError, Kernel, Loss, LossInputs, LossOutputs, PluginConfig
from prime_rl.config.trainer import TrainerConfig
from prime_rl.registry.components import installed_losses
from prime_rl.trainer.loop import Trainer
from prime_rl.trainer.model import Policy, load_model
from prime_rl.trainer.packed_row import PackedRow, make_row
from prime_rl.trainer.packing import Packing, batch_sizes
from prime_rl.trainer.self_check import find_packing
from prime_rl_kernels.attention import register
from prime_rl_kernels.blocks import prepare_blocks
from prime_rl_kernels.kernels import Auto, KernelConfig
from prime_rl_lora.tuning import Lora, LoraConfig

CPU = torch.device("cpu")
CONFIG = TrainerConfig(device="cpu")
AUTO = Auto(KernelConfig())
LENGTHS = (9, 17, 16, 5, 5, 2)
"""16 and 17 share a padded batch."""

ENDS = {"vocab_size": 61, "initializer_range": 0.3}
TINY = ENDS | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
GPT = ENDS | {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 128}
LAYERS = {"layer_types": ["linear_attention", "full_attention"]}
DELTA = LAYERS | {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 16}
MAMBA = ENDS | {"hidden_size": 32, "state_size": 8, "num_hidden_layers": 2}

FAST: dict[str, dict[str, Any]] = {
    "Qwen3Next": TINY | DELTA | EXPERTS | {"head_dim": 8},
    "Qwen3_5": TINY | DELTA | {"head_dim": 8},
    "Bamba": TINY | MAMBA2 | {"attn_layer_indices": [1]},
    "Lfm2": TINY | {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    "Bloom": ENDS | {"hidden_size": 32, "n_layer": 2, "n_head": 4},
}
SLOW: dict[str, dict[str, Any]] = {
    "Qwen3_5Moe": TINY | DELTA | EXPERTS | {"head_dim": 8},
    "GraniteMoeHybrid": TINY | MAMBA2 | LAYERS | {"num_local_experts": 4},
    "FalconH1": TINY | MAMBA2 | {"mamba_d_ssm": 64},
    "NemotronH": TINY
    | {
        "layers_block_type": ["mamba", "attention"],
        "head_dim": 8,
        "ssm_state_size": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 1,
        "chunk_size": 16,
    },
    "Jamba": TINY
    | {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8},
    "Zamba2": TINY
    | {
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "hybrid", "mamba"],
        "num_key_value_heads": 4,
        "mamba_d_state": 8,
        "n_mamba_heads": 4,
        "chunk_size": 16,
        "adapter_rank": 4,
    },
    "MiniMax": TINY | LAYERS | {"head_dim": 8, "num_local_experts": 2, "block_size": 16},
    "OlmoHybrid": TINY | DELTA,
    "Mamba": MAMBA,
    "FalconMamba": MAMBA,
    "Mamba2": MAMBA | {"num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 16},
    "Rwkv": {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2},
    "CodeGen": GPT,
    "GPTJ": GPT,
    "Falcon": ENDS | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    "Mpt": ENDS | {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 128},
    "StableLm": TINY,
    "Gemma2": TINY | {"head_dim": 8, "final_logit_softcapping": None},
    "GptOss": TINY | {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
}
FAMILIES = [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


@pytest.fixture(autouse=True)
def _attention() -> Iterator[None]:
    """Known to transformers, which has much to say about kernels it misses."""
    register()
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    yield
    transformers_logging.set_verbosity(before)


def make(family: str, **changes: Any) -> PreTrainedModel:
    """A tiny model with random weights, large enough that context matters."""
    settings = (FAST | SLOW)[family] | changes
    text = f"{family}TextConfig"
    config = getattr(transformers, text if hasattr(transformers, text) else f"{family}Config")
    torch.manual_seed(0)
    model: PreTrainedModel = getattr(transformers, f"{family}ForCausalLM")(config(**settings))
    return model.eval()


def make_batch(pack: Any, random_documents: Any) -> Any:
    """Six documents; two of one length share a prompt."""
    documents = random_documents(LENGTHS)
    documents[4][:3] = documents[3][:3]
    return pack(documents, prompt=2, temperatures=[1.0, 0.7, 1.0, 0.9, 1.0, 1.3])


def checked(
    model: PreTrainedModel, config: TrainerConfig = CONFIG, kernel: Kernel = AUTO
) -> Policy:
    policy = Policy(model, config, kernel=kernel)
    find_packing(policy, policy.packings(CPU), CPU)
    return policy


def alone(model: Any, row: PackedRow) -> Tensor:
    """[N] log π of the row's targets, each document by itself through the plain model."""
    if model._can_set_attn_implementation():
        model.set_attn_implementation("eager")
    columns = []
    for tokens in row.token_ids.split(list(row.lengths)):
        logits = model(input_ids=tokens[None], use_cache=False).logits[0]
        columns += [torch.zeros(1, len(logits[0])), logits[:-1]]
    logits = torch.cat(columns)[row.targets]
    if row.temperatures is not None:
        logits = logits / row.temperatures[:, None]
    chosen: Tensor = logits.log_softmax(-1).gather(1, row.token_ids[row.targets, None])
    return chosen[:, 0]


def gradients(model: PreTrainedModel, logprobs: Tensor) -> dict[str, Tensor]:
    """Of a sum in which every target has another weight."""
    model.zero_grad()
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    return {
        name: torch.zeros_like(each) if each.grad is None else each.grad.clone()
        for name, each in model.named_parameters()
        if each.requires_grad
    }


def assert_as_alone(policy: Policy, batch: Any) -> None:
    model = policy.model
    row = make_row(batch, CPU, policy.packing)
    found = policy(row)[0][row.targets]
    found_gradients = gradients(model, found)
    expected = alone(model, row)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    expected_gradients = gradients(model, expected)
    largest = max(float(each.abs().max()) for each in expected_gradients.values())
    assert largest > 0.1
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(
            found_gradients[name], gradient, atol=1e-5 * largest, rtol=1e-3, msg=name
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_of_a_row_have_the_logprobs_and_gradients_that_they_have_alone(
    family: str, pack: Any, random_documents: Any
) -> None:
    assert_as_alone(checked(make(family)), make_batch(pack, random_documents))


@pytest.mark.parametrize("family", FAST)
def test_a_family_that_leaks_is_refused_if_its_rows_may_only_be_packed(family: str) -> None:
    packed = [each for each in AUTO.packings(CPU) if each.name != "apart"]
    with pytest.raises(ConfigError, match=rf"{family}ForCausalLM.*off by .*at most \d"):
        find_packing(Policy(make(family), CONFIG, kernel=AUTO), packed, CPU)


def test_a_model_whose_attention_keeps_documents_apart_shares_prompts(
    make_qwen3: Callable[..., PreTrainedModel],
) -> None:
    assert checked(make_qwen3()).packing.name == "shared"
    kernel = Auto(KernelConfig(share_prompts=False))
    assert checked(make_qwen3(), kernel=kernel).packing.name == "packed"


def test_core_alone_computes_documents_apart(
    make_qwen3: Callable[..., PreTrainedModel], pack: Any, random_documents: Any
) -> None:
    policy = checked(make_qwen3(), kernel=Kernel(PluginConfig()))
    assert policy.packing == Packing("apart", "eager")
    assert_as_alone(policy, make_batch(pack, random_documents))


def test_a_model_that_packs_but_cannot_share_prompts_packs_and_says_so(
    make_qwen3: Callable[..., PreTrainedModel],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    pack: Any,
    random_documents: Any,
) -> None:
    """Attention of the model's own, as GPT-Neo's: transformers separates documents by position ids,
    in which continuations look like documents."""
    model = make_qwen3()
    monkeypatch.setattr(type(model), "_can_set_attn_implementation", lambda *_: False)
    policy = checked(model)
    assert policy.packing.name == "packed"
    assert "Qwen3ForCausalLM" in caplog.text and "shared (prime_rl_varlen): off by" in caplog.text
    assert_as_alone(policy, make_batch(pack, random_documents))


def test_kernels_that_take_the_boundaries_keep_rows_packed(
    monkeypatch: pytest.MonkeyPatch, pack: Any, random_documents: Any
) -> None:
    """As causal-conv1d and fla do on a GPU: these forget at every boundary they are given."""
    convolve = modeling_qwen3_next.causal_conv1d_fn
    recur = modeling_qwen3_next.torch_chunk_gated_delta_rule
    given: list[list[int]] = []

    def convolve_each(states: Tensor, *args: Any, seq_idx: Any = None, **kwargs: Any) -> Tensor:
        if seq_idx is None:
            return convolve(states, *args, **kwargs)
        assert seq_idx.dtype == torch.int32
        lengths = seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
        given.append(lengths)
        return torch.cat([convolve(x, *args, **kwargs) for x in states.split(lengths, 2)], 2)

    def recur_each(
        *columns: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Any, **kwargs: Any
    ) -> Any:
        kwargs.pop("seq_idx", None)  # for the convolution; without a kernel, it is an error
        if cu_seqlens is None:
            return recur(*columns, g=g, beta=beta, **kwargs)
        assert cu_seqlens.dtype == torch.int64
        lengths = cu_seqlens.diff().tolist()
        parts = zip(*(x.split(lengths, 1) for x in (*columns, g, beta)), strict=True)
        found = [recur(*each, g=g, beta=beta, **kwargs)[0] for *each, g, beta in parts]
        return torch.cat(found, 1), None

    monkeypatch.setattr(modeling_qwen3_next, "causal_conv1d_fn", convolve_each)
    monkeypatch.setattr(modeling_qwen3_next, "torch_chunk_gated_delta_rule", recur_each)
    policy = checked(make("Qwen3Next"))
    assert policy.packing.name == "packed" and given[-1] == [9, 8, 7]
    assert_as_alone(policy, make_batch(pack, random_documents))
    assert given[-1] != [9, 8, 7]


@pytest.mark.parametrize("fused", [True, False])
def test_recomputed_blocks_and_either_head_go_the_same_way(
    fused: bool, pack: Any, random_documents: Any
) -> None:
    config = TrainerConfig(device="cpu", activation_checkpointing=1)
    kernel = Auto(KernelConfig(fused_lm_head=fused))
    kernel.block_logits = 61 * 4
    model = make("Qwen3_5")
    prepare_blocks(model, config.activation_checkpointing, False, CPU)
    policy = checked(model, config, kernel)
    assert policy.packing.name == "apart"
    assert_as_alone(policy, make_batch(pack, random_documents))


def test_adapters_of_a_recurrent_model_get_the_gradient_of_documents_alone(
    tmp_path: Path, pack: Any, random_documents: Any
) -> None:
    model = make("Qwen3_5")
    model.save_pretrained(tmp_path)
    Lora(LoraConfig(rank=4)).prepare(model, tmp_path, None)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    assert_as_alone(checked(model), make_batch(pack, random_documents))


class Plain(Loss):
    """-log π"""

    name = "plain"

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        return LossOutputs(-inputs.trainer_logprobs[inputs.loss_mask].sum(), {})


@pytest.mark.parametrize("colocated", [False, True])
def test_the_trainer_takes_a_step_on_a_model_loaded_from_files(
    colocated: bool, tmp_path: Path, pack: Any, random_documents: Any
) -> None:
    """Bloom has an attention of its own, which sees the whole row."""
    make("Bloom").save_pretrained(tmp_path)
    trainer = Trainer(
        load_model(tmp_path, CONFIG, on_host=colocated),
        installed_losses().with_rl(Plain(PluginConfig())),
        *(CONFIG, 1),
        colocated=colocated,
        kernel=AUTO,
    )
    batch = make_batch(pack, random_documents)
    row = make_row(batch, CPU)
    with torch.no_grad():
        expected = -float(alone(make("Bloom"), row).sum() / len(row.targets))
    metrics = trainer.train_step(1, [batch])
    assert trainer.policy.packing == Packing("apart", "prime_rl_sdpa")
    assert metrics["loss/mean"] == pytest.approx(expected, rel=1e-5)


def test_a_model_that_mixes_documents_even_alone_in_their_batch_is_refused() -> None:
    """Its layers see the whole batch: nothing the trainer does keeps documents apart."""
    model = make("Lfm2")
    model.model.layers[0].register_forward_hook(
        lambda module, args, output: output + 0.1 * output.mean((0, 1), keepdim=True)
    )
    with pytest.raises(ConfigError, match=r"Lfm2ForCausalLM \(lfm2\).*apart \(eager\): off by"):
        checked(model)


@pytest.mark.parametrize("family", ["Gemma2", "GptOss"])
def test_a_model_with_more_than_torch_s_attention_computes_takes_the_eager_one(family: str) -> None:
    """With random weights the cap on Gemma 2's scores changes too little to be measured."""
    assert checked(make(family)).packing == Packing("apart", "eager")


def test_documents_at_least_seven_eighths_as_long_as_the_first_share_a_batch() -> None:
    assert batch_sizes([16, 14, 14, 13, 12, 9, 8, 7, 6]) == [3, 2, 2, 1, 1]
    assert batch_sizes([5]) == [1]
