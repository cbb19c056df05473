"""``difficulty_pools``: sampling, retirement, rejections and metrics."""

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from prime_rl import ConfigError, PluginConfig, RunError, SampledEnv
from prime_rl.testing import make_rollout
from prime_rl_samplers import DifficultyPools
from prime_rl_samplers.pool_settings import DifficultyPoolsConfig
from prime_rl_samplers.standard import StandardSampler

property_test = settings(deadline=None, derandomize=True, max_examples=60)


def env(name="a", size=4, ratio=None, ready=True):
    return SampledEnv(
        name=name,
        num_examples=size,
        ratio=ratio,
        is_ready=lambda: ready,
        task=lambda index: {"prompt": f"{name} {index}"},
    )


def pools(*envs, seed=0, **config):
    return DifficultyPools(DifficultyPoolsConfig(**config), envs or (env(),), seed)


def group(example, rewards, name="a", source="policy"):
    members = [make_rollout(reward, env=name) for reward in rewards]
    for member in members:
        member.example_id, member.source = example, source
    return members


THRESHOLDS = {"easy_threshold": 0.75, "hard_threshold": 0.25}


# -- the next example --------------------------------------------------------------------------


@given(
    seed=st.integers(0, 99),
    ratios=st.lists(st.none() | st.floats(0.1, 5), min_size=1, max_size=4),
    sizes=st.lists(st.none() | st.integers(1, 5), min_size=4, max_size=4),
    waiting=st.sets(st.integers(1, 3)),
)
@property_test
def test_without_thresholds_it_samples_exactly_like_standard(seed, ratios, sizes, waiting):
    envs = [
        env(f"env {i}", size, ratio, ready=i not in waiting)
        for i, (ratio, size) in enumerate(zip(ratios, sizes, strict=False))
    ]
    ours, standard = pools(*envs, seed=seed), StandardSampler(PluginConfig(), envs, seed)
    assert [ours.next_example() for _ in range(40)] == [standard.next_example() for _ in range(40)]


def test_its_own_seed_replaces_the_runs():
    def draws(run_seed, **config):
        config = DifficultyPoolsConfig(**config)
        sampler = DifficultyPools(config, (env("a"), env("b")), run_seed)
        return [sampler.next_example() for _ in range(30)]

    assert draws(7) != draws(8)
    assert draws(7, seed=8) == draws(8)


def test_examples_come_in_order_without_retired_ones():
    sampler = pools(**THRESHOLDS)
    assert [sampler.next_example()[1] for _ in range(3)] == [0, 1, 2]
    sampler.observe(group(1, [1.0, 1.0]))
    sampler.observe(group(3, [0.0, 0.0]))
    assert [sampler.next_example()[1] for _ in range(4)] == [0, 2, 0, 2]


def test_with_thresholds_an_envs_share_is_its_number_of_normal_examples():
    sampler = pools(env("small", 2), env("large", 8), **THRESHOLDS)
    assert [sampler._weight(0), sampler._weight(1)] == [2.0, 8.0]
    for example in range(6):
        sampler.observe(group(example, [0.0], "large"))
    sampler.observe(group(0, [1.0], "small"))
    assert [sampler._weight(0), sampler._weight(1)] == [1.0, 2.0]
    drawn = Counter(sampler.next_example()[0] for _ in range(3000))
    assert drawn[1] / 3000 == pytest.approx(2 / 3, abs=0.03)


def test_ratios_replace_the_numbers_of_examples_and_count_one_where_unset():
    sampler = pools(env("a", 2, 3.0), env("b", 800), env("endless", None, 0.5), **THRESHOLDS)
    assert [sampler._weight(index) for index in range(3)] == [3.0, 1.0, 0.5]


def test_an_env_without_normal_examples_is_not_chosen():
    sampler = pools(env("a", 1), env("b", 1), **THRESHOLDS)
    sampler.observe(group(0, [1.0], "a"))
    assert {sampler.next_example() for _ in range(20)} == {(1, 0)}


def test_an_exhausted_env_is_logged_once(caplog):
    sampler = pools(env("a", 2), env("b", 1), **THRESHOLDS)
    for example in (0, 1, 1):
        sampler.observe(group(example, [1.0], "a"))
    assert [record.message for record in caplog.records] == [
        "env 'a' has 2 easy, 0 normal, 0 hard: it is no longer sampled"
    ]


def test_if_every_example_is_retired_the_error_has_the_pool_sizes():
    sampler = pools(env("a", 2), env("b", 1), **THRESHOLDS)
    sampler.observe(group(0, [1.0], "a"))
    sampler.observe(group(1, [0.0], "a"))
    sampler.observe(group(0, [0.1], "b"))
    with pytest.raises(RunError) as error:
        sampler.next_example()
    assert str(error.value).startswith(
        "No environments left with examples: env 'a' has 1 easy, 0 normal, 1 hard; "
        "env 'b' has 0 easy, 0 normal, 1 hard. Move the thresholds"
    )


