"""The user's own function as the rl loss: the documented example, and all errors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prime_rl import ConfigError, LossInputs, LossOutputs, PluginError
from prime_rl.registry.components import installed_losses
from prime_rl.registry.offers import LOSS, settings_of
from prime_rl.trainer.loss import count_members, row_loss
from prime_rl.trainer.metrics import StepMetrics
from prime_rl.trainer.packed_row import make_row
from prime_rl.wire import MicroBatch
from prime_rl_losses.custom import CustomLoss

EXAMPLE = """
import torch
from prime_rl import LossInputs, LossOutputs

def ppo_clip_loss(inputs: LossInputs, clip_eps: float = 0.2) -> LossOutputs:
    ratio = torch.exp(inputs.trainer_logprobs - inputs.inference_logprobs)
    clipped = torch.clamp(ratio, 1 - clip_eps, 1 + clip_eps)
    surr1 = ratio * inputs.advantages
    surr2 = clipped * inputs.advantages
    loss = -torch.min(surr1, surr2)[inputs.loss_mask].sum()
    return LossOutputs(
        loss=loss,
        metrics={
            "clip_frac": (ratio != clipped)[inputs.loss_mask].float().mean(),
        },
    )
"""
WRONG = """
from prime_rl import LossOutputs

number = 3

class Group:
    @staticmethod
    def nested(inputs): ...

def no_parameter(): ...
def by_name_only(*, inputs): ...
def needs(inputs, clip_eps, tau): ...
def takes(inputs, *, clip_eps=0.2, tau=1.0): ...
def takes_any(inputs, **settings): ...
async def later(inputs): ...
"""
TRAINER = np.log([0.9, 0.1, 0.5, 0.5, 0.3, 0.05])
INFERENCE = np.log([0.6, 0.4, 0.5, 0.2, 0.55, 0.06])
ADVANTAGES = [1, -1, 0.5, -0.5, 0, 2]
MASK = [True, True, True, True, True, False]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Write ``my_module.py`` to the working directory, which is not on ``sys.path``."""
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)

    def write(source: str) -> None:
        (tmp_path / "my_module.py").write_text(source)

    yield write
    sys.modules.pop("my_module", None)
    assert sys.path == before


def custom(path: str = "my_module.ppo_clip_loss", **kwargs: Any) -> CustomLoss:
    """The loss as the trainer creates it from the TOML's table."""
    table = {"import_path": path, "kwargs": kwargs}
    return CustomLoss(settings_of(CustomLoss, LOSS, table, "trainer.loss"))


def make_inputs(**changes: Any) -> LossInputs:
    columns = {
        "trainer_logprobs": torch.tensor(TRAINER, requires_grad=True),
        "inference_logprobs": torch.tensor(INFERENCE),
        "ref_logprobs": None,
        "advantages": torch.tensor(ADVANTAGES, dtype=torch.float64),
        "loss_mask": torch.tensor(MASK),
        "loss_weights": None,
    }
    return LossInputs(**(columns | changes))


@pytest.mark.parametrize("path", ["my_module.ppo_clip_loss", "my_module:ppo_clip_loss"])
def test_the_documented_example_gives_hand_computed_numbers(path: str, module: Any) -> None:
    module(EXAMPLE)
    inputs = make_inputs()
    outputs = custom(path, clip_eps=0.2)(inputs)
    # ratios 1.5, .25, 1, 2.5, .5455: min(r A, clip(r) A) = 1.2, -.8, .5, -1.25, 0
    assert float(outputs.loss.detach()) == pytest.approx(-(1.2 - 0.8 + 0.5 - 1.25))
    (gradient,) = torch.autograd.grad(outputs.loss, inputs.trainer_logprobs)
    assert gradient.tolist() == pytest.approx([0, 0, -0.5, 1.25, 0, 0])
    metric = outputs.metrics["clip_frac"]
    assert isinstance(metric, torch.Tensor)
    assert float(metric) == pytest.approx(0.8)
    wider = custom(path, clip_eps=0.6)(inputs)  # clips 0.25 to 0.4 and 2.5 to 1.6
    assert float(wider.loss.detach()) == pytest.approx(-(1.5 - 0.4 + 0.5 - 1.25))


def prompted(column: np.ndarray) -> np.ndarray:
    """The columns of two sequences of 4 and 2 tokens, each after a token of a prompt: nothing
    predicts a first token."""
    return np.insert(column, [0, 4], column.dtype.type(0))


def test_the_example_trains_a_packed_row_sequence_by_sequence(module: Any) -> None:
    module(EXAMPLE)
    micro_batch = MicroBatch(
        token_ids=np.arange(8, dtype=np.int32),
        loss_mask=prompted(np.array(MASK)),
        inference_logprobs=prompted(INFERENCE.astype("f4")),
        sequence_lengths=np.array([5, 3], np.int32),
        temperatures=np.ones(2, np.float32),
        env_ids=np.array([0, 1], np.uint16),
        envs=("a", "b"),
        advantages=prompted(np.array(ADVANTAGES, np.float32)),
    )
    losses = installed_losses().with_rl(custom())
    counts = count_members([micro_batch], losses)
    row = make_row(micro_batch, torch.device("cpu"))
    trainer = torch.tensor(prompted(np.array(TRAINER)), requires_grad=True)
    result = row_loss(row, trainer, losses, counts)
    assert float(result.loss.detach()) == pytest.approx(0.35 / 5)
    step = StepMetrics(counts)
    for block in result.metrics:
        step.add(block)
    found = step.result()
    assert found["clip_frac"] == pytest.approx((3 / 4 + 1) / 2)  # two sequences
    assert found["clip_frac/a/mean"] == pytest.approx(3 / 4)
    assert found["clip_frac/b/mean"] == 1


