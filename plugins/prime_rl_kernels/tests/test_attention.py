"""Documents that share a call, the dense mask, and the calls of a GPU's flash kernel.

A stand-in with the documented meaning of the kernel takes its place on CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.attention.varlen
from torch import Tensor
from transformers import Llama4ForCausalLM, Llama4TextConfig, PreTrainedModel
from written_elements import WrittenElements

from prime_rl import ConfigError
from prime_rl.config.trainer import TrainerConfig
from prime_rl.registry.components import installed_losses
from prime_rl.trainer.logprobs import token_logprobs
from prime_rl.trainer.loop import Trainer
from prime_rl.trainer.packed_row import PackedRow, make_row
from prime_rl_kernels import attention
from prime_rl_kernels.attention import NAMES, Continuation, Documents, Inputs, register
from prime_rl_kernels.kernels import Auto, KernelConfig, Varlen
from prime_rl_kernels.packing import WholeRow

CPU = torch.device("cpu")
PACKED = WholeRow()
MakeModel = Callable[..., PreTrainedModel]


def test_neighbors_of_equal_length_share_a_call() -> None:
    documents = Documents((5, 5, 3, 2, 2, 2), CPU)
    assert documents.runs == [(2, 5), (1, 3), (3, 2)]
    assert documents.offsets.tolist() == [0, 5, 10, 13, 15, 17, 19]


def test_rows_are_sorted_by_length_with_every_column(pack: Any) -> None:
    micro_batch = pack(
        [[11, 12], [21, 22, 23], [31, 32]],
        temperatures=[1.0, 0.5, 2.0],
        envs=("a", "b"),
        env_ids=[0, 1, 0],
        advantages=np.arange(7),
    )
    row = make_row(micro_batch, CPU, PACKED)
    assert row.lengths == (3, 2, 2)
    assert row.token_ids.tolist() == [21, 22, 23, 11, 12, 31, 32]
    assert row.layout.position_ids.tolist() == [0, 1, 2, 0, 1, 0, 1]
    assert row.sequence_ids.tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert row.streams["advantages"].tolist() == [2, 3, 4, 0, 1, 5, 6]
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


def test_a_window_includes_the_token_itself() -> None:
    mask = Documents((4,), CPU).block_mask(window=2).int().tolist()
    assert mask == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]


def test_attention_that_the_kernels_lack_is_refused(
    make_model: Callable[..., PreTrainedModel], pack: Any
) -> None:
    row = make_row(pack([[1, 2, 3]]), CPU, PACKED)
    with pytest.raises(ConfigError, match="'softcap'"):
        make_model("varlen").base_model(
            input_ids=row.token_ids[None],
            position_ids=row.layout.position_ids[None],
            documents=row.layout.documents,
            softcap=30.0,
        )


def test_attention_within_chunks_is_refused_for_any_length_of_the_row() -> None:
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


def backward_elements(documents: Documents, num_tokens: int, window: int | None) -> int:
    """What the backward pass of the loop over runs writes."""
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, num_tokens, 8, requires_grad=True) for heads in (4, 2, 2)
    )
    output = attention._varlen(Inputs(query, key, value, None, window, documents))
    with WrittenElements() as written:
        output.sum().backward()
    return written.number


@pytest.mark.parametrize("window", [None, 3])
def test_the_backward_pass_of_documents_is_linear_in_their_number(window: int | None) -> None:
    """Neighbors of unequal length are runs of their own."""

    def elements(num_pairs: int) -> int:
        return backward_elements(Documents((7, 5) * num_pairs, CPU), 12 * num_pairs, window)

    assert elements(64) < 16 * 1.1 * elements(4)


@pytest.mark.parametrize("window", [None, 3])
def test_the_backward_pass_of_continuations_is_linear_in_their_number(window: int | None) -> None:
    """A prompt of 6 tokens, and continuations of 4 and 2 tokens in turn."""

    def elements(num_pairs: int) -> int:
        runs = []
        start = 6
        for length in (4, 2) * num_pairs:
            keys = torch.cat([torch.arange(6), torch.arange(start, start + length)])
            runs.append(Continuation(1, length, 6 + length, keys))
            start += length
        return backward_elements(Documents((6,), CPU, tuple(runs)), start, window)

    assert elements(64) < 16 * 1.1 * elements(4)


@pytest.fixture
def row(pack: Any, random_documents: Any) -> PackedRow:
    return make_row(pack(random_documents([9, 5, 12, 1])), CPU, PACKED)


@pytest.fixture
def dtypes(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The dtypes of the stand-in's arguments."""
    seen: list[torch.dtype] = []

    def stand_in(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float | None,
        window_size: tuple[int, int],
        enable_gqa: bool,
    ) -> Tensor:
        """[T, H, D]: query i of a document sees its keys i - left to i + right; -1: all."""
        seen.extend(each.dtype for each in (query, key, value))
        assert query.shape[-1] == key.shape[-1] == value.shape[-1]  # as the real one checks
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
        lengths = (cu_seq_q[1:] - cu_seq_q[:-1]).tolist()
        assert torch.equal(cu_seq_q, cu_seq_k) and max_q == max_k == max(lengths)
        assert enable_gqa == (query.shape[1] != key.shape[1])
        outputs = []
        for start, length in zip(cu_seq_q.tolist(), lengths, strict=False):
            parts = [each[start : start + length].transpose(0, 1) for each in (query, key, value)]
            left, right = (length if reach < 0 else reach for reach in window_size)
            distance = torch.arange(length)[:, None] - torch.arange(length)
            output = torch.nn.functional.scaled_dot_product_attention(
                *parts,
                attn_mask=(distance <= left) & (distance >= -right),
                scale=scale,
                enable_gqa=enable_gqa,
            )
            outputs.append(output.transpose(0, 1))
        return torch.cat(outputs)

    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", stand_in)
    return seen


