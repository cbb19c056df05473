"""A reply of a model folder, for a look at what a run has learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from prime_rl import ConfigError


def reply(
    folder: Path,
    messages: Sequence[Mapping[str, Any]],
    *,
    max_tokens: int,
    temperature: float,
    seed: int,
) -> str:
    """The reply to a conversation. Raises ``ConfigError`` if it does not fit into the context."""
    import torch

    if temperature < 0 or max_tokens < 1:
        raise ConfigError(
            f"generate: temperature {temperature} and max_tokens {max_tokens}; expected at least 0 "
            "and 1"
        )
    model, tokenizer = _loaded(str(folder), (folder / "config.json").stat().st_mtime_ns)
    rendered = tokenizer.apply_chat_template(
        [*messages], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    length = rendered["input_ids"].shape[1]
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is not None and length >= longest:
        raise ConfigError(
            f"generate: the prompt has {length} tokens, the model's context {longest}"
        )

    sampling: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        sampling |= {"temperature": temperature, "top_p": 1.0, "top_k": 0}
    with torch.random.fork_rng(), torch.inference_mode():
        torch.manual_seed(seed % 2**63)  # torch takes 64 bits
        tokens = model.generate(
            **rendered.to(model.device),
            max_new_tokens=max_tokens,
            pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id,
            **sampling,
        )
    text: str = tokenizer.decode(tokens[0, length:], skip_special_tokens=True)
    return text.strip()


@lru_cache(maxsize=1)
def _loaded(folder: str, version: int) -> tuple[Any, Any]:
    """Model and tokenizer. ``version``: that of the folder's files."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder).to(device).eval()
    return model, AutoTokenizer.from_pretrained(folder)
