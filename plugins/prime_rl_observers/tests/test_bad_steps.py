"""Bad steps are skipped, explained and limited."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from trainer_fixtures import Ratio

from prime_rl import RunError
from prime_rl.trainer.loop import Trainer
from prime_rl_observers.bad_steps import worst_samples


@pytest.fixture
def trainer(make_trainer: Callable[..., Trainer]) -> Trainer:
    made: Trainer = make_trainer(Ratio, {"optim": {"lr": 1e-2}})
    return made


def bad_row(pack: Any) -> Any:
    """Three sequences of two envs; the second one's logprobs make its ratio overflow."""
    mu = np.where(np.arange(10) % 5 == 0, 0.0, -1.5).astype("f4")
    documents = [[1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    mu = [0, -1.5, -1.5, 0, -2000, -2000, -1.5, 0, -1.5, -1.5]
    return pack(documents, envs=("math", "code"), env_ids=[0, 1, 0], inference_logprobs=mu)


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_bad_step_is_skipped_and_names_env_and_sample(
    trainer: Trainer, pack: Any, caplog: pytest.LogCaptureFixture
) -> None:
    trainer.train_step(1, [pack([[1, 2, 3, 4]])])  # momentum that must not move them
    before = weights(trainer)
    metrics = trainer.train_step(2, [pack([[1, 2, 3]]), bad_row(pack)])
    assert same(before, weights(trainer))
    assert metrics["optim/skipped"] == 1 and metrics["optim/lr"] == 0
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    said = record.getMessage()
    assert "step 2: the gradient norm is" in said
    assert "Most conspicuous: env 'code', micro batch 1, sequence 1 (4 tokens)" in said
    assert "version 2 has the weights of version 1" in said


def test_bad_steps_in_a_row_end_the_run_and_a_good_step_resets_their_number(
    trainer: Trainer, pack: Any
) -> None:
    good = [pack([[1, 2, 3, 4]])]
    for step in (1, 2):
        trainer.train_step(step, [bad_row(pack)])
    trainer.train_step(3, good)
    for step in (4, 5):
        trainer.train_step(step, [bad_row(pack)])
    before = weights(trainer)
    with pytest.raises(RunError, match=r"the 3\. step in a row .*max_bad_steps.*version 5 are in"):
        trainer.train_step(6, [bad_row(pack)])
    assert same(before, weights(trainer))


def test_a_run_of_which_no_step_is_finite_fails(trainer: Trainer, pack: Any) -> None:
    trainer.max_steps = 2
    trainer.train_step(1, [bad_row(pack)])
    with pytest.raises(RunError, match=r"the 2\. step in a row .*, and no step of the run was"):
        trainer.train_step(2, [bad_row(pack)])


def test_the_worst_sample_comes_first_with_its_figures(trainer: Trainer, pack: Any) -> None:
    advantages = np.array([0, 1, 1, 0, 2, 2, -7, 0, 1, np.nan], "f4")
    documents = [[1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    row = pack(documents, envs=("math", "code"), env_ids=[0, 1, 0], advantages=advantages)
    worst = worst_samples(trainer, [row])
    assert [(each.env, each.sequence) for each in worst] == [("math", 2), ("code", 1), ("math", 0)]
    assert [each.num_nonfinite for each in worst] == [1, 0, 0]
    assert worst[1].advantage == 7 and worst[0].num_tokens == 3
