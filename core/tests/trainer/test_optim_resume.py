"""Each optimizer goes on from a checkpoint as if nothing had happened."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from resumed_training import (
    check_a_late_parameter,
    check_two_and_two_are_four,
    make_trainer,
    same,
    write,
)

from prime_rl import ConfigError, Loss, LossInputs, LossOutputs
from prime_rl.trainer.checkpoint import restore
from prime_rl.trainer.loop import Trainer
from prime_rl.wire import MicroBatch

OPTIMIZERS: list[dict[str, Any]] = [
    {"type": "adamw"},
    {"type": "sgd"},
    {"type": "sgd", "momentum": 0.9},
    {"type": "signs"},
]


@pytest.mark.parametrize("optim", OPTIMIZERS, ids=lambda optim: "_".join(map(str, optim.values())))
def test_two_steps_and_two_after_a_resume_are_four(
    tmp_path: Path, model_dir: Path, optim: dict[str, Any]
) -> None:
    check_two_and_two_are_four(tmp_path, model_dir, optim)


@pytest.mark.parametrize("first_used_at", [None, 2, 3, 4])
@pytest.mark.parametrize("optim", OPTIMIZERS, ids=lambda optim: "_".join(map(str, optim.values())))
def test_a_parameter_without_a_gradient_before_the_checkpoint_begins_with_a_new_state(
    tmp_path: Path, model_dir: Path, optim: dict[str, Any], first_used_at: int | None
) -> None:
    check_a_late_parameter(tmp_path, model_dir, optim, first_used_at)


class OldRatio(Loss):
    """-A * exp(t - old)"""

    name = "old_ratio"
    token_wise = True
    reads = ("advantages", "old_logprobs")

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        assert inputs.old_logprobs is not None
        ratio = (inputs.trainer_logprobs - inputs.old_logprobs).exp()
        return LossOutputs((-inputs.advantages * ratio)[inputs.loss_mask].sum(), {})


def test_a_resume_between_batches_of_several_optimizer_steps_changes_nothing(
    tmp_path: Path, model_dir: Path, pack: Any, random_documents: Any
) -> None:
    def batch(step: int) -> list[MicroBatch]:
        rows = [pack(random_documents([9, 5], seed=10 * step + part)) for part in range(2)]
        return [replace(row, minibatch=part) for part, row in enumerate(rows)]

    def make(folder: Path) -> Trainer:
        table = {"minibatches": 2, "epochs": 2, "scheduler": {"type": "linear"}}
        return make_trainer(folder, {"type": "adamw"}, OldRatio, **table)

    straight, first = make(model_dir), make(model_dir)
    for step in range(1, 5):
        straight.train_step(step, batch(step))
    for step in (1, 2):
        first.train_step(step, batch(step))
    checkpoint = write(first, 2, tmp_path / "checkpoint")
    resumed = make(checkpoint.weights)
    restore(resumed, checkpoint)
    states = resumed.optimizer.state.values()
    assert {int(state["step"]) for state in states} == {2 * 2 * 2}  # batches, parts, epochs
    for step in (3, 4):
        resumed.train_step(step, batch(step))
    assert same(resumed, straight) and not same(first, straight)


def test_the_checkpoint_of_another_optimizer_is_refused(
    tmp_path: Path, model_dir: Path, pack: Any, random_documents: Any
) -> None:
    first = make_trainer(model_dir, {"type": "sgd", "momentum": 0.9})
    first.train_step(1, [pack(random_documents([9]))])
    checkpoint = write(first, 1, tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match="does not hold the state of this model and optimizer"):
        restore(make_trainer(checkpoint.weights, {"type": "adamw"}), checkpoint)


def test_the_checkpoint_of_an_optimizer_without_state_is_refused(
    tmp_path: Path, model_dir: Path, pack: Any, random_documents: Any
) -> None:
    first = make_trainer(model_dir, {"type": "signs"})
    first.train_step(1, [pack(random_documents([9]))])
    checkpoint = write(first, 1, tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match="does not hold the state of this model and optimizer"):
        restore(make_trainer(checkpoint.weights, {"type": "adamw"}), checkpoint)


def test_a_checkpoint_that_lacks_a_part_of_a_parameters_state_is_refused(
    tmp_path: Path, model_dir: Path, pack: Any, random_documents: Any
) -> None:
    first = make_trainer(model_dir, {"type": "adamw"})
    first.train_step(1, [pack(random_documents([9]))])
    (some, *_) = first.optimizer.state.values()
    del some["exp_avg_sq"]
    checkpoint = write(first, 1, tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match="exp_avg_sq"):
        restore(make_trainer(checkpoint.weights, {"type": "adamw"}), checkpoint)
