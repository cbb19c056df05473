"""Rewards are equal, reach a threshold and have a mean up to rounding only. The oracle is exact
arithmetic with fractions."""

from __future__ import annotations

import asyncio
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl import Rollout, at_least, is_negligible, settled
from prime_rl.orchestrator.scoring import score_rollout
from prime_rl.registry.manager import Hooks
from prime_rl.testing import make_rollout

weights = st.integers(0, 100).map(lambda n: Fraction(n, 100))
scores = st.sampled_from([Fraction(k, n) for n in (1, 2, 3, 4, 5, 8, 10, 20) for k in range(n + 1)])
terms = st.lists(st.tuples(weights, scores), min_size=1, max_size=6)


@given(terms, st.randoms())
def test_a_weighted_sum_in_any_order_is_the_exact_one(parts, random) -> None:
    expected = float(sum(weight * score for weight, score in parts))
    random.shuffle(parts)
    assert settled(sum(float(weight) * float(score) for weight, score in parts)) == expected


@given(terms, st.integers(-1000, 1000))
def test_a_sum_whose_terms_cancel_is_zero(parts, large) -> None:
    total = sum(weight * score for weight, score in parts) + large
    found = sum(float(weight) * float(score) for weight, score in parts) + float(large)
    assert settled(found - float(total), scale=max(abs(large), 6)) == 0.0


@given(st.integers(-100, 200).map(lambda n: n / 100))
def test_a_reward_computed_in_float32_is_the_decimal_that_was_meant(meant: float) -> None:
    tenths = float(np.float32(0.1) * np.float32(meant * 10))
    assert settled(float(np.float32(meant))) == settled(tenths) == meant


@given(st.integers(-(10**12), 10**12), st.integers(0, 12))
def test_a_short_decimal_keeps_its_bits(digits: int, places: int) -> None:
    value = float(Fraction(digits, 10**places))
    if abs(value) >= 1e-12:
        assert settled(value) == value


@given(st.integers(-300, 300), st.integers(1, 300))
def test_a_small_fraction_keeps_its_bits(numerator: int, denominator: int) -> None:
    assert settled(numerator / denominator) == numerator / denominator


@given(st.floats(allow_nan=False, allow_infinity=False, width=64))
def test_a_number_moves_by_rounding_only_and_only_once(value: float) -> None:
    found = settled(value)
    assert settled(found) == found
    of_float32 = abs(value) < 3e38 and float(np.float32(value)) == value
    relative = 2.0**-22 if of_float32 else 2.0**-48
    assert abs(found - value) <= relative * abs(value) + 2.0**-48


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3, True, "no number", None])
def test_what_is_no_fraction_is_left_for_the_checks_of_rewards(value) -> None:
    found = settled(value)
    assert found is value


def test_core_settles_a_reward_before_it_is_scored_whoever_makes_the_rollout() -> None:
    sums = [0.7 + 0.2 + 0.1, 0.1 + 0.2 + 0.7, 0.2 + 0.1 + 0.7]
    assert len({*sums}) == 2
    group = [make_rollout(reward) for reward in sums]
    for rollout in group:
        asyncio.run(score_rollout(Hooks(), rollout))
    assert {rollout.reward for rollout in group} == {1.0}


def test_terms_of_a_rollout_say_how_much_has_cancelled() -> None:
    rest = 1000.1 - 1000.0 - 0.1
    assert 1e-14 < abs(rest) < 1e-13
    rollout = Rollout(
        env="a", example_id=0, group_id=0, reward=rest, samples=[], rewards={"large": 1000.1}
    )
    rollout.settle()
    assert rollout.reward == 0.0


@pytest.mark.parametrize(
    ("reward", "least", "reached"),
    [
        (0.9999999999999999, 1.0, True),
        (0.999999999, 1.0, False),
        (-0.30000000000000004, -0.3, True),
        (0.0, 0.0, True),
        (0.999999, 1.0, False),
        (-1e-9, 0.0, False),
        (1.0, 0.5, True),
    ],
)
def test_a_reward_reaches_a_threshold_up_to_rounding(reward, least, reached) -> None:
    assert at_least(reward, least) is reached


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_what_float32_leaves_of_cancelling_rewards_is_negligible(scale: float) -> None:
    rewards = [float(np.float32(scale * each)) for each in (0.9, -0.3, -0.3, -0.3)]
    assert is_negligible(sum(rewards) / 4, rewards)
    assert not is_negligible(1e-5 * scale, rewards)
