"""Blocks that are recomputed or compiled give the same numbers."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from prime_rl import ConfigError
from prime_rl.config.trainer import TrainerConfig
from prime_rl.trainer.model import Policy
from prime_rl.trainer.packed_row import PackedRow, make_row
from prime_rl_kernels import blocks as module
from prime_rl_kernels import offload
from prime_rl_kernels.attention import Documents, register
from prime_rl_kernels.blocks import check_compiler, prepare_blocks
from prime_rl_kernels.kernels import Auto, KernelConfig

CPU = torch.device("cpu")
MakeModel = Callable[..., PreTrainedModel]
AUTO = Auto(KernelConfig())


@pytest.fixture
def rows(pack: Any, random_documents: Any) -> list[PackedRow]:
    """Of unlike documents, and one with a shared prompt."""
    first, second = random_documents([9, 9, 5]), random_documents([12, 7, 3, 3])
    shared = [[1, 2, 3, 4], [1, 2, 3, 5, 6]]
    batches = [pack(first), pack(second), pack(shared, prompt=3)]
    return [make_row(batch, CPU, AUTO.packings(CPU)[0]) for batch in batches]


@pytest.fixture
def restore_attention() -> Any:
    yield
    register()


def gradients(model: PreTrainedModel, rows: list[PackedRow], **settings: Any) -> list[Tensor]:
    """Summed over the rows."""
    config = TrainerConfig(device="cpu", **settings)
    policy = Policy(model, config, kernel=AUTO)
    prepare_blocks(
        model,
        config.activation_checkpointing,
        config.compile is True,
        CPU,
        keeps_attention=config.keep_attention,
        offloads=config.offload_activations,
    )
    for row in rows:
        torch.autograd.backward(policy(row)[0].square().sum())
    return [each.grad for each in model.parameters() if each.grad is not None]


@pytest.mark.parametrize("every", [1, 2, 3])
def test_recomputed_gradients_are_the_same_bit_for_bit(
    make_model: MakeModel, rows: list[PackedRow], every: int
) -> None:
    expected = gradients(make_model("varlen", num_hidden_layers=3), rows)
    found = gradients(
        make_model("varlen", num_hidden_layers=3), rows, activation_checkpointing=every
    )
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    "settings",
    [
        {"keep_attention": True},
        {"offload_activations": True},
        {"keep_attention": True, "offload_activations": True},
    ],
)
def test_kept_attention_and_inputs_on_the_host_change_no_gradient(
    make_model: MakeModel, rows: list[PackedRow], settings: dict[str, bool]
) -> None:
    expected = gradients(make_model("varlen", num_hidden_layers=3), rows)
    found = gradients(
        make_model("varlen", num_hidden_layers=3), rows, activation_checkpointing=1, **settings
    )
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


class Counts(TorchDispatchMode):
    """How often each operation runs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_kept_attention_is_computed_once(make_model: MakeModel, rows: list[PackedRow]) -> None:
    def calls(**settings: Any) -> int:
        model = make_model("sdpa", num_hidden_layers=2)
        config = TrainerConfig(device="cpu", activation_checkpointing=1, **settings)
        prepare_blocks(model, 1, False, CPU, keeps_attention=config.keep_attention)
        with Counts() as counts:
            model(torch.arange(8)[None], use_cache=False).logits.sum().backward()
        return counts.calls["_scaled_dot_product_flash_attention_for_cpu"]

    assert calls() == 4  # two layers, each once more in the backward pass
    assert calls(keep_attention=True) == 2


