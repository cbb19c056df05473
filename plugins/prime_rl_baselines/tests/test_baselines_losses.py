"""Each baseline's loss and divisor, through the packer and the trainer's own loss."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from loss_path import load_losses, loss_and_slopes, rollouts_of

from prime_rl import ConfigError, Loss, Rollout
from prime_rl.registry.offers import ALGORITHM, settings_of
from prime_rl.testing import score
from prime_rl_baselines import DAPO, Baseline, DrGRPO, GRPOStd
from prime_rl_baselines.losses import DAPOLoss, DrGRPOLoss, GRPOStdLoss
from prime_rl_devkit.kinds import check_offer

LENGTHS = [2, 3, 1]
REWARDS = [1.0, 0.0, 0.5]
TRAINER = np.log([0.9, 0.3, 0.5, 0.26, 0.3, 0.5])
INFERENCE = np.log([0.6, 0.4, 0.5, 0.2, 0.6, 0.4])  # ratios 1.5, .75, 1, 1.3, .5, 1.25
OWNER = np.repeat([0, 1, 2], LENGTHS)


def scored(cls: type[Baseline], **table: Any) -> tuple[Baseline, list[Rollout]]:
    algorithm = cls(settings_of(cls, ALGORITHM, table, "algo"))
    rollouts = rollouts_of(REWARDS, LENGTHS, [*INFERENCE])
    score(algorithm, rollouts)
    return algorithm, rollouts


def surrogate(advantages: Any, high: float) -> tuple[Any, Any]:
    """[6] -min(r A, clip(r, 0.8, 1 + high) A), and its gradient on log π."""
    ratio = np.exp(TRAINER - INFERENCE)
    plain, clipped = ratio * advantages, np.clip(ratio, 0.8, 1 + high) * advantages
    return -np.minimum(plain, clipped), np.where(plain <= clipped, -plain, 0.0)


def advantages_of(rewards: Any, std: bool) -> Any:
    above = rewards - rewards.mean()
    return (above / (rewards.std() + 1e-6) if std else above)[OWNER]


@pytest.mark.parametrize("capacity", [4, 64])
@pytest.mark.parametrize(
    ("cls", "trainer", "std", "high", "shares"),
    [
        # The tokens of a rollout are averaged, then the 3 rollouts.
        (GRPOStd, {}, True, 0.2, 1 / np.array(LENGTHS)[OWNER] / 3),
        (DrGRPO, {"losses": {"dr_grpo": {"constant": 24}}}, False, 0.2, np.full(6, 1 / 24)),
        (DAPO, {}, True, 0.28, np.full(6, 1 / 6)),
    ],
)
def test_the_step_is_the_formula(
    cls: type[Baseline],
    trainer: dict[str, Any],
    std: bool,
    high: float,
    shares: Any,
    capacity: int,
) -> None:
    algorithm, rollouts = scored(cls)
    losses = load_losses(**trainer)
    found = loss_and_slopes(algorithm, rollouts, [*TRAINER], losses, capacity=capacity)
    terms, slopes = surrogate(advantages_of(np.array(REWARDS), std), high)
    assert found[0] == pytest.approx((shares * terms).sum(), rel=1e-5)
    assert found[1] == pytest.approx((shares * slopes).tolist(), rel=1e-5, abs=1e-9)


def test_a_rollout_of_two_samples_is_averaged_as_one() -> None:
    """All 6 tokens are of one rollout, in 3 samples: the mean of the terms."""
    _, rollouts = scored(GRPOStd)
    samples = [sample for rollout in rollouts for sample in rollout.samples]
    (whole,) = rollouts_of([0.0], [1], [0.0])
    whole.samples = samples
    whole.assign_advantages(1.0)
    loss, _ = loss_and_slopes("grpo_std", [whole], [*TRAINER], load_losses())
    assert loss == pytest.approx(surrogate(np.ones(6), 0.2)[0].mean(), rel=1e-5)


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        ({"grpo_std": {"normalize_by": "tokens"}}, "'grpo_std' is a sum over rollouts"),
        ({"dr_grpo": {"normalize_by": "tokens"}}, "'dr_grpo' is a sum over constant"),
        ({"dr_grpo": {}}, r"dr_grpo: the loss is divided by a constant. Set the key constant"),
    ],
)
def test_another_divisor_is_refused(losses: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_losses(losses=losses)


@pytest.mark.parametrize("cls", [GRPOStdLoss, DrGRPOLoss, DAPOLoss])
def test_the_checks_of_losses_pass(cls: type[Loss]) -> None:
    report = check_offer("loss", cls, cls.config_class())
    assert report.ok, report


def test_neither_half_imports_torch() -> None:
    code = (
        "import sys, prime_rl_baselines, prime_rl_baselines.losses as losses; "
        "losses.register_losses(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
