"""Intervals of paired differences, against integrals and simulated races."""

from math import inf, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl_tools.race.compare import LEVEL, PRIOR, compare, interval


def bayes_factor(differences, mean):
    """The evidence against ``mean`` by integration: normal differences, effect size N(0, PRIOR) or
    0, and the prior d(sd)/sd on the standard deviation."""
    x = np.asarray(differences) - mean
    log_sd = np.linspace(-12, 8, 1201)[:, None]
    effect = np.linspace(-12, 12, 481) * sqrt(PRIOR) / 2

    def log_likelihood(size):
        sd = np.exp(log_sd)
        squares = sum((each / sd - size) ** 2 for each in x)
        return -len(x) * log_sd - squares / 2

    prior = np.exp(-(effect**2) / (2 * PRIOR)) / sqrt(2 * np.pi * PRIOR)
    step = effect[1] - effect[0]
    shift = log_likelihood(effect).max()
    against = (np.exp(log_likelihood(effect) - shift) * prior * step).sum()
    return against / np.exp(log_likelihood(np.zeros(1)) - shift).sum()


@pytest.mark.parametrize("differences", [[0.1, 0.14, 0.07, 0.12], [0.3, -0.1, 0.2, 0.5, 0.1, 0.0]])
@pytest.mark.parametrize("level", [0.05, 0.2])
def test_an_interval_ends_where_the_evidence_reaches_its_level(differences, level):
    for end in interval(differences, level):
        assert bayes_factor(differences, end) == pytest.approx(1 / level, rel=1e-3)


def race(rng, num_seeds, gap=0.0):
    """Held-out rewards of two configs, skewed; the true means differ by ``gap``."""
    luck = rng.normal(0, 0.03, num_seeds)  # a seed's own, for both
    draw = lambda: 0.7 + luck - rng.exponential(0.04, num_seeds)  # noqa: E731
    first, second = draw() + gap, draw()
    return {"a": dict(enumerate(first)), "b": dict(enumerate(second))}


def test_a_against_a_is_seldom_decided_however_often_one_looks():
    """Issue: at most 5 % of 200 races have a winner. Here one looks after each of 20 seeds."""
    rng, wrong = np.random.default_rng(0), 0
    for _ in range(200):
        rewards = race(rng, num_seeds=20)
        looks = (
            {name: {s: r for s, r in by_seed.items() if s < n} for name, by_seed in rewards.items()}
            for n in range(2, 21)
        )
        wrong += any(pair.decided for look in looks for pair in compare(look))
    assert wrong <= LEVEL * 200


def test_a_clear_difference_is_found_in_five_seeds():
    rng = np.random.default_rng(1)
    found = [compare(race(rng, num_seeds=5, gap=0.4))[0] for _ in range(50)]
    assert all(pair.better == "a" for pair in found)
    assert sum(pair.decided for pair in found) >= 45
    assert np.mean([pair.low <= 0.4 <= pair.high for pair in found]) >= 0.95


def test_intervals_of_several_pairs_are_wider():
    two = {"a": {1: 0.5, 2: 0.6, 3: 0.7, 4: 0.65, 5: 0.6}, "b": dict.fromkeys(range(1, 6), 0.2)}
    three = {**two, "c": dict.fromkeys(range(1, 6), 0.3)}
    alone = compare(two)[0]
    beside = next(pair for pair in compare(three) if (pair.better, pair.other) == ("a", "b"))
    assert beside.low < alone.low and alone.high < beside.high


def test_against_one_config_the_intervals_are_shorter():
    rng = np.random.default_rng(2)
    rewards = {name: dict(enumerate(rng.normal(size=6))) for name in "abcd"}
    every, found = compare(rewards), compare(rewards, against="b")
    assert [{pair.better, pair.other} for pair in found] == [{"a", "b"}, {"b", "c"}, {"b", "d"}]
    wide = {frozenset((pair.better, pair.other)): pair.high - pair.low for pair in every}
    for pair in found:
        assert pair.high - pair.low < wide[frozenset((pair.better, pair.other))]


def test_only_seeds_of_both_count():
    pair = compare({"a": {1: 0.9, 2: 0.8}, "b": {2: 0.7, 3: 0.1}})[0]
    assert (pair.num_seeds, pair.mean) == (1, pytest.approx(0.1))
    assert (pair.low, pair.high) == (-inf, inf) and "too few" in pair.verdict
    assert pair.as_json()["high"] is None


def test_equal_runs_are_no_difference():
    rewards = {1: 0.5, 2: 0.6, 3: 0.4, 4: 0.4}
    pair = compare({"a": rewards, "b": dict(rewards)})[0]
    assert not pair.decided and "equal in 4 seeds" in pair.verdict


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=9), st.floats(-3, 3), st.floats(0.1, 10))
def test_the_interval_moves_and_scales_with_the_differences(differences, shift, scale):
    low, high = interval(differences, 0.05)
    moved = interval([scale * each + shift for each in differences], 0.05)
    assert moved == pytest.approx((scale * low + shift, scale * high + shift), abs=1e-6)
