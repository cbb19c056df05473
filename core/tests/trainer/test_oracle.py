"""Loss and full gradient of every scope and divisor, equal to transformers sequence by sequence."""

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
from transformers import PreTrainedModel

from prime_rl.config.trainer import TrainerConfig
from prime_rl.plugins.hookspecs import TRAINER_GROUP
from prime_rl.registry.components import Components
from prime_rl.registry.manager import load_plugins
from prime_rl.trainer.loop import Trainer


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_transformers_sequence_by_sequence(
    case: str, make_model: Callable[..., PreTrainedModel]
) -> None:
    losses = losses_of(case)
    rollouts = rollouts_of(losses)
    loss, gradient = reference(in_double(make_model()), rollouts, case)
    trainer = Trainer(in_double(make_model()), losses, TrainerConfig(device="cpu"), max_steps=9)
    found_loss, found = trained(trainer, rollouts)
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert distance(found, gradient) < ROUNDING


def test_an_env_with_a_loss_of_its_own_has_the_gradient_that_it_has_alone(
    make_model: Callable[..., PreTrainedModel],
) -> None:
    """In the same rows as another env, whose loss has another divisor."""
    tables = {"loss": {"type": "plain"}, "losses": {"clipped": {"normalize_by": "sequences"}}}
    config = TrainerConfig.model_validate({"device": "cpu", **tables})
    losses = Components.load(config, load_plugins(TRAINER_GROUP))
    envs = {"a": "clipped", "b": "rl"}
    rollouts = rollouts_of(losses, [("a", 3), ("b", 2), ("a", 2), ("b", 3)], envs)
    found = []
    for chosen in ("ab", "a", "b"):
        trainer = Trainer(in_double(make_model()), losses, config, max_steps=9)
        found.append(trained(trainer, [each for each in rollouts if each.env in chosen])[1])
    both, alone, other = found
    rest = {name: tensor - other[name] for name, tensor in both.items()}
    assert distance(rest, alone) < ROUNDING and distance(both, alone) > 0.1
