"""Reinforce-Ada: its rule in hand-worked numbers, and its expected update by two independent
computations."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl import ConfigError
from prime_rl.registry.offers import ALGORITHM, settings_of
from prime_rl.streams import trains
from prime_rl.testing import check_algorithm, make_group, members_wanted, score
from prime_rl_baselines import ReinforceAda


def ada(**table: Any) -> ReinforceAda:
    return ReinforceAda(settings_of(ReinforceAda, ALGORITHM, table, "algo"))


def size(algorithm: ReinforceAda, rewards: list[float], first: int = 2, most: int = 6) -> int:
    group = make_group(rewards)
    return members_wanted(algorithm, group, group_size=first, max_group_size=most)


def test_rounds_go_on_until_there_are_enough_of_both_sorts() -> None:
    balanced = ada(keep=2)
    assert size(balanced, [0]) == 2
    assert size(balanced, [0, 0]) == 4
    assert size(balanced, [0, 0, 1]) == 4  # the round is sampled whole
    assert size(balanced, [0, 0, 1, 1]) == 4
    assert size(balanced, [0, 0, 0, 0, 0, 0]) == 6  # the limit
    assert size(balanced, [0, 1]) == 2


def test_early_stops_the_siblings_of_a_useful_group() -> None:
    assert size(ada(keep=2, early=True), [0, 0, 1]) == 3
    assert size(ada(keep=2, early=True, positives=1, negatives=0), [1, 0]) == 1


def test_what_a_group_needs() -> None:
    assert ada(keep=5).config.needed == (2, 3)
    assert ada(keep=4, positives=1, negatives=1).config.needed == (1, 1)
    with pytest.raises(ConfigError, match="positives = 0 and negatives = 0"):
        ada(positives=0, negatives=0)


def trained(algorithm: ReinforceAda, rewards: list[float]) -> list[float | None]:
    """The advantage of each rollout; None: left out."""
    group = make_group(rewards)
    score(algorithm, group)
    return [
        float(rollout.advantages[0]) if trains(rollout.samples[0]) else None  # type: ignore[index]
        for rollout in group
    ]


def test_half_of_what_trains_is_positive_and_the_mean_is_that_of_all() -> None:
    """Mean of 1 0 0 0 0 is 0.2; of each sort, the first ones are kept."""
    assert trained(ada(keep=2), [0, 0, 0, 0, 1]) == pytest.approx([-0.2, None, None, None, 0.8])
    assert trained(ada(keep=4), [0, 0, 0, 0, 1]) == pytest.approx([-0.2, -0.2, -0.2, None, 0.8])


def test_what_is_kept_stands_for_its_sort() -> None:
    """Four zeros of which one is kept: four times -0.2."""
    pool = trained(ada(keep=2, weights="pool"), [0, 0, 0, 0, 1])
    assert pool == pytest.approx([-0.8, None, None, None, 0.8])


def test_it_trains_at_most_what_it_declares() -> None:
    for rewards in itertools.product([0.0, 1.0], repeat=5):
        algorithm = ada(keep=3)
        kept = [each for each in trained(algorithm, [*rewards]) if each is not None]
        assert len(kept) == 3 == algorithm.trains_at_most


# -- the expected update --------------------------------------------------------------------------

REPLIES = np.array([0.0, 1.0, 0.0, 1.0])
"""Rewards of the four replies of a question."""


def groups(algorithm: ReinforceAda, choices: Any, first: int, most: int) -> Any:
    """Every group that can be sampled, as indices of ``choices`` (rewards), by depth first."""
    waiting: list[tuple[int, ...]] = [()]
    while waiting:
        prefix = waiting.pop()
        group = make_group([choices[k] for k in prefix])
        if len(prefix) >= 1:
            wanted = members_wanted(algorithm, group, group_size=first, max_group_size=most)
            if wanted <= len(prefix):
                yield prefix[:wanted], group[:wanted]
                continue
        waiting += [(*prefix, k) for k in range(len(choices))]


def update(algorithm: ReinforceAda, logits: np.ndarray, first: int, most: int) -> np.ndarray:
    """The expected sum of A_i grad log pi(y_i) over what trains, for a softmax over replies."""
    p = np.exp(logits) / np.exp(logits).sum()
    scores = np.eye(len(p)) - p
    total = np.zeros(len(p))
    probability = 0.0
    for replies, group in groups(algorithm, REPLIES, first, most):
        score(algorithm, group)
        chance = float(np.prod(p[[*replies]]))
        probability += chance
        for k, rollout in zip(replies, group, strict=True):
            if trains(rollout.samples[0]):
                total += chance * float(rollout.advantages[0]) * scores[k]
    assert probability == pytest.approx(1.0)
    return total


def rate(algorithm: ReinforceAda, p: float, first: int, most: int) -> float:
    """g(p) of the module's docstring, over sequences of zeros and ones: NumPy alone, with the rule
    and the credit written out once more."""
    needed_ones, needed_zeros = algorithm.config.needed
    keep = algorithm.config.keep
    total = 0.0
    for draw in itertools.product([0, 1], repeat=most):
        end = first
        for end in range(1 if algorithm.config.early else first, most + 1):
            checked = algorithm.config.early or end % first == 0
            ones = sum(draw[:end])
            if checked and ones >= needed_ones and end - ones >= needed_zeros:
                break
        ones = sum(draw[:end])
        zeros = end - ones
        kept_ones = min(ones, keep // 2)
        kept_zeros = min(zeros, keep - kept_ones)
        kept_ones = min(ones, keep - kept_zeros)
        if algorithm.config.weights == "pool":
            kept_ones, kept_zeros = (ones if kept_ones else 0), (zeros if kept_zeros else 0)
        mean = ones / end
        chance = p ** sum(draw) * (1 - p) ** (most - sum(draw))
        total += chance * (kept_ones * (1 - mean) / p + kept_zeros * mean / (1 - p))
    return total


@pytest.mark.parametrize(
    "table",
    [
        {"keep": 2},
        {"keep": 2, "weights": "pool"},
        {"keep": 3, "early": True},
        {"keep": 2, "positives": 1, "negatives": 0, "early": True, "weights": "pool"},
    ],
)
def test_every_question_climbs_its_own_chance_of_a_reward(table: dict[str, Any]) -> None:
    """All groups of four replies, with the plugin's rule and credit, against g(p) grad p."""
    algorithm = ada(**table)
    logits = np.array([0.3, -1.0, 0.0, -0.4])
    p = np.exp(logits) / np.exp(logits).sum()
    chance = float(p @ REPLIES)
    gradient = p * (REPLIES - chance)
    expected = rate(algorithm, chance, 2, 4) * gradient
    assert update(algorithm, logits, 2, 4) == pytest.approx(expected, abs=1e-6)


