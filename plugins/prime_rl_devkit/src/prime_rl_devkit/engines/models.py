"""A tiny model that any engine can load: Qwen3 of two layers, tied embeddings, a byte-level
tokenizer with a chat template.

The head size, 32, is the smallest that all kernels support. The weights are large enough for
distributions that are far from uniform.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prime_rl.rundir.launch import READY

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB_SIZE = len(SPECIAL_TOKENS) + 256
MAX_MODEL_LEN = 512


def write_tiny_model(folder: Path, seed: int = 0, **config: Any) -> Path:
    """Write a random model and its tokenizer to ``folder``."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**_sizes() | config))
    for name, tensor in model.named_parameters():
        if "norm" in name:  # with ones everywhere, a norm that is not loaded would go unnoticed
            tensor.data.add_(0.2 * torch.randn_like(tensor))

    torch.set_rng_state(state)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    (folder / READY).touch()
    return folder


def _sizes() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": MAX_MODEL_LEN,
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "pad_token_id": SPECIAL_TOKENS.index("<|endoftext|>"),
        "eos_token_id": SPECIAL_TOKENS.index("<|im_end|>"),
        "dtype": "float32",
    }


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer of ``VOCAB_SIZE`` tokens: any text round-trips."""
    from transformers import PreTrainedTokenizerFast

    path = folder / "tokenizer.json"
    path.write_text(json.dumps(_byte_level()), "utf-8")
    fast = PreTrainedTokenizerFast(
        tokenizer_file=str(path), eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def _byte_level() -> dict[str, Any]:
    """``tokenizer.json``: one token per byte, no merges."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    vocab = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *_alphabet()])}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": token, "special": True, **flags}
            for i, token in enumerate(SPECIAL_TOKENS)
        ],
        "pre_tokenizer": level | {"use_regex": False},
        "decoder": level | {"use_regex": False},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }


def _alphabet() -> list[str]:
    """The printable character of each byte, as in GPT-2's byte-level tokenizer (Radford et al.
    2019): the byte's own if it prints, else the next from 256 on."""
    printing = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printing else next(others)) for byte in range(256)]
