"""A mean instead of a sum, and a loss that is not finite by itself."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from trainer_fixtures import Ratio

from prime_rl import Loss, LossInputs, LossOutputs, PluginError
from prime_rl.registry.calls import fault
from prime_rl.trainer.loop import Trainer


class Summed(Loss):
    """The sum of -A log π over the members."""

    name = "summed"
    token_wise = True

    def divisor(self, inputs: LossInputs) -> Any:
        return 1

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        terms = -inputs.advantages * inputs.trainer_logprobs
        loss = torch.where(inputs.loss_mask, terms, 0.0).sum() / self.divisor(inputs)
        return LossOutputs(loss, {})


class Averaged(Summed):
    name = "averaged"

    def divisor(self, inputs: LossInputs) -> Any:
        return inputs.loss_mask.sum()


class AveragedBySequence(Averaged):
    token_wise = False


class OnUnlikely(Averaged):
    """The trainer cannot judge it before it trains: it fails on a token as likely as its probe."""

    def divisor(self, inputs: LossInputs) -> Any:
        if (inputs.trainer_logprobs.exp() > 0.8).any():
            raise ValueError("this loss is for unlikely tokens")
        return super().divisor(inputs)


class OnUnlikelySequences(OnUnlikely):
    token_wise = False


class SequenceMean(AveragedBySequence):
    """Legal: one term per sequence."""

    normalize_by = "sequences"


class Nan(Summed):
    """sqrt has no finite gradient at 0."""

    def divisor(self, inputs: LossInputs) -> Any:
        return 1 + torch.sqrt(inputs.trainer_logprobs * 0.0).sum()


ROW = [[1, 2, 3, 4, 5], [6, 7, 8, 9]]
ADVANTAGES = [0, 1, -0.5, 0.5, 2, 0, -1, 0.25, 0.5]


def step(make_trainer: Callable[..., Trainer], pack: Any, loss: type[Loss]) -> dict[str, float]:
    trainer = make_trainer(loss, {"optim": {"lr": 1e-2}})
    row = pack(ROW, advantages=torch.tensor(ADVANTAGES).numpy().astype("f4"))
    metrics: dict[str, float] = trainer.train_step(1, [row])
    return metrics


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (Averaged, "loss 'averaged'.* it is no sum"),
        (AveragedBySequence, "loss 'averaged'.* it is a mean"),
        (OnUnlikely, "loss 'averaged' is a mean over its tokens, expected"),
    ],
)
def test_a_mean_is_refused(make_trainer: Any, pack: Any, loss: type[Loss], said: str) -> None:
    """By the trainer, before its first token; one that it cannot judge then, by this observer."""
    with pytest.raises(PluginError) as caught:
        step(make_trainer, pack, loss)
    assert re.search(said, fault(caught.value) or "")


@pytest.mark.parametrize(
    ("loss", "warned"),
    [(OnUnlikelySequences, True), (SequenceMean, False), (Summed, False), (Ratio, False)],
)
def test_a_sum_passes_and_a_mean_by_sequence_is_warned_of(
    make_trainer: Any, pack: Any, loss: type[Loss], warned: bool, caplog: Any
) -> None:
    caplog.set_level(logging.WARNING)
    step(make_trainer, pack, loss)
    assert any("is a mean over its tokens" in r.getMessage() for r in caplog.records) == warned


def test_a_loss_with_finite_inputs_is_at_fault(make_trainer: Any, pack: Any, caplog: Any) -> None:
    metrics = step(make_trainer, pack, Nan)
    assert metrics["optim/skipped"] == 1
    (said,) = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert "finite, so the fault is of plugin 'summed', loss 'summed'" in said


def test_inputs_that_are_not_finite_are_nobodys_fault(
    make_trainer: Any, pack: Any, caplog: Any
) -> None:
    trainer = make_trainer(Ratio, {"optim": {"lr": 1e-2}})
    mu = torch.full((5,), -1.5).numpy()
    mu[2] = float("-inf")
    trainer.train_step(1, [pack([[1, 2, 3, 4, 5]], inference_logprobs=mu)])
    (said,) = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert "the fault is of" not in said
