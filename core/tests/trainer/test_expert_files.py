"""A mixture of experts is published under the names of its folder, one tensor per expert."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from prime_rl import Header, WeightSender
from prime_rl.rundir.status import Status
from prime_rl.trainer.publish import Broadcaster
from prime_rl.trainer.published import Publisher

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "num_experts_per_tok": 2,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
FAMILIES: list[tuple[type[PreTrainedModel], PretrainedConfig, str]] = [
    (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**SIZES, moe_intermediate_size=16, num_experts=4, head_dim=8),
        "model.layers.1.mlp.experts.3.gate_proj.weight",
    ),
    (
        MixtralForCausalLM,
        MixtralConfig(**SIZES, num_local_experts=4),
        "model.layers.1.block_sparse_moe.experts.3.w1.weight",
    ),
    (
        DeepseekV3ForCausalLM,
        DeepseekV3Config(**SIZES, **LATENT, moe_intermediate_size=16, n_routed_experts=4),
        "model.layers.1.mlp.experts.3.gate_proj.weight",
    ),
    (  # its files have the experts of a layer in one tensor too
        GptOssForCausalLM,
        GptOssConfig(**SIZES, num_local_experts=4, head_dim=8, rope_parameters=None),
        "model.layers.1.mlp.experts.gate_up_proj",
    ),
]


class Kept(WeightSender):
    """Keeps what it is given to send."""

    device = torch.device("cpu")

    def wait(self, directory: Path, files_wanted: Callable[[], bool]) -> object:
        return {}

    def send(self, order: object, header: Header, tensors: Iterator[Tensor]) -> None:
        self.header, self.tensors = list(header), [each.clone() for each in tensors]


@pytest.mark.parametrize(
    ("cls", "config", "name"), FAMILIES, ids=[str(f[1].model_type) for f in FAMILIES]
)
def test_a_version_has_the_tensors_of_the_models_folder(
    tmp_path: Path, cls: Callable[..., PreTrainedModel], config: PretrainedConfig, name: str
) -> None:
    cls(config).save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-1, 1)
    model.save_pretrained(tmp_path / "expected")  # transformers' own conversion
    expected = load_file(tmp_path / "expected/model.safetensors")
    assert name in expected

    publisher, sender = Publisher(tmp_path, keep=1), Kept()
    publisher.write(model, 1)
    written = load_file(publisher.path(1) / "model.safetensors")
    assert written.keys() == expected.keys()
    assert all(written[each].equal(tensor) for each, tensor in expected.items())

    broadcaster = Broadcaster(model, publisher, sender, Status(None))
    broadcaster.prepare(2, exact=False, last=False)
    broadcaster.pass_on()
    assert {info.name for info in sender.header} == expected.keys()
    for info, tensor in zip(sender.header, sender.tensors, strict=True):
        assert info.shape == list(tensor.shape) and tensor.equal(expected[info.name])