@pytest.mark.parametrize(
    "changes",
    [{}, {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}],
    ids=["all before", "window"],
)
def test_the_kernel_computes_what_the_loop_does(
    make_model: MakeModel,
    row: PackedRow,
    dtypes: list[torch.dtype],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
) -> None:
    model = make_model("varlen", **changes)
    expected = token_logprobs(model, row, PACKED)
    assert not dtypes
    monkeypatch.setattr(attention, "_why_no_kernel", lambda query: "")
    found = token_logprobs(model, row, PACKED)
    assert len(dtypes) == 3 * 2  # one call a layer
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("window", [None, 3])
def test_values_that_are_smaller_than_keys_are_those_of_the_mask(
    dtypes: list[torch.dtype], window: int | None
) -> None:
    """Latent attention: keys of 16, values of 8. Output and gradients are those of the dense mask,
    whose product takes any sizes."""
    torch.manual_seed(0)
    documents = Documents((5, 3), CPU)
    columns = [torch.randn(1, 4, 8, size, requires_grad=True) for size in (16, 16, 8)]
    inputs = Inputs(*columns, 0.25, window, documents)
    weights = torch.randn(1, 8, 4, 8)
    expected = attention._mask(inputs)
    wanted = torch.autograd.grad((expected * weights).sum(), columns)
    found = attention._varlen_kernel(inputs, window)
    assert found.shape == (1, 8, 4, 8) and len(dtypes) == 3
    torch.testing.assert_close(found, expected)
    gradients = torch.autograd.grad((found * weights).sum(), columns)
    for gradient, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, other)


def test_values_that_are_larger_than_keys_go_without_the_kernel(
    dtypes: list[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_why_no_kernel", lambda query: "")
    columns = [torch.randn(1, 4, 8, size) for size in (8, 8, 16)]
    inputs = Inputs(*columns, 0.25, None, Documents((5, 3), CPU))
    torch.testing.assert_close(attention._by_document(inputs), attention._mask(inputs))
    assert not dtypes


def test_under_autocast_the_kernel_gets_one_half_dtype(
    make_model: MakeModel,
    row: PackedRow,
    dtypes: list[torch.dtype],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Qwen3's norms leave queries and keys in float32, which the kernel would refuse."""
    asked: list[torch.dtype] = []
    monkeypatch.setattr(
        attention, "_why_no_kernel", lambda query: "" if not asked.append(query.dtype) else "?"
    )
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        token_logprobs(make_model("varlen").float(), row, PACKED)
    assert {*dtypes, *asked} == {torch.bfloat16}


def query_on(device: str, dtype: torch.dtype = torch.bfloat16, size: int = 8) -> Any:
    """What the choice reads of a query."""
    return SimpleNamespace(
        is_cuda=device == "cuda",
        device=torch.device(device),
        dtype=dtype,
        shape=torch.Size((1, 4, 3, size)),
    )


@pytest.fixture
def ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))


def test_this_torch_has_the_kernel_that_is_called(ampere: None) -> None:
    """Its signature is what the choice reads."""
    assert attention._why_no_kernel(query_on("cuda")) == ""


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        (query_on("cpu"), "needs a GPU, and the tensors are on cpu"),
        (query_on("cuda", torch.float32), "needs half precision, and the heads are in torch.float"),
        (query_on("cuda", size=12), "takes heads of 8, 16, ... or 256, and these are of 12"),
        (query_on("cuda", size=264), "these are of 264"),
    ],
)
def test_a_query_that_the_kernel_does_not_take_has_a_reason(
    ampere: None, query: Any, reason: str
) -> None:
    assert reason in attention._why_no_kernel(query)


def test_an_older_gpu_has_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "Ampere generation" in attention._why_no_kernel(query_on("cuda"))