def test_all_of_a_group_of_fixed_size_is_grpo() -> None:
    """Without growth and with all kept, g is G - 1, that of the reward minus the group's mean."""
    for p in (0.1, 0.5, 0.8):
        assert rate(ada(keep=4), p, 4, 4) == pytest.approx(3.0)


@given(st.floats(0.02, 0.98))
@settings(deadline=None, max_examples=20)
def test_hard_questions_get_larger_steps_than_under_a_fixed_size(p: float) -> None:
    """Stop at the first one, keep it and one zero: the group of k has k - 1 zeros, then a one.

    g = sum over k of (1-p)^(k-1) p [ (1 - 1/k) / p + (1/k) / (1-p) ] for k > 1, up to M = 6.
    """
    most = 6
    closed = sum(
        (1 - p) ** (k - 1) * p * ((1 - 1 / k) / p + (1 / k) / (1 - p)) for k in range(2, most + 1)
    )
    algorithm = ada(keep=2, positives=1, negatives=0, early=True)
    assert rate(algorithm, p, 1, most) == pytest.approx(closed)


def test_it_passes_the_conformance_checks() -> None:
    report = check_algorithm(ada())
    assert report.ok, report


def test_several_agents_are_refused() -> None:
    ada().check_agents("e", ("agent",))
    with pytest.raises(ConfigError, match="one agent, and the env has a, b"):
        ada().check_agents("e", ("a", "b"))
