"""raft and online_dpo: the streams, and the loss of a pair against its formula in NumPy."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from loss_path import load_losses, loss_and_slopes, rollouts_of

from prime_rl import PluginConfig, Rollout
from prime_rl.registry.offers import ALGORITHM, settings_of
from prime_rl.testing import check_algorithm, score
from prime_rl_devkit.kinds import check_offer
from prime_rl_preference import RAFT, OnlineDPO
from prime_rl_preference.dpo_loss import DPOConfig, DPOLoss

LENGTHS = [2, 3, 1]
OWNER = np.repeat([0, 1, 2], LENGTHS)
TRAINER = np.log([0.9, 0.3, 0.5, 0.26, 0.3, 0.5])
INITIAL = np.log([0.6, 0.4, 0.5, 0.2, 0.6, 0.1])


def group_of(rewards: list[float], **where: int) -> list[Rollout]:
    return rollouts_of(rewards, LENGTHS, [-1.0] * 6, **where)


def marked(rewards: list[float], **where: int) -> list[Rollout]:
    group = group_of(rewards, **where)
    score(OnlineDPO(PluginConfig()), group)
    return group


def raft(**table: Any) -> RAFT:
    return RAFT(settings_of(RAFT, ALGORITHM, table, "algo"))


def test_raft_is_the_cross_entropy_of_the_successes() -> None:
    group = group_of([1.0, 0.9, 1.0])
    score(raft(), group)
    loss, slopes = loss_and_slopes(raft(), group, [*TRAINER], load_losses())
    kept = OWNER != 1
    assert loss == pytest.approx(-TRAINER[kept].mean())
    assert slopes == pytest.approx(np.where(kept, -1 / 3, 0).tolist())


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [([0.2, 0.7, 0.1], [0, 1, 0]), ([0.3, 0.3, 0.1], [1, 1, 0]), ([0, 0, 0], [1, 1, 1])],
)
def test_raft_may_keep_the_best_of_a_group(rewards: list[float], kept: list[int]) -> None:
    group = group_of(rewards)
    score(raft(min_reward=None), group)
    found = [rollout.samples[0].ce_weights[-1] for rollout in group]  # type: ignore[index]
    assert found == kept


def test_a_rollout_that_raft_does_not_keep_trains_nothing() -> None:
    group = group_of([0.0, 1.0, 0.5])
    score(raft(), group)
    losses = load_losses()
    loss_and_slopes(raft(), group, [*TRAINER], losses)
    assert [rollout.has_members for rollout in group] == [False, True, False]


def pair_loss(trainer: Any, best: int, worst: int, beta: float) -> float:
    gains = trainer - INITIAL
    margin = gains[best == OWNER].sum() - gains[worst == OWNER].sum()
    return float(np.log1p(np.exp(-beta * margin)))


def test_online_dpo_prefers_the_best_to_the_worst() -> None:
    """Two groups; in the second, the best and the worst have changed places. The mean is over
    groups."""
    every = [*marked([0.5, 1.0, 0.0]), *marked([0.5, 0.0, 1.0], group=1, first=6)]
    trainer = np.concatenate([TRAINER, TRAINER + 0.1])
    losses = load_losses(losses={"dpo": {"beta": 0.5}})
    initial = [*INITIAL, *INITIAL]
    loss, slopes = loss_and_slopes("dpo", every, [*trainer], losses, initial_logprobs=initial)
    pairs = (TRAINER, 1, 2), (TRAINER + 0.1, 2, 1)
    expected = [pair_loss(t, best, worst, 0.5) for t, best, worst in pairs]
    assert loss == pytest.approx(np.mean(expected), rel=1e-6)
    found = np.split(np.array(slopes), 2)
    for (_, best, worst), own, value in zip(pairs, found, expected, strict=True):
        slope = 0.5 * (1 - np.exp(-value)) / 2  # beta * sigmoid(-beta h), over 2 groups
        signs = np.where(best == OWNER, -1.0, np.where(worst == OWNER, 1.0, 0.0))
        assert own == pytest.approx(slope * signs, rel=1e-5)


@pytest.mark.parametrize("rewards", [[0.3, 0.3, 0.3], [0.0, 0.0, 0.0]])
def test_a_tied_group_has_no_pair(rewards: list[float]) -> None:
    group = marked(rewards)
    found = loss_and_slopes("dpo", group, [*TRAINER], load_losses(), initial_logprobs=[*INITIAL])
    assert found == (0.0, [0.0] * 6)
    assert not any(rollout.has_members for rollout in group)


def test_half_a_pair_gives_nothing() -> None:
    group = marked([0.5, 1.0, 0.0])[:2]
    found = loss_and_slopes("dpo", group, [*TRAINER], load_losses(), initial_logprobs=[*INITIAL])
    assert found == (0.0, [0.0] * 6)


def test_half_a_pair_does_not_count_in_the_mean_over_groups() -> None:
    """A filter has dropped the rejected rollout of the second of three groups."""
    groups = [marked([0.5, 1.0, 0.0], group=number, first=6 * number) for number in range(3)]
    halved = [each for each in groups[1] if each.reward > 0]
    every = [*groups[0], *halved, *groups[2]]
    trainer = [*TRAINER, *TRAINER, *(TRAINER + 0.1)]
    initial = [*INITIAL] * 3
    losses = load_losses(losses={"dpo": {"beta": 0.5}})
    loss, slopes = loss_and_slopes("dpo", every, trainer, losses, initial_logprobs=initial)
    pairs = [pair_loss(TRAINER, 1, 2, 0.5), pair_loss(TRAINER + 0.1, 1, 2, 0.5)]
    assert loss == pytest.approx(np.mean(pairs), rel=1e-6)
    assert slopes[6:12] == [0.0] * 6


@pytest.mark.parametrize(
    "algorithm", [raft(), raft(min_reward=None), OnlineDPO(PluginConfig())], ids=lambda a: a.name
)
def test_the_conformance_checks_pass(algorithm: Any) -> None:
    check_algorithm(algorithm)


def test_the_checks_of_losses_pass() -> None:
    report = check_offer("loss", DPOLoss, DPOConfig())
    assert report.ok, report


def test_neither_half_imports_torch() -> None:
    code = (
        "import sys, prime_rl_preference, prime_rl_preference.dpo_loss as loss; "
        "loss.register_losses(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("reward", [0.7 + 0.2 + 0.1, float(np.float32(0.1) * np.float32(10))])
def test_raft_keeps_a_success_that_is_a_weighted_sum(reward: float) -> None:
    for algorithm in (raft(), raft(min_reward=None)):
        group = group_of([reward, 1.0, 0.5])
        score(algorithm, group)
        found = [rollout.samples[0].ce_weights[-1] for rollout in group]  # type: ignore[index]
        assert found == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("reward", "least"),
    [(0.1 + 0.2, 0.3), (0.7 + 0.2, 0.9), (1 - 1 / 3, 2 / 3), (2 / 3, 1 - 1 / 3)],
)
def test_raft_meets_its_threshold_up_to_rounding(reward: float, least: float) -> None:
    group = group_of([reward, least, least - 0.001])
    score(raft(min_reward=least), group)
    found = [rollout.samples[0].ce_weights[-1] for rollout in group]  # type: ignore[index]
    assert found == [1.0, 1.0, 0.0]


def test_rewards_that_differ_by_rounding_make_no_pair() -> None:
    group = marked([0.7 + 0.2 + 0.1, 1.0, 0.1 + 0.2 + 0.7])
    loss_and_slopes("dpo", group, [*TRAINER], load_losses(), initial_logprobs=[*INITIAL])
    assert not any(rollout.has_members for rollout in group)
