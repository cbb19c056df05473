"""Which architectures are served, with which forward, and which are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from prime_rl import EngineError, WeightsError
from prime_rl_embedded import Embedded, EmbeddedConfig, model
from prime_rl_embedded.attention import BatchPlan
from prime_rl_embedded.fused import FusedForward
from prime_rl_embedded.model import load_model, weights_dtype
from prime_rl_embedded.requests import Request, SamplingParams
from prime_rl_embedded.scheduler import Scheduler
from prime_rl_embedded.testing import VOCAB_SIZE, write_model

SLIDING = {
    "use_sliding_window": True,
    "sliding_window": 6,
    "max_window_layers": 1,
    "layer_types": ["sliding_attention", "full_attention"],
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
GEMMA4 = {
    "config": "Gemma4TextConfig",
    "global_head_dim": 16,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"],
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 8,
}
ARCHITECTURES: list[tuple[str, dict[str, Any], bool]] = [
    ("Qwen3", {"tie_word_embeddings": True}, True),
    ("Qwen3", {"attention_bias": True}, False),  # o_proj with bias isn't fused
    ("Qwen3", SLIDING, True),
    ("Llama", {}, True),
    ("Llama", {"num_key_value_heads": 4}, True),
    ("Qwen2", {}, True),
    ("Mistral", {"sliding_window": None}, True),
    ("Mistral", {"sliding_window": 6}, False),
    ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}, False),
    ("Gemma", {}, False),
    ("Gemma4", GEMMA4, False),  # layers differ in head size
    ("DeepseekV3", LATENT, False),  # keys and values differ in head size
    ("StableLm", {}, False),  # passes no keyword arguments on
]


@pytest.mark.parametrize(("architecture", "config", "fusable"), ARCHITECTURES)
@pytest.mark.parametrize("fused", [True, False])
def test_greedy_answers_equal_transformers(
    tmp_path: Path, architecture: str, config: dict[str, Any], fusable: bool, fused: bool
) -> None:
    """Prompts of 3, 9 and 30 tokens, 20 sampled: windows of 6 slide in prefill and decode."""
    folder = write_model(tmp_path, architecture, **config)
    served = load_model(folder, max_len=64, fused=fused)
    assert isinstance(served.forward, FusedForward) == (fused and fusable)
    scheduler = Scheduler(served, num_slots=2, max_model_len=64)
    prompts = [list(range(n, n + length)) for n, length in ((1, 3), (50, 9), (100, 30))]
    requests = [Request(p, SamplingParams(max_tokens=20, temperature=0)) for p in prompts]
    run(scheduler, requests)
    reference = AutoModelForCausalLM.from_pretrained(folder).eval()
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.token_ids == greedy(reference, prompt, 20)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("fused", [True, False])
def test_half_precision_follows_the_float32_model(tmp_path: Path, dtype: str, fused: bool) -> None:
    """Logprobs of 20 sampled tokens against a float32 forward, to the precision of 8 or 11 bits."""
    folder = write_model(tmp_path)
    served = load_model(folder, max_len=64, dtype=dtype, fused=fused)
    request = Request(list(range(10)), SamplingParams(max_tokens=20, seed=1))
    run(Scheduler(served, num_slots=1, max_model_len=64), [request])
    ids = torch.tensor([request.prompt + request.token_ids])
    reference = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logprobs = reference(input_ids=ids, use_cache=False).logits[0, 9:-1].log_softmax(-1)
    expected = logprobs.gather(-1, ids[0, 10:, None])[:, 0].tolist()
    assert request.logprobs == pytest.approx(expected, abs=0.5 if dtype == "bfloat16" else 0.05)


def test_a_model_is_served_in_its_own_dtype_on_a_gpu_and_in_float32_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda:1")
    assert weights_dtype("auto", cpu) == torch.float32 and weights_dtype("auto", gpu) == "auto"
    assert weights_dtype("float16", cpu) == weights_dtype("float16", gpu) == torch.float16
    folder = write_model(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    loaded.save_pretrained(folder)
    assert load_model(folder, max_len=64, dtype="auto").module.dtype == torch.float32
    monkeypatch.setattr(model, "weights_dtype", lambda dtype, device: weights_dtype(dtype, gpu))
    assert load_model(folder, max_len=64, dtype="auto").module.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("gpus", "settings", "expected"),
    [
        ("", {}, "float32"),
        ("0,1", {}, None),
        ("0", {"device": "cpu"}, "float32"),
        ("", {"device": "cuda:1"}, None),
        ("0", {"dtype": "float32"}, "float32"),
        ("", {"dtype": "bfloat16"}, "bfloat16"),
    ],
)
def test_the_run_knows_the_dtype_before_the_engine_starts(
    monkeypatch: pytest.MonkeyPatch, gpus: str, settings: dict[str, Any], expected: str | None
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    assert Embedded(EmbeddedConfig(**settings)).dtype == expected


@torch.no_grad()
def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens without a cache: a forward over the whole sequence for every token."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(
            int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
        )
    return ids[len(prompt) :]


@torch.inference_mode()
def run(scheduler: Scheduler, requests: list[Request]) -> None:
    for request in requests:
        scheduler.add(request)
    while scheduler.has_work:
        scheduler.step()


LLAMA4 = {"config": "Llama4TextConfig", "num_local_experts": 2, "intermediate_size_mlp": 64}
MAMBA = {"num_heads": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8, "expand": 2}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    # Soft caps and sinks: samples would follow another distribution.
    ("Gemma2", {}, "Gemma2Attention asks for softcap"),
    ("GptOss", {"num_local_experts": 4}, "GptOssAttention asks for s_aux"),
    ("Llama4", LLAMA4, "it attends within chunks"),  # of 8,192 tokens: the probe has 24
    ("Mamba2", MAMBA, "Mamba2Mixer has a state or an attention of its own"),
    ("Lfm2", {"layer_types": ["conv", "full_attention"]}, "Lfm2ShortConv has a state or"),
    ("RecurrentGemma", {"block_types": ["recurrent", "attention"]}, "part of its layers has a"),
    ("GPTNeo", {"attention_types": [[["global"], 2]], "num_layers": 2, "num_heads": 4}, "every"),
]


@pytest.mark.parametrize(("architecture", "config", "reason"), REFUSED)
def test_architectures_that_slot_attention_cannot_serve_are_refused_by_name(
    tmp_path: Path, architecture: str, config: dict[str, Any], reason: str
) -> None:
    folder = write_model(tmp_path, architecture, **config)
    with pytest.raises(
        EngineError, match=rf"can't serve {architecture}ForCausalLM: .*{reason}.*Use another engine"
    ):
        load_model(folder, max_len=64)


def test_a_rotary_embedding_that_depends_on_the_longest_sequence_is_refused(
    tmp_path: Path,
) -> None:
    """Long RoPE changes beyond 32 tokens; the probe has 24."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    }
    folder = write_model(
        tmp_path, "Phi3", original_max_position_embeddings=32, rope_parameters=rope
    )
    load_model(folder, max_len=32)
    with pytest.raises(EngineError, match="beyond 32 tokens, and max_model_len is 33"):
        load_model(folder, max_len=33)