def test_if_only_waiting_envs_are_left_the_error_names_them():
    sampler = pools(env("a", 1), env("again", None, 1.0, ready=False), **THRESHOLDS)
    sampler.observe(group(0, [1.0], "a"))
    with pytest.raises(RunError, match="env 'again' has no rollouts yet"):
        sampler.next_example()


# -- retirement --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "pool"),
    [
        ([1.0, 0.5], "easy"),  # mean 0.75: at the threshold
        ([1.0, 0.49], "normal"),
        ([0.5, 0.0], "hard"),  # mean 0.25: at the threshold
        ([0.5, 0.01], "normal"),
        ([2.0], "easy"),
        ([-1.0, 0.0, 0.0], "hard"),
    ],
)
def test_a_groups_mean_reward_decides_its_examples_pool(rewards, pool):
    sampler = pools(env(size=1), **THRESHOLDS)
    sampler.observe(group(0, rewards))
    metrics = sampler.metrics()
    assert {name: metrics[f"pool/{name}"] for name in ("easy", "normal", "hard")} == {
        "easy": 0.0,
        "normal": 0.0,
        "hard": 0.0,
    } | {pool: 1.0}


def test_a_single_threshold_fills_one_pool():
    easy_only = pools(easy_threshold=0.5)
    easy_only.observe(group(0, [0.0]))
    easy_only.observe(group(1, [0.5]))
    assert easy_only.metrics()["pool/easy"] == 0.25
    assert easy_only.metrics()["pool/hard"] == 0.0


def test_an_example_stays_in_its_first_pool():
    sampler = pools(**THRESHOLDS)
    sampler.observe(group(2, [1.0]))
    sampler.observe(group(2, [0.0]))  # in flight when the first one finished
    metrics = sampler.metrics()
    assert (metrics["pool/easy"], metrics["pool/hard"]) == (0.25, 0.0)
    assert metrics["evicted_examples/a/hard"] == 0.0


@pytest.mark.parametrize("source", ["dataset", "replay", "frozen"])
def test_groups_that_the_policy_did_not_sample_do_not_count(source):
    sampler = pools(**THRESHOLDS, online_difficulty_filtering=True)
    sampler.observe(group(0, [0.0, 0.0], source=source))
    assert sampler.reject(group(0, [0.0, 0.0], source=source)) is None
    assert sampler.metrics()["pool/normal"] == 1.0


def test_an_example_of_an_unlimited_env_is_never_retired():
    sampler = pools(env("a", 2, 1e-9), env("endless", None, 1e9), **THRESHOLDS)
    sampler.observe(group(1, [1.0], "endless"))
    metrics = sampler.metrics()
    assert "pool/endless/easy" not in metrics
    assert metrics["evicted_examples/endless/easy"] == 0.0
    assert [sampler.next_example() for _ in range(3)] == [(1, 0), (1, 1), (1, 2)]


# -- online difficulty filtering ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ([0.0, 0.0], "online difficulty filtering: too hard, the group's mean reward is 0.0"),
        ([1.0, 1.0], "online difficulty filtering: too easy, the group's mean reward is 1.0"),
        ([1.0, 0.0], None),
        ([0.0, 1e-9], None),
        ([0.1] * 10, None),
        ([1.0, 0.999999999], None),
        ([2.0, 0.0], "online difficulty filtering: too easy, the group's mean reward is 1.0"),
    ],
)
def test_a_group_whose_mean_is_exactly_zero_or_one_does_not_train(rewards, reason):
    assert pools(online_difficulty_filtering=True).reject(group(0, rewards)) == reason
    assert pools().reject(group(0, rewards)) is None


def test_filtering_alone_retires_nothing():
    sampler = pools(env(size=2), online_difficulty_filtering=True)
    sampler.observe(group(0, [0.0]))
    assert sampler.reject(group(0, [0.0]))
    assert [sampler.next_example()[1] for _ in range(3)] == [0, 1, 0]


# -- metrics -----------------------------------------------------------------------------------


def test_metrics_equal_hand_computed_numbers():
    sampler = pools(
        env("a", 4), env("b", 6), **THRESHOLDS, online_difficulty_filtering=True, seed=1
    )
    came_back = [
        group(0, [1.0, 1.0], "a"),  # evicted easy, filtered easy
        group(1, [1.0, 0.0], "a"),
        group(2, [0.0, 0.25], "a"),  # evicted hard
        group(3, [0.5, 0.5], "a"),
        group(5, [0.0, 0.0, 0.0], "b"),  # evicted hard, filtered hard; three survived
        group(4, [0.5], "b"),
    ]
    for each in came_back:
        sampler.observe(each)
        sampler.reject(each)
    assert sampler.metrics() == {
        "pool/easy": 0.1,
        "pool/normal": 0.7,
        "pool/hard": 0.2,
        "pool/a/easy": 0.25,
        "pool/a/normal": 0.5,
        "pool/a/hard": 0.25,
        "pool/b/easy": 0.0,
        "pool/b/normal": 5 / 6,
        "pool/b/hard": 1 / 6,
        "evicted_examples/a/easy": 0.25,  # of 4 groups
        "evicted_examples/a/hard": 0.25,
        "evicted_examples/b/easy": 0.0,
        "evicted_examples/b/hard": 0.5,  # of 2 groups
        "filtered_rollouts/a/easy": 0.25,  # 2 of 8 rollouts
        "filtered_rollouts/a/hard": 0.0,
        "filtered_rollouts/b/easy": 0.0,
        "filtered_rollouts/b/hard": 0.75,  # 3 of 4 rollouts
    }
    again = sampler.metrics()
    assert again["pool/easy"] == 0.1
    assert {value for name, value in again.items() if not name.startswith("pool/")} == {0.0}


