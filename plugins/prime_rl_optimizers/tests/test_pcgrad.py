"""PCGrad's weights: worked out for small cases, and against the paper's algorithm on vectors."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl import AdamWConfig
from prime_rl_optimizers.makers import PCGradMaker
from prime_rl_optimizers.pcgrad import weights_of


def test_two_gradients_that_conflict_lose_what_they_undo():
    """g1 = (1, 0), g2 = (-1, 1): h1 = g1 + g2 / 2 = (1/2, 1/2), h2 = g2 + g1 = (0, 1). The sum is
    2 g1 + 3/2 g2 = (1/2, 3/2)."""
    vectors = np.array([[1.0, 0.0], [-1.0, 1.0]])
    weights = weights_of(vectors @ vectors.T, 1)
    assert weights == [2.0, 1.5]
    assert (weights @ vectors).tolist() == [0.5, 1.5]


def test_gradients_that_agree_are_added():
    assert weights_of(np.array([[1.0, 0.5], [0.5, 4.0]]), 7) == [1.0, 1.0]


def test_an_env_without_gradient_changes_nothing():
    assert weights_of(np.array([[1.0, 0.0], [0.0, 0.0]]), 1) == [1.0, 1.0]


@given(
    st.integers(1, 5).flatmap(
        lambda n: st.lists(
            st.lists(st.integers(-4, 4), min_size=6, max_size=6), min_size=n, max_size=n
        )
    ),
    st.integers(1, 50),
)
def test_the_sum_is_that_of_the_papers_algorithm(rows, step):
    vectors = np.array(rows, np.float64)
    order = np.random.default_rng(step)
    expected = np.zeros(6)
    for env in range(len(vectors)):
        mine = vectors[env].copy()
        for other in order.permutation(len(vectors)):
            if other != env and mine @ vectors[other] < -1e-9:
                mine -= mine @ vectors[other] / (vectors[other] @ vectors[other]) * vectors[other]
        expected += mine
    found = np.array(weights_of(vectors @ vectors.T, step)) @ vectors
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize(("before", "may"), [("adamw", True), ("pcgrad", True), ("sgd", False)])
def test_it_goes_on_with_the_moments_of_adamw(before, may):
    assert PCGradMaker(AdamWConfig()).resumes({"type": before}) is may
