"""Each optimizer goes on from a checkpoint as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from resumed_training import (
    batch_of,
    check_a_late_parameter,
    check_two_and_two_are_four,
    make_trainer,
    write,
)
from trainer_fixtures import model_dir as model_dir

from prime_rl import ConfigError
from prime_rl.trainer.checkpoint import restore

OPTIMIZERS: list[dict[str, Any]] = [
    {"type": "sgd"},
    {"type": "sgd", "momentum": 0.9, "nesterov": True},
    {"type": "muon"},
    {"type": "sign_sgd"},
    {"type": "adamw_offload"},
]


def name_of(optim: dict[str, Any]) -> str:
    return "_".join(map(str, optim.values()))


@pytest.mark.parametrize("optim", OPTIMIZERS[:-1], ids=name_of)
def test_two_steps_and_two_after_a_resume_are_four(
    tmp_path: Path, model_dir: Path, optim: dict[str, Any]
) -> None:
    check_two_and_two_are_four(tmp_path, model_dir, optim)


@pytest.mark.parametrize("first_used_at", [None, 2, 3, 4])
@pytest.mark.parametrize("optim", OPTIMIZERS, ids=name_of)
def test_a_parameter_without_a_gradient_before_the_checkpoint_begins_with_a_new_state(
    tmp_path: Path, model_dir: Path, optim: dict[str, Any], first_used_at: int | None
) -> None:
    check_a_late_parameter(tmp_path, model_dir, optim, first_used_at)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"type": "sgd", "momentum": 0.9}, "muon"),
        ({"type": "sign_sgd"}, "muon"),
        ({"type": "sign_sgd"}, "adamw_offload"),
    ],
)
def test_the_checkpoint_of_another_optimizer_is_refused(
    tmp_path: Path, model_dir: Path, before: dict[str, Any], after: str
) -> None:
    first = make_trainer(model_dir, before)
    first.train_step(1, [batch_of(1)])
    checkpoint = write(first, 1, tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match="does not hold the state of this model and optimizer"):
        restore(make_trainer(checkpoint.weights, {"type": after}), checkpoint)