REWARDS = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=3)
EVENTS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 4), REWARDS), max_size=30)


@given(events=EVENTS, seed=st.integers(0, 9))
@property_test
def test_no_example_is_lost_or_in_two_pools(events, seed):
    sampler = pools(env("a", 5), env("b", 5), seed=seed, **THRESHOLDS)
    for index, example, rewards in events:
        sampler.observe(group(example, rewards, "ab"[index]))
    for name, rotation in zip("ab", sampler._rotations, strict=True):
        easy, hard = set(rotation.in_pool("easy")), set(rotation.in_pool("hard"))
        assert not easy & hard
        judged = {e for i, e, r in events if "ab"[i] == name and not 0.25 < sum(r) / len(r) < 0.75}
        assert easy | hard == judged
    normal = [r.num_normal for r in sampler._rotations]
    if any(normal):
        # within that many draws of its env, exactly the normal examples are sampled
        drawn = [sampler.next_example() for _ in range(400)]
        for index, rotation in enumerate(sampler._rotations):
            expected = set(range(5)) - set(rotation.retired)
            assert {example for i, example in drawn if i == index} == expected


# -- settings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"easy_threshold": 0.5, "hard_threshold": 0.5}, "must exceed hard_threshold, got 0.5"),
        ({"easy_fraction": 0.5}, "easy_fraction returns examples from the easy pool"),
        ({"hard_fraction": 0.5, "easy_threshold": 1.0}, "set hard_threshold or load_from"),
        ({"hard_fraction": 1.5, "hard_threshold": 0.0}, "less than or equal to 1"),
        ({"hash_keys": []}, "at least 1 item"),
        ({"easy_treshold": 0.5}, "Extra inputs are not permitted"),
    ],
)
def test_invalid_settings_are_refused(config, message):
    with pytest.raises(ValidationError, match=message):
        DifficultyPoolsConfig(**config)


def test_pools_with_only_unlimited_envs_are_refused():
    with pytest.raises(ConfigError, match=r"unlimited examples \('a', 'b'\) and shows"):
        pools(env("a", None), env("b", None, 1.0), **THRESHOLDS)


def test_an_unlimited_env_needs_a_ratio_if_shares_are_numbers_of_examples():
    with pytest.raises(ConfigError, match=r"env 'b' has unlimited .* Set a ratio on each"):
        pools(env("a"), env("b", None), **THRESHOLDS)


def test_an_unknown_hash_key_is_refused_at_the_start():
    with pytest.raises(ConfigError, match="env 'a', example 0: got no field 'question', expected"):
        pools(**THRESHOLDS, hash_keys=["env_name", "question"])


def test_a_field_that_json_cannot_encode_is_refused_at_the_start():
    odd = SampledEnv("a", 1, None, task=lambda index: {"prompt": object()})
    with pytest.raises(ConfigError, match=r"env 'a', example 0: expected fields that JSON can"):
        pools(odd, **THRESHOLDS)


def test_the_settings_document_themselves():
    properties = DifficultyPoolsConfig.model_json_schema()["properties"]
    assert all("description" in each for each in properties.values()), json.dumps(properties)


@pytest.mark.parametrize(
    ("rewards", "kind"),
    [
        ([0.7 + 0.2 + 0.1, 1.0], "easy"),
        ([0.1 + 0.2 + 0.7, 0.7 + 0.2 + 0.1], "easy"),
        ([0.3 - 0.1 - 0.2, 0.0], "hard"),
        ([0.1, 0.2, -0.3], "hard"),
        ([1.4, 0.7, 0.9], "easy"),
    ],
)
def test_the_mean_of_weighted_sums_is_zero_or_one_up_to_rounding(rewards, kind):
    reason = pools(online_difficulty_filtering=True).reject(group(0, rewards))
    assert reason is not None and f"too {kind}" in reason


def test_a_threshold_is_met_up_to_rounding():
    """The mean of 0.9, 0.8 and 0.7 is 0.8000000000000002 or so."""
    sampler = pools(easy_threshold=0.8, hard_threshold=0.3)
    assert sampler._pool_of(sum([0.9, 0.8, 0.7]) / 3) == "easy"
    assert sampler._pool_of(0.7999999999999998) == "easy"
    assert sampler._pool_of(0.1 + 0.2) == "hard"
    assert sampler._pool_of(0.5) is None
