"""What every optimizer has to pass: it goes on from a checkpoint as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from small_training import PolicyGradient
from torch import nn
from trainer_fixtures import pack_documents, random_documents_of

from prime_rl import Loss, PluginConfig
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


class Guest(nn.Module):
    """A part of the model that only some steps use: an expert, an indexer, an unread LM head."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.linspace(-0.5, 0.5, 12).reshape(3, 4))
        self.bias = nn.Parameter(torch.tensor([0.25, -0.5, 1.0]))

    def cost(self) -> torch.Tensor:
        return self.matrix.square().sum() + (self.bias - 2).square().sum()


def batch_of(seed: int) -> MicroBatch:
    return pack_documents(random_documents_of([9, 5], seed=seed))


def check_two_and_two_are_four(tmp_path: Path, model_dir: Path, optim: dict[str, Any]) -> None:
    batches = [batch_of(seed) for seed in range(4)]
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


def check_a_late_parameter(
    tmp_path: Path,
    model_dir: Path,
    optim: dict[str, Any],
    first_used_at: int | None,
) -> None:
    """The checkpoint is of step 2. Whatever steps use the guest, four steps in one run and two and
    two are the same, also through a second checkpoint."""

    def make(folder: Path, guest: Guest) -> Trainer:
        optim_table = {"lr": 1e-2, "weight_decay": 0.0, **optim}
        table = TrainerConfig.model_validate({"optim": optim_table, "device": "cpu"})
        model = load_model(folder, table)
        model.add_module("guest", guest)
        losses = installed_losses().with_rl(PolicyGradient(PluginConfig()))
        maker = make_optimizer(table.optim, load_plugins(TRAINER_GROUP))
        return Trainer(model, losses, table, 10, maker=maker)

    def train(trainer: Trainer, steps: range) -> None:
        for step in steps:
            if first_used_at is not None and step >= first_used_at:
                trainer.model.guest.cost().backward()
            trainer.train_step(step, [batch_of(step)])

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
