"""Whitening over the batch, with numbers worked out manually."""

import numpy as np
import pytest

from prime_rl import PluginConfig
from prime_rl.testing import check_algorithm, make_group, score_batch
from prime_rl_grpo import GRPOConfig, ReinforcePP, ReinforcePPBaseline


def credit(groups):
    return [[rollout.advantages.tolist() for rollout in group] for group in groups]


def test_the_reward_is_whitened_over_all_groups_of_the_batch():
    """Rewards 1, 0 and 5, 2 on one token each: mean 2, variance (1 + 4 + 9 + 0) / 4 = 3.5."""
    groups = [make_group([1, 0], completion=1), make_group([5, 2], completion=1)]
    score_batch(ReinforcePP(PluginConfig()), groups)
    std = 3.5**0.5
    expected = [[[-1 / std], [-2 / std]], [[3 / std], [0.0]]]
    np.testing.assert_allclose(credit(groups), expected, rtol=1e-6)


def test_every_trainable_token_counts_once():
    """Reward 1 on 3 tokens and 0 on 1 token: mean 3/4, variance 3/4 x 1/4 = 3/16."""
    groups = [[*make_group([1], completion=3), *make_group([0], completion=1)]]
    score_batch(ReinforcePP(PluginConfig()), groups)
    std = 3**0.5 / 4
    ((first, second),) = credit(groups)
    np.testing.assert_allclose(first, [0.25 / std] * 3, rtol=1e-6)
    np.testing.assert_allclose(second, [-0.75 / std], rtol=1e-6)
    assert groups[0][0].samples[0].advantages[:2].tolist() == [0, 0]  # the prompt


def test_the_baseline_is_subtracted_before_the_batch_is_whitened():
    """Rewards 1, 0 and 5, 2: centered 0.5, -0.5, 1.5, -1.5; variance (2 x 1/4 + 2 x 9/4) / 4."""
    groups = [make_group([1, 0], completion=1), make_group([5, 2], completion=1)]
    score_batch(ReinforcePPBaseline(GRPOConfig()), groups)
    std = 1.25**0.5
    expected = [[[0.5 / std], [-0.5 / std]], [[1.5 / std], [-1.5 / std]]]
    np.testing.assert_allclose(credit(groups), expected, rtol=1e-6)


@pytest.mark.parametrize("cls", [ReinforcePP, ReinforcePPBaseline])
def test_equal_rewards_give_exactly_no_credit(cls):
    groups = [make_group([0.1] * 3), make_group([0.1] * 4)]
    score_batch(cls(cls.config_class()), groups)
    assert not any(rollout.advantages.any() for group in groups for rollout in group)


@pytest.mark.parametrize("cls", [ReinforcePP, ReinforcePPBaseline])
def test_the_conformance_checks_pass(cls):
    check_algorithm(cls(cls.config_class()))


@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_rewards_that_differ_by_rounding_in_float32_give_exactly_no_credit(scale):
    """0.7123459 has digits of its own, so neither reward is rounded to a simple number."""
    reward = np.float32(scale * 0.7123459)
    group = make_group([float(reward), float(np.nextafter(reward, np.float32(1e9)))])
    assert group[0].reward != group[1].reward
    score_batch(ReinforcePP(PluginConfig()), [group])
    assert not any(rollout.advantages.any() for rollout in group)


@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_what_centering_leaves_of_rounding_in_float32_is_not_whitened(scale):
    """A batch of such groups has a deviation of nearly zero, and the centered rewards are all of
    that size: they are compared with the rewards themselves."""
    reward = np.float32(scale * 0.7123459)
    next_to_it = float(np.nextafter(reward, np.float32(1e9)))
    groups = [make_group([float(reward), next_to_it]) for _ in range(2)]
    score_batch(ReinforcePPBaseline(GRPOConfig()), groups)
    assert not any(rollout.advantages.any() for group in groups for rollout in group)