def test_values_off_the_mask_give_no_nan_even_in_a_plain_function(module: Any) -> None:
    module(EXAMPLE)
    junk = INFERENCE.copy()
    junk[5] = -2000  # a ratio that overflows
    inputs = make_inputs(
        inference_logprobs=torch.tensor(junk),
        advantages=torch.tensor([*ADVANTAGES[:5], np.nan], dtype=torch.float64),
    )
    outputs = custom()(inputs)
    assert float(outputs.loss.detach()) == pytest.approx(0.35)
    (gradient,) = torch.autograd.grad(outputs.loss, inputs.trainer_logprobs)
    assert gradient.tolist() == pytest.approx([0, 0, -0.5, 1.25, 0, 0])


@pytest.mark.parametrize(
    ("path", "kwargs", "message"),
    [
        ("ppo_clip_loss", {}, "got 'ppo_clip_loss', expected 'module.function', 'module:func"),
        ("my_module.", {}, "got 'my_module.', expected 'module.function'"),
        ("other_module.f", {}, r"there is no module 'other_module', neither installed nor in the "
                               r"working directory .*Start the run in its folder"),
        ("my_module.deeper.f", {}, "there is no module 'my_module.deeper'"),
        ("my_module.neds", {}, "'my_module' has no 'neds', .*Did you mean 'needs'"),
        ("my_module.zzz", {}, "'my_module' has no 'zzz', .*Functions there: no_parameter, by_name"),
        ("my_module.number", {}, "found a int, expected a function. Name the function itself"),
        ("my_module.no_parameter", {}, r"signature \(\), .* fn\(inputs, \*\*kwargs\) does not fit"),
        ("my_module.by_name_only", {}, r"has the signature \(\*, inputs\), .*too many positional"),
        ("my_module.later", {}, "the function is async .*Write it with 'def'"),
        ("my_module.takes", {"clip_ep": 1}, "clip_eps=0.2, .*unexpected keyword .*'clip_ep'"),
        ("my_module.takes", {"inputs": 1}, "multiple values for argument 'inputs'"),
        ("my_module.needs", {"tau": 1}, "missing a required .*'clip_eps'. Change kwargs"),
    ],
)  # fmt: skip
def test_an_invalid_path_is_refused_with_the_config(
    path: str, kwargs: dict[str, Any], message: str, module: Any
) -> None:
    module(WRONG)
    with pytest.raises(ConfigError, match=f"trainer.loss.*{message}") as caught:
        custom(path, **kwargs)
    assert "import_path" in str(caught.value)


def test_a_failing_module_and_a_missing_one_have_different_errors(module: Any) -> None:
    module("import not_installed_anywhere")
    with pytest.raises(ConfigError, match=r"importing it failed: ModuleNotFoundError: .*Fix it"):
        custom("my_module.f")
    module("1 / 0")
    with pytest.raises(ConfigError, match=r"'my_module' is there, but .* ZeroDivisionError"):
        custom("my_module.f")


@pytest.mark.parametrize(
    ("path", "kwargs"),
    [
        ("my_module.takes", {"tau": 2}),
        ("my_module.needs", {"tau": 2, "clip_eps": 1}),
        ("my_module.takes_any", {"whatever": 2}),
        ("my_module:Group.nested", {}),
    ],
)
def test_callables_are_accepted(path: str, kwargs: dict[str, Any], module: Any) -> None:
    module(WRONG)
    custom(path, **kwargs)


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("return inputs.trainer_logprobs.sum()", "returned Tensor"),
        ("pass", "returned NoneType"),
        ("return LossOutputs(1.5, {})", "returned a loss of type float"),
        ("return LossOutputs(inputs.trainer_logprobs, {})", r"returned a loss of shape \(6,\)"),
        ("return LossOutputs(inputs.trainer_logprobs.sum(), None)", "metrics of type NoneType"),
    ],
)
def test_a_wrong_result_is_an_error_that_names_the_path(body: str, found: str, module: Any) -> None:
    module(f"from prime_rl import LossOutputs\ndef f(inputs):\n    {body}\n")
    with pytest.raises(PluginError, match=f"'my_module.f': the function .*{found}.*LossOutputs"):
        custom("my_module.f")(make_inputs())


def test_outputs_of_the_function_are_returned_unchanged(module: Any) -> None:
    body = "return LossOutputs(inputs.trainer_logprobs.sum(), {})"
    module(f"from prime_rl import LossOutputs\ndef f(inputs):\n    {body}\n")
    outputs = custom("my_module.f")(make_inputs())
    assert isinstance(outputs, LossOutputs)
    assert float(outputs.loss.detach()) == pytest.approx(TRAINER[:5].sum())
