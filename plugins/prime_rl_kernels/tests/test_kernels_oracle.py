"""The same with rows packed by the kernels, with shared prompts and a fused head."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from oracle_cases import (
    CASES,
    ROUNDING,
    distance,
    in_double,
    losses_of,
    reference,
    rollouts_of,
    trained,
)
from trainer_fixtures import kernel_of
from transformers import PreTrainedModel

from prime_rl.config.trainer import TrainerConfig
from prime_rl.trainer.loop import Trainer

SHARED, APART, FUSED = (True, False), (False, False), (True, True)
WAYS = [(case, *way) for case in CASES for way in (SHARED, APART)]


@pytest.mark.parametrize(
    ("case", "share", "fused"), [*WAYS, ("token", *FUSED), ("group", False, True)]
)
def test_loss_and_gradient_are_those_of_transformers_sequence_by_sequence(
    case: str, share: bool, fused: bool, make_model: Callable[..., PreTrainedModel]
) -> None:
    losses = losses_of(case)
    rollouts = rollouts_of(losses)
    loss, gradient = reference(in_double(make_model("sdpa")), rollouts, case)
    config = TrainerConfig(device="cpu", share_prompts=share, fused_lm_head=fused)
    kernel = kernel_of(config)
    kernel.block_logits = 5 * 61
    trainer = Trainer(in_double(make_model()), losses, config, max_steps=9, kernel=kernel)
    assert trainer.policy.packing.name == ("shared" if share else "packed")
    found_loss, found = trained(trainer, rollouts)
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert distance(found, gradient) < ROUNDING
