"""The standard sampler: examples in order, envs by their ratio, the same for the same seed."""

import json
import random
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl import ConfigError, PluginConfig, SampledEnv
from prime_rl_samplers.standard import StandardConfig, StandardSampler
from prime_rl_samplers.turns import EnvTurns


def sampler(*envs, seed=0):
    return StandardSampler(PluginConfig(), [SampledEnv(*env) for env in envs], seed)


def test_examples_in_order_starting_over():
    one = sampler(("a", 3, None))
    assert [one.next_example() for _ in range(5)] == [(0, 0), (0, 1), (0, 2), (0, 0), (0, 1)]


def test_an_endless_env_never_starts_over():
    one = sampler(("a", None, None))
    assert [one.next_example()[1] for _ in range(100)] == list(range(100))


def test_envs_by_their_ratio():
    one = sampler(("a", 5, 3.0), ("b", 5, 1.0))
    picks = [one.next_example()[0] for _ in range(4000)]
    assert picks.count(0) / 4000 == pytest.approx(0.75, abs=0.03)
    even = sampler(("a", 5, None), ("b", 5, None))
    assert [even.next_example()[0] for _ in range(4000)].count(0) / 4000 == pytest.approx(
        0.5, abs=0.03
    )


@given(st.integers(0, 2**32), st.lists(st.floats(0.05, 20.0), min_size=1, max_size=5), st.randoms())
def test_every_stretch_of_groups_has_the_ratio(seed, ratios, where):
    """Ten steps of eight groups, from anywhere: independent draws miss by ten groups and more."""
    one = sampler(*((f"env {i}", 5, ratio) for i, ratio in enumerate(ratios)), seed=seed)
    picks = [one.next_example()[0] for _ in range(200)]
    for start in (0, where.randrange(120)):
        ten_steps = picks[start : start + 80]
        for env, ratio in enumerate(ratios):
            expected = 80 * ratio / sum(ratios)
            assert abs(ten_steps.count(env) - expected) < len(ratios) + 1e-6


ENVS = st.tuples(st.floats(0.05, 20.0), st.integers(1, 32))
"""The ratio and the group size of an env."""


@given(st.integers(0, 2**32), st.lists(ENVS, min_size=1, max_size=5), st.integers(0, 2000))
def test_the_rollouts_of_every_stretch_have_the_ratio_whatever_the_group_sizes(seed, envs, start):
    """640 rollouts are ten steps of 64. An env may be ahead by a group of each env, and a border
    may cut a group."""
    known = [
        SampledEnv(f"env {i}", 5, ratio, rollouts_per_group=lambda size=size: float(size))
        for i, (ratio, size) in enumerate(envs)
    ]
    one = StandardSampler(PluginConfig(), known, seed)
    rollouts = []
    while len(rollouts) < start + 640:
        env = one.next_example()[0]
        rollouts += [env] * envs[env][1]

    ten_steps = rollouts[start : start + 640]
    total = sum(ratio for ratio, _ in envs)
    most = (len(envs) + 1) * max(size for _, size in envs)
    for env, (ratio, _) in enumerate(envs):
        assert abs(ten_steps.count(env) - 640 * ratio / total) <= 2 * most


def test_an_env_that_was_away_makes_up_for_nothing():
    """Its share counts from when it takes part: ten of the 20 groups after 100 without it."""
    turns = EnvTurns(["a", "b"])
    chance = random.Random(0)
    assert {turns.next([1.0, 0.0], chance) for _ in range(100)} == {0}
    after = [turns.next([1.0, 1.0], chance) for _ in range(20)]
    assert 9 <= after.count(1) <= 11


def test_groups_are_in_no_fixed_order():
    one = sampler(("a", 5, 1.0), ("b", 5, 1.0))
    picks = [one.next_example()[0] for _ in range(400)]
    repeats = sum(this == that for this, that in pairwise(picks))
    assert repeats > 40


def test_one_seed_one_order():
    envs = (("a", 5, None), ("b", 5, None))
    drawn = {
        seed: [sampler_.next_example() for _ in range(50)]
        for seed, sampler_ in ((s, sampler(*envs, seed=s)) for s in (0, 1))
    }
    again = sampler(*envs, seed=0)
    assert [again.next_example() for _ in range(50)] == drawn[0] != drawn[1]


def test_a_restored_sampler_continues_exactly(tmp_path):
    first, second = (sampler(("a", 3, 1.0), ("b", None, 2.0), seed=1) for _ in range(2))
    for _ in range(10):
        first.next_example()
    first.save(tmp_path)
    second.load(tmp_path)
    assert [first.next_example() for _ in range(20)] == [second.next_example() for _ in range(20)]


def test_a_file_without_credit_is_read_and_a_new_env_has_none(tmp_path):
    first = sampler(("a", 3, 1.0), ("b", 3, 2.0))
    first.next_example()
    first.save(tmp_path)
    path = tmp_path / "sampler.json"
    state = json.loads(path.read_text())
    again = sampler(("b", 3, 2.0), ("c", 3, 1.0))
    again.load(tmp_path)
    assert again._turns.state == {"b": state["credits"]["b"], "c": 0.0}

    del state["credits"]
    path.write_text(json.dumps(state))
    again.load(tmp_path)
    assert again._turns.state == {"b": 0.0, "c": 0.0}


@pytest.mark.parametrize("credit", [float("nan"), float("inf"), -1e300, "many", None, []])
def test_credit_that_no_run_has_is_refused(tmp_path, credit):
    first = sampler(("a", 3, None))
    first.save(tmp_path)
    path = tmp_path / "sampler.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"credits": {"a": credit}}))
    with pytest.raises(ConfigError, match=r"sampler\.json: not what the sampler 'standard'"):
        sampler(("a", 3, None)).load(tmp_path)


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "sampler.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"sampler\.json: not what the sampler 'standard'"):
        sampler(("a", 3, None)).load(tmp_path)


def shuffled(*envs, seed=0):
    return StandardSampler(StandardConfig(shuffle=True), [SampledEnv(*env) for env in envs], seed)


@given(st.integers(1, 12), st.integers(0, 2**32), st.integers(0, 40))
def test_a_shuffled_pass_has_every_example_once_also_after_a_restart(size, seed, stop):
    whole = shuffled(("a", size, None), seed=seed)
    expected = [whole.next_example()[1] for _ in range(4 * size + stop)]
    for first in range(0, 4 * size, size):
        assert sorted(expected[first : first + size]) == list(range(size))

    before = shuffled(("a", size, None), seed=seed)
    taken = [before.next_example()[1] for _ in range(stop)]
    with tempfile.TemporaryDirectory() as folder:
        before.save(Path(folder))
        after = shuffled(("a", size, None), seed=seed)
        after.load(Path(folder))
    assert taken + [after.next_example()[1] for _ in range(4 * size)] == expected


def test_each_pass_and_each_seed_has_an_order_of_its_own():
    one = shuffled(("a", 50, None), ("b", 50, None))
    picks = [one.next_example() for _ in range(400)]
    of_a = [example for env, example in picks if env == 0]
    of_b = [example for env, example in picks if env == 1]
    orders = {tuple(of_a[:50]), tuple(of_a[50:100]), tuple(of_b[:50])}
    other = shuffled(("a", 50, None), seed=1)
    orders.add(tuple(other.next_example()[1] for _ in range(50)))
    assert len(orders) == 4