def test_a_checkpoint_with_tensors_missing_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    write_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=r"missing from the checkpoint: model\.norm\.weight"):
        load_model(tmp_path, max_len=64)


def test_a_truncated_checkpoint_is_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(WeightsError, match="can't be loaded"):
        load_model(tmp_path, max_len=64)


@torch.inference_mode()
def test_the_fused_forward_reads_parameters_that_change_in_place(tmp_path: Path) -> None:
    served = load_model(write_model(tmp_path), max_len=64)
    assert isinstance(served.forward, FusedForward)
    other = AutoModelForCausalLM.from_pretrained(write_model(tmp_path / "other", seed=1))
    for name, parameter in served.module.named_parameters():
        parameter.copy_(other.get_parameter(name))
    served.forward.weights_changed()
    ids = torch.arange(10)
    plan = BatchPlan.build(served.make_cache(1, 64), [], [10], served.device)
    assert torch.allclose(served.forward(ids, plan, None), other(ids[None]).logits[0], atol=1e-4)


def test_a_context_longer_than_the_models_positions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"max_model_len is 513.* positions for 512"):
        load_model(write_model(tmp_path), max_len=513)


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_a_missing_device_is_refused(tmp_path: Path, device: str) -> None:
    with pytest.raises(EngineError, match=f"inference.embedded.device is '{device}'"):
        load_model(tmp_path, max_len=64, device=device)


def test_end_of_sequence_tokens_come_from_the_generation_config(tmp_path: Path) -> None:
    served = load_model(write_model(tmp_path, eos_token_id=[7, 9]), max_len=64)
    assert served.eos_token_ids == {7, 9}