def test_inputs_on_the_host_are_copied_there_once_and_fetched_ahead(
    make_model: MakeModel, rows: list[PackedRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    host, device = offload.to_host, offload.to_device

    def to_host(tensor: Tensor) -> Tensor:
        events.append("out")
        return host(tensor)

    def to_device(values: Tensor, where: torch.device) -> Tensor:
        events.append("back")
        return device(values, where)

    monkeypatch.setattr(offload, "to_host", to_host)
    monkeypatch.setattr(offload, "to_device", to_device)
    model = make_model("varlen", num_hidden_layers=3)
    begin = offload.Recomputed.compute
    passes: dict[int, int] = {}

    def compute(self: Any, *columns: Any, **named: Any) -> Any:
        passes[id(self)] = passes.get(id(self), 0) + 1
        events.append(f"pass {passes[id(self)]}")
        return begin(self, *columns, **named)

    monkeypatch.setattr(offload.Recomputed, "compute", compute)
    gradients(model, rows[:1], activation_checkpointing=1, offload_activations=True)
    # The last block fetches its own input and that of the block before it.
    back = ["back", "back", "pass 2", "back", "pass 2", "pass 2"]
    assert events == ["out", "pass 1"] * 3 + back
    events.clear()
    with torch.no_grad():
        model(torch.arange(8)[None], documents=Documents((8,), CPU))
    assert not events


def test_a_row_s_inputs_are_gone_after_its_backward_pass(
    make_model: MakeModel, rows: list[PackedRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[Any] = []
    make = offload.HostCopy.of

    def of(*columns: Any, **named: Any) -> Any:
        copy = make(*columns, **named)
        copies.append(weakref.ref(copy))
        return copy

    monkeypatch.setattr(offload.HostCopy, "of", of)
    model = make_model("varlen", num_hidden_layers=3)
    gradients(model, rows[:1], activation_checkpointing=1, offload_activations=True)
    gc.collect()
    assert [copy() for copy in copies] == [None] * 3


@pytest.mark.parametrize("key", ["keep_attention", "offload_activations"])
def test_keys_of_recomputed_blocks_need_some(key: str) -> None:
    with pytest.raises(ValidationError, match=f"trainer.{key} is true, and .* there are none"):
        TrainerConfig.model_validate({key: True})


def test_under_autocast_too(make_model: MakeModel, rows: list[PackedRow]) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        expected = gradients(make_model("varlen").float(), rows)
        found = gradients(make_model("varlen").float(), rows, activation_checkpointing=1)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_recomputed_blocks_keep_their_input_alone(
    make_model: MakeModel, rows: list[PackedRow]
) -> None:
    def saved(every: int) -> int:
        """Bytes that a forward pass keeps, weights included."""
        sizes: list[int] = []

        def pack(tensor: Tensor) -> Tensor:
            sizes.append(tensor.nbytes)
            return tensor

        model = make_model("varlen", num_hidden_layers=4)
        config = TrainerConfig(device="cpu", activation_checkpointing=every)
        prepare_blocks(model, config.activation_checkpointing, config.compile is True, CPU)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            Policy(model, config, kernel=AUTO)(rows[0])
        return sum(sizes)

    kept, half, none = saved(0), saved(2), saved(1)
    assert none < 0.4 * kept
    assert half == pytest.approx((kept + none) / 2, rel=0.01)


def test_names_of_weights_stay(make_model: MakeModel) -> None:
    model = make_model("varlen")
    names = list(model.state_dict())
    prepare_blocks(model, 1, False, CPU)
    assert list(model.state_dict()) == names


def test_preparing_twice_does_it_once(make_model: MakeModel, rows: list[PackedRow]) -> None:
    model, calls = make_model("varlen", num_hidden_layers=1), []
    block = model.model.layers[0]
    block.register_forward_pre_hook(lambda *_: calls.append("outer"))
    block.get_submodule("mlp").register_forward_pre_hook(lambda *_: calls.append("inner"))
    for _ in range(2):
        prepare_blocks(model, 1, False, CPU)
    gradients(model, rows[:1], activation_checkpointing=1)
    assert calls == ["outer", "inner", "inner"]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the compiler's own
@pytest.mark.usefixtures("restore_attention")
@pytest.mark.parametrize("more", [{}, {"keep_attention": True, "offload_activations": True}])
def test_compiled_blocks_give_the_same_gradients(
    make_model: MakeModel,
    rows: list[PackedRow],
    monkeypatch: pytest.MonkeyPatch,
    more: dict[str, bool],
) -> None:
    """Recomputed, too. For rows of other documents nothing is compiled again."""
    expected = gradients(make_model("varlen", num_hidden_layers=1).float(), rows)
    counting = CompileCounterWithBackend("inductor")
    monkeypatch.setattr(module.torch, "compile", partial(torch.compile, backend=counting))
    torch._dynamo.reset()
    model = make_model("varlen", num_hidden_layers=1).float()
    settings = {"compile": True, "activation_checkpointing": 1, **more}
    gradients(model, rows[:1], **settings)
    num_graphs = counting.frame_count
    found = gradients(model, rows[1:], **settings)
    assert counting.frame_count == num_graphs > 0
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_no_compiler_is_said_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"trainer\.compile needs a C\+\+ compiler on the path"):
        check_compiler(CPU)


def test_no_triton_is_said_before_training(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    monkeypatch.setattr(module.shutil, "which", lambda name: "/usr/bin/c++")
    with pytest.raises(ConfigError, match=r"trainer\.compile needs triton"):
        check_compiler(torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"trainer\.compile needs triton"):  # not there yet
        prepare_blocks(make_model("varlen"), 0, True, torch.device("cuda"))
    check_compiler(CPU)


def test_a_model_without_blocks_is_refused(make_model: MakeModel) -> None:
    model = make_model("varlen")
    model._no_split_modules = None
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM does not say which modules"):
        prepare_blocks(model, 1, False, CPU)
