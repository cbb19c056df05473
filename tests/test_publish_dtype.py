"""What an engine that serves in bfloat16 gets from weights published in bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from prime_rl.trainer.published import Publisher
from prime_rl_embedded.weights import apply_weights, read_weights


def make_model(seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_engine_in_bfloat16_has_the_same_weights_from_half_the_bytes(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    """One in float32 has not: that is why the key is not the default."""
    trained, served = make_model(seed=0), []
    for precision in ("float32", "bfloat16"):
        publisher = Publisher(tmp_path / precision, 2, precision)
        publisher.write(trained, 1)
        engine = make_model(seed=1).to(dtype)
        apply_weights(read_weights(publisher.path(1), engine), engine)
        served.append(engine.state_dict())
    same = [served[0][name].equal(tensor) for name, tensor in served[1].items()]
    assert all(same) == (dtype == torch.bfloat16)
    assert served[0]["lm_head.weight"].equal(trained.lm_head.weight.to(dtype))
