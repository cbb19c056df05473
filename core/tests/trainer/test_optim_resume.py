"""Each optimizer goes on from a checkpoint as if nothing had happened."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from prime_rl import ConfigError, Loss, LossInputs, LossOutputs, PluginConfig
from prime_rl.config.trainer import TrainerConfig
from prime_rl.plugins.hookspecs import TRAINER_GROUP
from prime_rl.registry.components import installed_losses
from prime_rl.registry.manager import load_plugins
from prime_rl.registry.offers import make_optimizer
from prime_rl.rundir.checkpoints import Checkpoint
from prime_rl.trainer.checkpoint import restore, snapshot, write_shard
from prime_rl.trainer.loop import Trainer
from prime_rl.trainer.model import load_model
from prime_rl.wire import MicroBatch

OPTIMIZERS: list[dict[str, Any]] = [
    {"type": "adamw"},
    {"type": "sgd"},
    {"type": "sgd", "momentum": 0.9, "nesterov": True},
    {"type": "muon"},
    {"type": "sign_sgd"},
]


class PolicyGradient(Loss):
    """-A t"""

    name = "pg"
    token_wise = True

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        terms = -inputs.advantages * inputs.trainer_logprobs
        return LossOutputs(terms[inputs.loss_mask].sum(), {})


class OldRatio(Loss):
    """-A * exp(t - old)"""

    name = "old_ratio"
    token_wise = True
    reads = ("advantages", "old_logprobs")

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        assert inputs.old_logprobs is not None
        ratio = (inputs.trainer_logprobs - inputs.old_logprobs).exp()
        return LossOutputs((-inputs.advantages * ratio)[inputs.loss_mask].sum(), {})


def make_trainer(
    folder: Path, optim: dict[str, Any], loss: type[Loss] = PolicyGradient, **table: Any
) -> Trainer:
    table |= {"optim": {"lr": 1e-2, **optim}, "device": "cpu"}
    config = TrainerConfig.model_validate(table)
    return Trainer(
        load_model(folder, config),
        installed_losses().with_rl(loss(PluginConfig())),
        config,
        10,
        maker=make_optimizer(config.optim, load_plugins(TRAINER_GROUP)),
    )


def write(trainer: Trainer, step: int, folder: Path) -> Checkpoint:
    """What the trainer's part of a checkpoint holds."""
    checkpoint = Checkpoint(folder / f"step_{step}")
    checkpoint.weights.mkdir(parents=True)
    trainer.model.save_pretrained(checkpoint.weights)
    checkpoint.trainer.mkdir()
    write_shard(checkpoint.trainer, snapshot(trainer, step))
    return checkpoint


def same(a: Trainer, b: Trainer) -> bool:
    pairs = zip(a.model.parameters(), b.model.parameters(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("optim", OPTIMIZERS, ids=lambda optim: "_".join(map(str, optim.values())))
def test_two_steps_and_two_after_a_resume_are_four(
    tmp_path: Path, model_dir: Path, pack: Any, random_documents: Any, optim: dict[str, Any]
) -> None:
    batches = [pack(random_documents([9, 5], seed=seed)) for seed in range(4)]
    straight, first = make_trainer(model_dir, optim), make_trainer(model_dir, optim)
    for step, batch in enumerate(batches, 1):
        straight.train_step(step, [batch])
    for step, batch in enumerate(batches[:2], 1):
        first.train_step(step, [batch])
    assert not same(first, straight)
    checkpoint = write(first, 2, tmp_path / "checkpoint")
    resumed = make_trainer(checkpoint.weights, optim)
    restore(resumed, checkpoint)
    assert same(resumed, first)
    for step, batch in enumerate(batches[2:], 3):
        resumed.train_step(step, [batch])
    assert same(resumed, straight)


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


class Guest(nn.Module):
    """A part of the model that only some steps use: an expert, an indexer, an unread LM head."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.linspace(-0.5, 0.5, 12).reshape(3, 4))
        self.bias = nn.Parameter(torch.tensor([0.25, -0.5, 1.0]))

    def cost(self) -> torch.Tensor:
        return self.matrix.square().sum() + (self.bias - 2).square().sum()


@pytest.mark.parametrize("first_used_at", [None, 2, 3, 4])
@pytest.mark.parametrize(
    "optim",
    [*OPTIMIZERS, {"type": "adamw_offload"}],
    ids=lambda optim: "_".join(map(str, optim.values())),
)
def test_a_parameter_without_a_gradient_before_the_checkpoint_begins_with_a_new_state(
    tmp_path: Path,
    model_dir: Path,
    pack: Any,
    random_documents: Any,
    optim: dict[str, Any],
    first_used_at: int | None,
) -> None:
    """The checkpoint is of step 2. Whatever steps use the guest, four steps in one run and two and
    two are the same, also through a second checkpoint."""

    def make(folder: Path, guest: Guest) -> Trainer:
        table = TrainerConfig.model_validate(
            {"optim": {"lr": 1e-2, "weight_decay": 0.0, **optim}, "device": "cpu"}
        )
        model = load_model(folder, table)
        model.add_module("guest", guest)
        losses = installed_losses().with_rl(PolicyGradient(PluginConfig()))
        maker = make_optimizer(table.optim, load_plugins(TRAINER_GROUP))
        return Trainer(model, losses, table, 10, maker=maker)

    def train(trainer: Trainer, steps: range) -> None:
        for step in steps:
            if first_used_at is not None and step >= first_used_at:
                trainer.model.guest.cost().backward()
            trainer.train_step(step, [pack(random_documents([9, 5], seed=step))])

    straight = make(model_dir, Guest())
    train(straight, range(1, 5))
    interrupted = make(model_dir, Guest())
    train(interrupted, range(1, 3))
    for step in (2, 3):
        checkpoint = write(interrupted, step, tmp_path / "checkpoint")
        guest = Guest()
        guest.load_state_dict(interrupted.model.guest.state_dict())
        interrupted = make(checkpoint.weights, guest)
        restore(interrupted, checkpoint)
        train(interrupted, range(step + 1, step + 2))
    assert same(interrupted, straight)
    moved = not interrupted.model.guest.bias.equal(Guest().bias)
    assert moved == (first_used_at is not None)


def test_the_checkpoint_of_another_optimizer_is_refused(
    tmp_path: Path, model_dir: Path, pack: Any, random_documents: Any
) -> None:
    first = make_trainer(model_dir, {"type": "sgd", "momentum": 0.9})
    first.train_step(1, [pack(random_documents([9]))])
    checkpoint = write(first, 1, tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match="does not hold the state of this model and optimizer"):
        restore(make_trainer(checkpoint.weights, {"type": "muon"}), checkpoint)


@pytest.mark.parametrize("kind", ["adamw", "muon", "adamw_offload"])
def test_the_checkpoint_of_an_optimizer_without_state_is_refused(
    tmp_path: Path, model_dir: Path, pack: Any, random_documents: Any, kind: str
) -> None:
    first = make_trainer(model_dir, {"type": "sign_sgd"})
    first.train_step(1, [pack(random_documents([9]))])
    checkpoint = write(first, 1, tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match="does not hold the state of this model and optimizer"):
        restore(make_trainer(checkpoint.weights, {"type": kind}), checkpoint)


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