PARAMETERS = {"query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k", "return_aux"}
"""Of torch 2.10's function. Torch 2.11 adds ``scale`` and ``window_size``, torch 2.12
``enable_gqa``."""


@pytest.mark.parametrize("parameters", [PARAMETERS, set(), PARAMETERS | {"enable_gqa"}])
def test_a_torch_without_scale_and_windows_has_no_kernel(
    ampere: None, monkeypatch: pytest.MonkeyPatch, parameters: set[str]
) -> None:
    monkeypatch.setattr(attention, "_varlen_parameters", lambda: frozenset(parameters))
    assert "install torch 2.11" in attention._why_no_kernel(query_on("cuda"))


def test_a_kernel_without_a_switch_for_grouped_heads_gets_them_as_they_are(
    ampere: None, make_model: MakeModel, row: PackedRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch 2.11 has it: the real function's signature, without ``enable_gqa``."""
    heads: list[tuple[int, int]] = []
    model = make_model("varlen")
    expected = token_logprobs(model, row, PACKED)

    def varlen_attn(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        return_aux: Any = None,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:
        heads.append((query.shape[1], key.shape[1]))
        documents = Documents(tuple(cu_seq_q.diff().tolist()), CPU)
        columns = (each.transpose(0, 1)[None] for each in (query, key, value))
        return attention._mask(Inputs(*columns, scale, None, documents))[0]

    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", varlen_attn)
    attention._varlen_parameters.cache_clear()
    assert attention._why_no_kernel(query_on("cuda")) == ""
    monkeypatch.setattr(attention, "_why_no_kernel", lambda query: "")
    found = token_logprobs(model, row, PACKED)
    attention._varlen_parameters.cache_clear()
    assert heads == [(4, 2)] * 2  # one call a layer
    torch.testing.assert_close(found, expected)


def test_the_attention_that_computes_rows_is_logged_once(
    make_model: MakeModel, row: PackedRow, caplog: pytest.LogCaptureFixture
) -> None:
    attention._log_choice.cache_clear()
    with caplog.at_level("INFO", logger="prime_rl.trainer"):
        for _ in range(2):
            token_logprobs(make_model("varlen"), row, PACKED)
    assert caplog.text.count("a call for each run of documents of equal length") == 1
    assert "the tensors are on cpu" in caplog.text


def test_a_gpu_without_the_kernel_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    attention._log_choice.cache_clear()
    with caplog.at_level("INFO", logger="prime_rl.trainer"):
        attention._log_choice("of a reason", True)
        attention._log_choice("", True)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "because of a reason" in caplog.messages[0]
    assert "torch's varlen kernel" in caplog.messages[1]


@pytest.mark.parametrize(("major", "installed"), [(9, True), (9, False), (8, True), (10, True)])
def test_a_hopper_takes_flash_attention_3_where_it_is_installed(
    major: int,
    installed: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "prime_rl.trainer.attention")
    device = torch.device("cuda")
    active: list[str | None] = [None]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    monkeypatch.setattr(attention, "find_spec", lambda name: object() if installed else None)
    theirs = attention.torch_attention
    monkeypatch.setattr(theirs, "current_flash_attention_impl", lambda: active[-1], raising=False)
    monkeypatch.setattr(theirs, "activate_flash_attention_impl", active.append)
    monkeypatch.setattr(theirs, "restore_flash_attention_impl", lambda: active.append(None))

    found = attention.has_flash_attention_3(device)
    assert found == (major == 9 and installed)
    tried = [packing.attention for packing in Auto(KernelConfig()).packings(device)]
    assert tried == [*[NAMES["flash3"]] * found, NAMES["varlen"], NAMES["sdpa"]]
    assert not attention.has_flash_attention_3(torch.device("cpu"))

    # Where its numbers are off the next packing takes torch's own kernel again.
    for name in ("FA3", "FA3", None, None):
        attention.use_flash(name)
    assert active == [None, "FA3", None]
    assert caplog.text.count("FA3") == 1


def test_the_layers_of_a_model_in_bfloat16_share_what_is_known_of_a_row(
    make_model: Any, pack: Any, random_documents: Any
) -> None:
    """Such as the offsets of its documents, which are on the device once and not once per layer."""
    config = TrainerConfig(device="cpu", dtype="bfloat16")
    trainer = Trainer(
        make_model("varlen", num_hidden_layers=3).float(),
        installed_losses(),
        config,
        max_steps=1,
        kernel=Varlen(KernelConfig()),
    )
    seen: list[Documents] = []
    for layer in trainer.model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, named: seen.append(named["documents"]), with_kwargs=True
        )

    trainer.forward(pack(random_documents([9, 5])))
    assert len(seen) == 3
    assert all(each is seen[0] for each in seen)
