"""PRIME's implicit reward: advantages and loss against numbers computed manually, and a training of
a few steps in which the second model learns to tell success from failure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prime_rl import ConfigError, HeadInputs, LossInputs, Rollout, Sample
from prime_rl.config.trainer import TrainerConfig
from prime_rl.orchestrator.packer import batch_frames, batch_to_pack
from prime_rl.plugins.hookspecs import TRAINER_GROUP
from prime_rl.registry.components import Components
from prime_rl.registry.manager import load_plugins
from prime_rl.testing import check_algorithm, make_group, score
from prime_rl.trainer.loop import Trainer
from prime_rl.trainer.model import load_model
from prime_rl.wire.micro_batch import decode_batch
from prime_rl_credit.implicit_reward import (
    ImplicitReward,
    ImplicitRewardConfig,
    ImplicitRewardLoss,
    ImplicitRewardLossConfig,
    Prime,
    PrimeConfig,
)


def inputs_of(rewards: list[float], rollouts: list[int], lengths: list[int]) -> HeadInputs:
    """Each sample has a prompt of one token. log phi of its tokens is 1, 2, ... per rollout, and
    log ref is 0."""
    mask = np.concatenate([np.arange(length) > 0 for length in lengths])
    owners = np.repeat(rollouts, lengths)
    outputs = np.zeros(len(mask), np.float32)
    for rollout in set(rollouts):
        at = np.flatnonzero(mask & (owners == rollout))
        outputs[at] = np.arange(1, len(at) + 1)
    return HeadInputs(
        outputs=outputs,
        loss_mask=mask,
        streams={
            "rewards": np.asarray([rewards[owner] for owner in owners], np.float32),
            "initial_logprobs": np.zeros(len(mask), np.float32),
        },
        lengths=tuple(lengths),
        rollouts=tuple(rollouts),
    )


def test_advantages_of_a_group_of_two() -> None:
    """beta = 0.5: r = (0.5, 1) over two samples, and (0.5). Means 0.75 and 0.5. The first: (0.5 -
    0.5, 1 - 0.5) summed from behind, plus 1 - 0; the second: 0.5 - 0.75, minus 1."""
    head = ImplicitReward(ImplicitRewardConfig(beta=0.5))
    found = head.prepare(inputs_of([1.0, 0.0], [0, 0, 1], [2, 2, 2]))
    assert found["advantages"].tolist() == [0, 1.5, 0, 1.5, 0, -1.25]
    assert set(found["implicit_beta"].tolist()) == {0.5}


def test_a_discount_counts_later_rewards_less() -> None:
    """gamma = 0.5: 0 + 0.5 * 0.5."""
    head = ImplicitReward(ImplicitRewardConfig(beta=0.5, gamma=0.5))
    found = head.prepare(inputs_of([1.0, 0.0], [0, 0, 1], [2, 2, 2]))
    assert found["advantages"].tolist() == [0, 1.25, 0, 1.5, 0, -1.25]


def test_without_a_sibling_there_is_no_advantage() -> None:
    head = ImplicitReward(ImplicitRewardConfig())
    assert not head.prepare(inputs_of([1.0], [0, 0], [2, 3]))["advantages"].any()


@pytest.mark.parametrize("outcome", [1.0, 0.0])
def test_the_loss_is_the_cross_entropy_of_the_outcome(outcome: float) -> None:
    """S = 0.5 (1 + 3) = 2; the gradient on each token's log phi is beta (sigma(S) - R)."""
    logprobs = torch.tensor([9.0, 1.0, 3.0], requires_grad=True)
    zero = torch.zeros(3)
    inputs = LossInputs(
        trainer_logprobs=zero,
        inference_logprobs=zero,
        ref_logprobs=None,
        advantages=zero,
        loss_mask=torch.tensor([False, True, True]),
        loss_weights=None,
        initial_logprobs=zero,
        streams={
            "implicit_reward": logprobs,
            "outcomes": torch.full((3,), outcome),
            "implicit_beta": torch.full((3,), 0.5),
        },
    )
    outputs = ImplicitRewardLoss(ImplicitRewardLossConfig(coef=2.0))(inputs)
    (gradient,) = torch.autograd.grad(outputs.loss, logprobs)
    probability = 1 / (1 + np.exp(-2.0))
    expected = -(outcome * np.log(probability) + (1 - outcome) * np.log(1 - probability))
    assert outputs.loss.item() == pytest.approx(2 * expected)
    slope = 2 * 0.5 * (probability - outcome)
    assert gradient.tolist() == pytest.approx([0.0, slope, slope])
    assert outputs.metrics["is_right"].item() == float(outcome > 0.5)


def test_the_algorithm_passes_the_conformance_checks() -> None:
    check_algorithm(Prime(PrimeConfig()))


def test_the_reward_model_learns_of_successes_and_the_policy_of_rewards() -> None:
    group = make_group([0.75, 0.5, 0.25, -3.0])
    score(Prime(PrimeConfig()), group)
    samples = [sample for rollout in group for sample in rollout.samples]
    assert [sample.streams["outcomes"][-1] for sample in samples] == [1, 1, 0, 0]
    assert [sample.streams["rewards"][-1] for sample in samples] == [0.75, 0.5, 0.25, -3.0]


def test_the_head_needs_a_model_of_its_own() -> None:
    config = TrainerConfig.model_validate({"heads": {"implicit_reward": {}}})
    with pytest.raises(ConfigError, match=r"trainer.heads.implicit_reward.*own_model = true"):
        Components.load(config, load_plugins(TRAINER_GROUP))


@pytest.mark.slow
def test_the_second_model_learns_which_token_succeeds(model_dir: Path) -> None:
    """Token 10 succeeds and 11 fails, whatever follows. After training, the reward model gives the
    first a positive return and the other a negative one, and its advantages have their signs. The
    policy itself does not move: its learning rate is next to nothing."""
    settings: dict[str, Any] = {
        "device": "cpu",
        "loss": {"type": "ppo_clip"},
        "heads": {"implicit_reward": {"own_model": True, "lr": 0.02, "beta": 0.5}},
        "optim": {"lr": 1e-12, "weight_decay": 0.0, "max_norm": None},
    }
    config = TrainerConfig.model_validate(settings)
    losses = Components.load(config, load_plugins(TRAINER_GROUP))
    trainer = Trainer(load_model(model_dir, config), losses, config, 100, initial=model_dir)
    rollouts = []
    for token in (10, 11, 10, 11):
        sample = Sample(
            token_ids=[1, 2, token, 20 + len(rollouts)],
            loss_mask=[False, False, True, True],
            inference_logprobs=[0.0, 0.0, -1.0, -1.0],
        )
        rollouts.append(
            Rollout(env="a", example_id=0, group_id=0, reward=float(token == 10), samples=[sample])
        )
    score(Prime(PrimeConfig()), rollouts)
    (frame,) = batch_frames(batch_to_pack(1, rollouts, losses, 64), 64)
    for step in range(1, 31):
        (row,) = decode_batch(frame)[1]
        metrics = trainer.train_step(step, [row])

    assert metrics["implicit_reward_loss/is_right"] == 1.0
    assert metrics["implicit_reward_loss/cross_entropy"] < 0.2
    assert row.advantages is not None
    advantages = row.advantages.reshape(-1, 4)[:, 2:]
    for tokens, credit in zip(row.token_ids.reshape(-1, 4), advantages, strict=True):
        assert (np.sign(credit) == (1 if tokens[2] == 10 else -1)).all()
