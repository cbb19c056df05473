"""``trainer.compile = "auto"``: where it compiles, and that a compiler which changes or refuses the
blocks is not used. The compilers here are ours: a real one is in ``test_blocks.py``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import eval_frame

from prime_rl import ConfigError, Loss, LossInputs, LossOutputs, PluginConfig
from prime_rl.config.trainer import TrainerConfig
from prime_rl.registry.components import installed_losses
from prime_rl.trainer import model as models
from prime_rl.trainer.loop import Trainer
from prime_rl.trainer.model import Policy, _compile_if_worth_it
from prime_rl.trainer.self_check import find_compiled_fault
from prime_rl_kernels import blocks, gpu_check
from prime_rl_kernels.attention import register
from prime_rl_kernels.kernels import Auto, KernelConfig

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
Forward = Callable[..., Any]


@pytest.fixture(autouse=True)
def no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch may be a build for CUDA on a machine without a GPU, whose kernels cannot be tried."""
    monkeypatch.setattr(gpu_check, "is_usable", lambda device: False)


class Plain(Loss):
    name = "plain"

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        return LossOutputs(inputs.trainer_logprobs.sum(), {})


class Doubled(torch.autograd.Function):
    """Its numbers are right, its gradient is twice as large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * grad


def refuse(_: Tensor) -> Tensor:
    raise NotImplementedError("no such operation. And more")


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "right": lambda x: x,
    "off": lambda x: x + 0.3 * torch.linspace(-1, 1, x.shape[-1]),
    "nan": lambda x: x * float("nan"),
    "gradient": Doubled.apply,
    "refused": refuse,
}


def compiler(change: Callable[[Tensor], Tensor], forward: Forward, **_: Any) -> Forward:
    """As ``torch.compile``: ``forward`` itself where a stance asks for it."""

    def compiled(*columns: Any, **named: Any) -> Any:
        output = forward(*columns, **named)
        plain = eval_frame._stance.stance == "force_eager"
        return output if plain else change(output)

    return compiled


@pytest.fixture
def restore_attention() -> Iterator[None]:
    yield
    register()


@pytest.fixture
def policy(
    make_model: Any, restore_attention: None, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Policy]:
    monkeypatch.setattr(models, "WORTH_COMPILING", 0)
    monkeypatch.setattr(blocks, "check_compiler", lambda device: None)

    def make(change: str) -> Policy:
        monkeypatch.setattr(blocks.torch, "compile", partial(compiler, CHANGES[change]))
        config = TrainerConfig(device="cpu")
        made = Policy(make_model("varlen").float(), config, kernel=Auto(KernelConfig()))
        _compile_if_worth_it(made, config, CUDA)
        assert made.compiled
        return made

    return make


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ("right", ""),
        ("off", "log π is off by"),
        ("nan", "log π is off by nan"),
        ("gradient", "the gradient norm is"),
        ("refused", "NotImplementedError: no such operation"),
    ],
)
def test_a_compiler_that_changes_a_row_is_found(
    change: str, fault: str, policy: Callable[[str], Policy]
) -> None:
    made = policy(change)
    found = find_compiled_fault(made, CPU)
    assert found.startswith(fault) and bool(found) == bool(fault), found
    assert all(each.grad is None for each in made.parameters())


@pytest.mark.parametrize("change", ["right", "off"])
def test_blocks_stay_as_they_are_if_the_compiler_changes_them(
    change: str,
    policy: Callable[[str], Policy],
    make_model: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    losses = installed_losses().with_rl(Plain(PluginConfig()))
    config = TrainerConfig(device="cpu")
    trainer = Trainer(make_model("varlen").float(), losses, config, 3, kernel=Auto(KernelConfig()))
    assert not trainer.policy.compiled  # a CPU
    policy(change)  # sets the compiler
    trainer.policy.prepare_blocks(config, CUDA, compiled=True)
    trainer._check_compiled()
    assert trainer.policy.compiled == (change == "right")
    assert ("not compiled, which is slower: log π" in caplog.text) == (change == "off")
    assert find_compiled_fault(trainer.policy, CPU) == ""


@pytest.mark.parametrize(
    ("device", "least", "compiled"), [(CPU, 0, False), (CUDA, 10**9, False), (CUDA, 0, True)]
)
def test_auto_compiles_large_models_on_a_gpu(
    device: torch.device,
    least: int,
    compiled: bool,
    make_model: Any,
    restore_attention: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(models, "WORTH_COMPILING", least)
    monkeypatch.setattr(blocks, "check_compiler", lambda device: None)
    config = TrainerConfig(device="cpu")
    made = Policy(make_model("varlen"), config, kernel=Auto(KernelConfig()))
    _compile_if_worth_it(made, config, device)
    assert made.compiled is compiled


def test_auto_does_without_a_compiler_that_is_not_there(
    make_model: Any,
    restore_attention: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def missing(device: torch.device) -> None:
        raise ConfigError("trainer.compile needs triton")

    monkeypatch.setattr(models, "WORTH_COMPILING", 0)
    monkeypatch.setattr(blocks, "check_compiler", missing)
    config = TrainerConfig(device="cpu")
    made = Policy(make_model("varlen"), config, kernel=Auto(KernelConfig()))
    _compile_if_worth_it(made, config, CUDA)
    assert not made.compiled
    assert "blocks are not compiled. trainer.compile needs triton" in caplog.text
