"""Adapters beside what else trains or compares: a head, the first weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from anchored_training import Anchored, hugging_face, logprobs, make_trainer, train
from small_head import (
    rows_of,
    scored_rollouts,
    trainer_of,
)

from prime_rl.config.trainer import TrainerConfig
from prime_rl.trainer.model import load_model
from prime_rl_lora.tuning import Lora, LoraConfig


def test_a_head_and_an_adapter_train_and_the_base_stays(model_dir: Path) -> None:
    tuning = Lora(LoraConfig(rank=4, alpha=8))
    model = load_model(model_dir, TrainerConfig(device="cpu"), tuning)
    trainer = trainer_of(model, {"own_model": True})
    before = [p.detach().clone() for p in trainer.policy.parameters()]
    for step in (1, 2):
        trainer.train_step(step, rows_of(scored_rollouts(step), trainer.losses))
    for (name, parameter), old in zip(trainer.policy.named_parameters(), before, strict=True):
        trains = "lora_" in name or ".module." in name
        assert torch.equal(parameter, old) != trains, name


@pytest.mark.parametrize("saved", [[], ["norm"]])
def test_the_first_weights_of_an_adapter_are_its_base_and_take_no_copy(
    model_dir: Path, pack: Any, random_documents: Any, saved: list[str]
) -> None:
    rows = [[pack(random_documents([9, 5], seed=10 * step))] for step in range(3)]
    lora = Lora(LoraConfig(rank=4, modules_to_save=saved))
    trainer = make_trainer(model_dir, Anchored, Path("is/not/read"), lora)
    trains = [p.requires_grad for p in trainer.model.parameters()]
    train(trainer, rows[:2])
    base = hugging_face(model_dir)
    row = rows[2][0]
    with torch.no_grad():
        with trainer.references.within("initial_logprobs"):
            found = trainer.forward(row)[1]
        moved = trainer.forward(row)[1]
        order = trainer.row(row).origins
        mask = torch.from_numpy(row.loss_mask)[order]
        expected = logprobs(base, row)[order][mask]
    assert torch.allclose(found[mask], expected, atol=1e-6)
    assert (moved[mask] - expected).abs().max() > 1e-3
    assert [p.requires_grad for p in trainer.model.parameters()] == trains
