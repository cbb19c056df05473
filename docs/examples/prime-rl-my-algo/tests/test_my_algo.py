"""Credit worked out manually, and the conformance checks."""

import pytest
from prime_rl.testing import check_algorithm, make_group, score
from pydantic import ValidationError

from prime_rl_my_algo import MyAlgo, MyAlgoConfig, register_algorithms


def credit(rewards, **settings):
    group = make_group(rewards)
    score(MyAlgo(MyAlgoConfig(**settings)), group)
    return [float(rollout.advantages[0]) for rollout in group]


def test_the_baseline_is_the_mean_of_the_others():
    assert credit([1.0, 0.0, 0.0]) == [1.0, -0.5, -0.5]


def test_the_credit_is_on_every_sampled_token_and_on_no_other():
    group = make_group([1.0, 0.0], prompt=2, completion=3)
    score(MyAlgo(MyAlgoConfig()), group)
    assert group[0].samples[0].advantages.tolist() == [0, 0, 1, 1, 1]


def test_a_lone_rollout_gets_zero():
    assert credit([0.7]) == [0.0]


def test_a_limit_clips_in_both_directions():
    assert credit([1.0, 0.0], limit=0.25) == [0.25, -0.25]


def test_a_negative_limit_is_refused():
    with pytest.raises(ValidationError, match="greater than 0"):
        MyAlgoConfig(limit=-1.0)


def test_it_is_offered():
    assert register_algorithms() == [MyAlgo]


@pytest.mark.parametrize("limit", [None, 0.5])
def test_it_passes_the_conformance_checks(limit):
    check_algorithm(MyAlgo(MyAlgoConfig(limit=limit)))
