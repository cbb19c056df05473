"""Tiny random models of the families that people train, from transformers' own classes.

Sizes are small enough for seconds, and windows, chunks and states short enough that a document of
thirty tokens meets all of them. Weights are large, so that every token before matters.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
"""Under the names that most families have for them; ``Settings`` of a family go on top."""

EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
DEEPSEEK = {**EXPERTS, **LATENT, "n_routed_experts": 4, "n_shared_experts": 1}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}
DELTA_NET = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
WINDOW = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
OLD_NAMES = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
ROTARY = {"rotary_dim": 4}


@dataclass(frozen=True)
class Family:
    """A family and how to make a tiny model of it."""

    name: str
    architecture: str
    """The class, as checkpoints name it."""
    settings: dict[str, Any] = field(default_factory=dict)
    config: str = ""
    """The config's class, where it is not named as the architecture."""
    without: str = ""
    """A size that the config derives from the others."""

    def write(self, folder: Path) -> None:
        """A random model of the family as a folder."""
        stem = self.architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
        sizes = {key: value for key, value in SIZES.items() if key != self.without}
        config_class = getattr(transformers, self.config or f"{stem}Config")
        torch.manual_seed(0)
        model = getattr(transformers, self.architecture)(config_class(**sizes | self.settings))
        model.save_pretrained(folder)


FAMILIES = (
    Family("Llama", "LlamaForCausalLM"),
    Family(
        "Llama 4",
        "Llama4ForCausalLM",
        EXPERTS | {"intermediate_size_mlp": 64, "attention_chunk_size": 8, "floor_scale": 8},
        config="Llama4TextConfig",
    ),
    Family("Qwen2", "Qwen2ForCausalLM"),
    Family("Qwen3", "Qwen3ForCausalLM"),
    Family("Qwen3-MoE", "Qwen3MoeForCausalLM", EXPERTS),
    Family(
        "Qwen3-Next",
        "Qwen3NextForCausalLM",
        EXPERTS | DELTA_NET | {"shared_expert_intermediate_size": 16},
    ),
    Family("Qwen3.5", "Qwen3_5ForCausalLM", DELTA_NET, config="Qwen3_5TextConfig"),
    Family("Mistral", "MistralForCausalLM", {"sliding_window": 8}),
    Family("Mixtral", "MixtralForCausalLM", EXPERTS),
    Family("Gemma", "GemmaForCausalLM"),
    Family("Gemma 2", "Gemma2ForCausalLM", WINDOW | {"attn_logit_softcapping": 2.0}),
    Family("Gemma 3", "Gemma3ForCausalLM", WINDOW, config="Gemma3TextConfig"),
    Family(
        "Gemma 4",
        "Gemma4ForCausalLM",
        WINDOW
        | {
            "global_head_dim": 16,
            "vocab_size_per_layer_input": 61,
            "hidden_size_per_layer_input": 8,
            "final_logit_softcapping": 30.0,
        },
        config="Gemma4TextConfig",
    ),
    Family("Phi-3", "Phi3ForCausalLM"),
    Family("GPT-OSS", "GptOssForCausalLM", EXPERTS | WINDOW),
    Family(
        "DeepSeek V2",
        "DeepseekV2ForCausalLM",
        DEEPSEEK | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    ),
    Family(
        "DeepSeek V3",
        "DeepseekV3ForCausalLM",
        DEEPSEEK | {"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
    ),
    Family(
        "GLM-4.5",
        "Glm4MoeForCausalLM",
        EXPERTS
        | {
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
            "use_qk_norm": True,
        },
    ),
    Family("OLMo 2", "Olmo2ForCausalLM"),
    Family("OLMo 3", "Olmo3ForCausalLM", WINDOW),
    Family(
        "Granite",
        "GraniteForCausalLM",
        {"logits_scaling": 0.5, "attention_multiplier": 0.25, "residual_multiplier": 0.5},
    ),
    Family("GPT-2", "GPT2LMHeadModel", OLD_NAMES),
    Family("GPT-NeoX", "GPTNeoXForCausalLM"),
    Family("GPT-J", "GPTJForCausalLM", OLD_NAMES | ROTARY),
    Family(
        "GPT-Neo",
        "GPTNeoForCausalLM",
        {
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 8,
        },
    ),
    Family("Falcon", "FalconForCausalLM", without="head_dim"),
    Family("StableLM", "StableLmForCausalLM"),
    Family("Nemotron", "NemotronForCausalLM"),
    Family("MPT", "MptForCausalLM", {"d_model": 32, "n_heads": 4, "n_layers": 2}),
    Family("Bloom", "BloomForCausalLM", {"n_head": 4, "n_layer": 2}),
    Family("CodeGen", "CodeGenForCausalLM", OLD_NAMES | ROTARY),
    Family(
        "LFM2",
        "Lfm2ForCausalLM",
        {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    ),
    Family(
        "Falcon-H1",
        "FalconH1ForCausalLM",
        MAMBA | {"mamba_d_ssm": 64, "lm_head_multiplier": 0.5},
    ),
    Family(
        "Nemotron-H",
        "NemotronHForCausalLM",
        {
            "layers_block_type": ["mamba", "attention"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 1,
            "chunk_size": 8,
        },
    ),
    Family(
        "Granite-hybrid",
        "GraniteMoeHybridForCausalLM",
        MAMBA | EXPERTS | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 16},
    ),
    Family(
        "Jamba",
        "JambaForCausalLM",
        EXPERTS
        | {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
    ),
    Family("Bamba", "BambaForCausalLM", MAMBA | {"attn_layer_indices": [1]}),
    Family(
        "Zamba2",
        "Zamba2ForCausalLM",
        {
            "layers_block_type": ["mamba", "hybrid"],
            "n_mamba_heads": 8,
            "mamba_headdim": 8,
            "mamba_d_state": 8,
            "mamba_ngroups": 1,
            "chunk_size": 8,
            "num_mem_blocks": 1,
            "attention_head_dim": 16,
        },
    ),
    Family(
        "RecurrentGemma",
        "RecurrentGemmaForCausalLM",
        {"attention_window_size": 8, "block_types": ["recurrent", "attention"], "lru_width": 32},
    ),
    Family(
        "MiniMax",
        "MiniMaxForCausalLM",
        EXPERTS | {"layer_types": ["linear_attention", "full_attention"], "block_size": 8},
    ),
    Family("Mamba", "MambaForCausalLM", {"state_size": 8}),
    Family(
        "Mamba 2",
        "Mamba2ForCausalLM",
        {"num_heads": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    ),
    Family("RWKV", "RwkvForCausalLM", {"attention_hidden_size": 32, "context_length": 256}),
    Family("xLSTM", "xLSTMForCausalLM", {"num_heads": 4, "num_blocks": 2}),
    Family("MiniCPM3", "MiniCPM3ForCausalLM", LATENT),
    Family("SmolLM3", "SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}),
    Family("Cohere", "CohereForCausalLM"),
    Family("Cohere 2", "Cohere2ForCausalLM", WINDOW),
)
