"""Shared prompts are computed once, and nothing else changes: values, gradients, every document."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.trainer.logprobs import token_logprobs
from prime_rl.trainer.packed_row import PackedRow, make_row
from prime_rl.wire import MicroBatch
from prime_rl_kernels.attention import NAMES
from prime_rl_kernels.packing import SharedPrompts, WholeRow
from prime_rl_kernels.products import padded_rows

CPU = torch.device("cpu")
SHARED = SharedPrompts()


def micro_batch(documents: list[tuple[list[int], list[bool]]]) -> MicroBatch:
    """Documents as (tokens, mask)."""
    tokens = np.concatenate([np.array(t, np.int32) for t, _ in documents])
    mask = np.concatenate([np.array(m, np.bool_) for _, m in documents])
    return MicroBatch(
        token_ids=tokens,
        loss_mask=mask,
        inference_logprobs=np.zeros(len(tokens), np.float32),
        sequence_lengths=np.array([len(t) for t, _ in documents], np.int32),
        temperatures=np.ones(len(documents), np.float32),
        env_ids=np.zeros(len(documents), np.uint16),
        envs=("a",),
        advantages=np.ones(len(tokens), np.float32),
    )


def group(prompt: list[int], *completions: list[int]) -> list[tuple[list[int], list[bool]]]:
    return [(prompt + c, [False] * len(prompt) + [True] * len(c)) for c in completions]


def test_a_groups_prompt_is_computed_once_and_last_tokens_never() -> None:
    row = make_row(micro_batch(group([1, 2, 3], [7, 8], [9], [10, 11, 12])), CPU, SHARED)
    # the prompt, then what continues it, longest first: 10 11, 7; of [9] nothing is needed
    assert row.layout.token_ids.tolist() == [1, 2, 3, 10, 11, 7]
    assert row.layout.position_ids.tolist() == [0, 1, 2, 3, 4, 3]
    shapes = [(c.num, c.num_queries, c.num_keys) for c in row.layout.documents.continuations]
    assert row.layout.documents.lengths == (3,)
    assert shapes == [(1, 2, 5), (1, 1, 4)]
    assert [c.key_index.tolist() for c in row.layout.documents.continuations] == [
        [0, 1, 2, 3, 4],
        [0, 1, 2, 5],
    ]
    # row order is longest first: 10 11 12 | 7 8 | 9; each target reads the token before it
    assert row.token_ids[row.targets].tolist() == [10, 11, 12, 7, 8, 9]
    assert row.layout.sources.tolist() == [2, 3, 4, 2, 5, 2]


def test_what_trains_nothing_is_not_computed() -> None:
    documents = [*group([1, 2], [3, 4]), ([5, 6, 7], [False] * 3)]
    row = make_row(micro_batch(documents), CPU, SHARED)
    assert row.layout.token_ids.tolist() == [1, 2, 3]


def test_prompts_that_differ_are_not_shared() -> None:
    row = make_row(micro_batch([*group([1, 2], [3]), *group([1, 4], [3])]), CPU, SHARED)
    assert row.layout.documents.continuations == ()
    assert sorted(row.layout.documents.lengths) == [2, 2]


def test_padding_is_neither_read_nor_counted() -> None:
    batch = micro_batch(group(list(range(1, 31)), [7, 8, 9, 10], [9, 3, 2], [10, 11, 12]))
    layout = make_row(batch, CPU, SHARED).layout
    needed = 30 + 3 + 2 + 2
    assert len(layout.token_ids) == padded_rows(needed) == needed + 1
    assert sum(num * queries for num, queries, _ in layout.runs) == needed
    assert 30 not in layout.sources.tolist()  # it lies behind the prompt


Documents = list[tuple[list[int], list[bool]]]


@st.composite
def documents(draw: st.DrawFn) -> Documents:
    """Some groups: any completions, several turns, some that train nothing."""
    found: Documents = []
    token = st.integers(0, 60)
    for _ in range(draw(st.integers(1, 3))):
        prompt = draw(st.lists(token, min_size=1, max_size=5))
        for _ in range(draw(st.integers(1, 4))):
            rest = draw(st.lists(st.tuples(token, st.booleans()), min_size=1, max_size=6))
            found.append(
                (prompt + [t for t, _ in rest], [False] * len(prompt) + [m for _, m in rest])
            )
    return found


@pytest.fixture(scope="module")
def models() -> Any:
    """The tiny Qwen3 in double precision, without and with a sliding window of 3."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from prime_rl_kernels.attention import register

    register()

    def build(**changes: Any) -> Any:
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8, initializer_range=0.3,
            max_position_embeddings=64, tie_word_embeddings=True, **changes,
        )  # fmt: skip
        model = Qwen3ForCausalLM(config).eval().double()
        model.set_attn_implementation(NAMES["varlen"])
        return model

    return [build(), build(use_sliding_window=True, sliding_window=3, max_window_layers=0)]


def outcome(model: Any, row: PackedRow, packing: WholeRow) -> tuple[torch.Tensor, torch.Tensor]:
    """log π by the row's order, and the gradient of a loss with another weight for every target."""
    logprobs, _ = token_logprobs(model, row, packing)
    scale = torch.linspace(0.5, 2.0, len(logprobs), dtype=logprobs.dtype)
    torch.autograd.backward((logprobs * scale).sum())
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return logprobs.detach(), gradient


@given(documents(), st.sampled_from([0, 1]))
@settings(max_examples=40)
def test_sharing_changes_neither_values_nor_gradients(
    models: Any, found: Documents, which: int
) -> None:
    batch, model = micro_batch(found), models[which]
    plain = outcome(model, make_row(batch, CPU, WholeRow()), WholeRow())
    shared = outcome(model, make_row(batch, CPU, SHARED), SHARED)
    for a, b in zip(plain, shared, strict=True):
        # The model's norms compute in single precision for any weights.
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@given(documents(), st.sampled_from([0, 1]))
@settings(max_examples=40)
def test_the_state_at_the_end_of_a_sequence_is_the_one_that_it_has_alone(
    models: Any, found: Documents, which: int
) -> None:
    """Of every sequence with a target, beside whatever else its row holds, and whichever of its
    tokens train."""
    batch, model = micro_batch(found), models[which]
    alone = {}
    with torch.no_grad():
        for tokens, _ in found:
            row = make_row(micro_batch([(tokens, [True] * len(tokens))]), CPU, WholeRow())
            alone[tuple(tokens)] = WholeRow().hidden_states(model, row.layout)[-1]
        for packing in (WholeRow(), SHARED):
            row = make_row(batch, CPU, packing, with_ends=True)
            if not len(row.targets):
                continue
            assert row.ending is not None and row.layout.ends is not None
            trained = [any(mask[1:]) for _, mask in found]
            order = row.of_sequences["order"]
            assert row.ending.tolist() == [at for at, s in enumerate(order) if trained[s]]
            states = packing.hidden_states(model, row.layout)[row.layout.ends]
            expected = [alone[tuple(found[s][0])] for s in order[row.ending]]
            torch.testing.assert_close(states, torch.stack(expected), rtol=1e-4, atol=1e-5)


def test_the_last_token_is_computed_only_where_a_head_reads_its_state() -> None:
    row = make_row(
        micro_batch(group([1, 2, 3], [7, 8], [9], [10, 11, 12])), CPU, SHARED, with_ends=True
    )
    assert row.layout.token_ids.tolist() == [1, 2, 3, 10, 11, 12, 7, 8, 9]
    assert row.layout.ends is not None
    assert row.layout.token_ids[row.layout.ends].tolist() == [12, 8, 9]
