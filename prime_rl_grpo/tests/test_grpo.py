"""Hand-computed credit from the formulas in the modules' docstrings."""

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
