"""Hand-computed credit from the formulas in the modules' docstrings."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl import PluginConfig
from prime_rl.testing import check_algorithm, make_group, score
from prime_rl_grpo import GRPO, GRPOConfig, MaxRL


def credit(algorithm, rewards):
    group = make_group(rewards)
    score(algorithm, group)
    return [float(rollout.advantages[0]) for rollout in group]


def test_grpo_subtracts_the_group_mean():
    assert credit(GRPO(GRPOConfig()), [1, 0, 1, 0]) == [0.5, -0.5, 0.5, -0.5]


def test_grpo_gives_a_single_rollout_no_credit():
    assert credit(GRPO(GRPOConfig()), [0.7]) == [0.0]


def test_grpo_broadcasts_over_the_trainable_tokens_only():
    group = make_group([1.0, 0.0], prompt=2, completion=3)
    score(GRPO(GRPOConfig()), group)
    assert group[0].samples[0].advantages.tolist() == [0, 0, 0.5, 0.5, 0.5]


def test_max_rl_divides_by_the_group_mean():
    assert credit(MaxRL(PluginConfig()), [1, 0, 0, 0]) == [3, -1, -1, -1]


def test_max_rl_gives_no_credit_if_no_reward_is_positive():
    assert credit(MaxRL(PluginConfig()), [0, 0]) == [0, 0]


@pytest.mark.parametrize("algorithm", [GRPO, MaxRL])
def test_it_passes_the_conformance_checks(algorithm):
    check_algorithm(algorithm(algorithm.config_class()))


@given(st.floats(0, 1), st.integers(1, 16))
def test_ties_are_exactly_zero_for_any_reward(reward, size):
    for algorithm in (GRPO, MaxRL):
        assert credit(algorithm(algorithm.config_class()), [reward] * size) == [0.0] * size


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=16))
def test_grpo_is_the_reward_minus_the_mean(rewards):
    mean = sum(rewards) / len(rewards)
    assert credit(GRPO(GRPOConfig()), rewards) == pytest.approx(
        [reward - mean for reward in rewards], abs=1e-5
    )


TIED_SUMS = [0.7 + 0.2 + 0.1, 0.1 + 0.2 + 0.7, 1.0]
"""1 in three ways; the first is 0.9999999999999999."""


@pytest.mark.parametrize("algorithm", [GRPO, MaxRL])
@pytest.mark.parametrize(
    "rewards",
    [
        TIED_SUMS,
        [0.1 + 0.2, 0.3],
        [0.3 - 0.1 - 0.2, 0.0],
        [float(np.float32(0.9)), 0.9],
        [1 / 3 + 1 / 3, 2 / 3, 1 - 1 / 3],
    ],
)
def test_weighted_sums_that_differ_by_rounding_are_ties(algorithm, rewards):
    assert credit(algorithm(algorithm.config_class()), rewards) == [0.0] * len(rewards)


def test_the_reward_in_the_middle_gets_exactly_nothing():
    """0.2 is the mean of 0.1, 0.2 and 0.3, which rounding puts next to it."""
    low, middle, high = credit(GRPO(GRPOConfig()), [0.1, 0.2, 0.3])
    assert middle == 0.0
    assert [low, high] == pytest.approx([-0.1, 0.1])


@pytest.mark.parametrize("dtype", [float, np.float32])
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e4])
@pytest.mark.parametrize("rewards", [[0.9, -0.3, -0.3, -0.3], [0.1, 0.2, -0.3], [0.7, 0.1, -0.8]])
def test_max_rl_gives_no_credit_where_rewards_cancel(rewards, scale, dtype):
    """The mean is 0 up to rounding: nothing may be divided by it."""
    given = [float(dtype(scale * reward)) for reward in rewards]
    for order in (given, given[::-1]):
        assert credit(MaxRL(PluginConfig()), order) == [0.0] * len(rewards)


def test_max_rl_divides_by_a_small_mean():
    """0.003, -0.001, -0.001: the mean is a third of 0.001, which is no rounding."""
    assert credit(MaxRL(PluginConfig()), [0.003, -0.001, -0.001]) == pytest.approx([8, -4, -4])
