"""Which documents share an attention call, and what the dense mask lets through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Llama4ForCausalLM, Llama4TextConfig, PreTrainedModel

from prime_rl import ConfigError
from prime_rl.trainer.attention import NAMES, Documents, register
from prime_rl.trainer.packed_row import make_row

CPU = torch.device("cpu")


def test_neighbours_of_equal_length_share_a_call() -> None:
    documents = Documents((5, 5, 3, 2, 2, 2), CPU)
    assert documents.runs == [(2, 5), (1, 3), (3, 2)]
    assert documents.offsets.tolist() == [0, 5, 10, 13, 15, 17, 19]


def test_rows_are_laid_out_by_length_with_every_column_along(pack: Any) -> None:
    micro_batch = pack(
        [[11, 12], [21, 22, 23], [31, 32]],
        temperatures=[1.0, 0.5, 2.0],
        envs=("a", "b"),
        env_ids=[0, 1, 0],
        advantages=np.arange(7),
    )
    row = make_row(micro_batch, CPU, share=False)
    assert row.lengths == (3, 2, 2)
    assert row.token_ids.tolist() == [21, 22, 23, 11, 12, 31, 32]
    assert row.layout.position_ids.tolist() == [0, 1, 2, 0, 1, 0, 1]
    assert row.sequence_ids.tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert row.advantages is not None
    assert row.advantages.tolist() == [2, 3, 4, 0, 1, 5, 6]
    assert row.env_ids.tolist() == [1, 1, 1, 0, 0, 0, 0]
    assert row.targets.tolist() == [1, 2, 4, 6]
    assert row.temperatures is not None
    assert row.temperatures.tolist() == [0.5, 0.5, 1.0, 2.0]


def test_the_block_mask_is_causal_within_each_document() -> None:
    mask = Documents((2, 3), CPU).block_mask().int().tolist()
    assert mask == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 1, 1, 1],
    ]


def test_a_window_reaches_that_many_tokens_back_itself_included() -> None:
    mask = Documents((4,), CPU).block_mask(window=2).int().tolist()
    assert mask == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]


def test_attention_that_the_kernels_lack_is_refused(
    make_model: Callable[..., PreTrainedModel], pack: Any
) -> None:
    row = make_row(pack([[1, 2, 3]]), CPU, share=False)
    with pytest.raises(ConfigError, match="'softcap'"):
        make_model().base_model(
            input_ids=row.token_ids[None],
            position_ids=row.layout.position_ids[None],
            documents=row.layout.documents,
            softcap=30.0,
        )


def test_attention_within_chunks_is_refused_whatever_the_length_of_the_row() -> None:
    """Chunks of 8,192 tokens, as Llama 4 has them, do not show in a row of three."""
    register()
    model = Llama4ForCausalLM(
        Llama4TextConfig(
            vocab_size=61,
            hidden_size=32,
            intermediate_size=64,
            intermediate_size_mlp=64,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            num_local_experts=2,
            attention_chunk_size=8192,
        )
    )
    model.set_attn_implementation(NAMES["varlen"])
    with pytest.raises(ConfigError, match="Llama4TextAttention attends within chunks"):
        model.model(input_ids=torch.tensor([[1, 2, 3]]), documents=Documents((3,), CPU))
