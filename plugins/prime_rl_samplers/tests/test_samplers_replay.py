"""``replay``: which groups are stored, for how long, and that they are returned unchanged."""

import asyncio
import tempfile
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl import ConfigError, Rollout, Sample, SourceRequest
from prime_rl.testing import FakeHost, make_group
from prime_rl_samplers import Replay
from prime_rl_samplers.replay import ReplayConfig
from prime_rl_samplers.shelf import CREDIT, keep, restore

property_test = settings(deadline=None, derandomize=True, max_examples=60)


def replay(label="again", **config):
    made = Replay(ReplayConfig(env="fresh", **{"min_staleness": 0} | config))
    asyncio.run(made.setup(FakeHost(env=label, envs=("fresh", label))))
    return made


def group(group_id, version=0, env="fresh", rewards=(1.0, 0.0)):
    members = make_group(rewards)
    for rollout in members:
        rollout.env, rollout.group_id, rollout.policy_version = env, group_id, version
        rollout.example_id = 100 + group_id
    return members


def draw(made, version=0, group_id=1000):
    """The result of ``group``. It never waits, so no event loop is needed."""
    try:
        made.group(SourceRequest(group_id, 0, version)).send(None)
    except StopIteration as done:
        return list(done.value)
    raise AssertionError("it waited")


def drawn(made, version=0):
    """The original id of the returned group."""
    return [rollout.info["replayed"]["group_id"] for rollout in draw(made, version)][:1]


# -- what is stored ----------------------------------------------------------------------------


def test_a_group_is_returned_unchanged_with_new_labels():
    made = replay()
    original = group(5, version=2)
    original[0].info, original[0].task = {"note": [1, None]}, {"prompt": "p"}
    made.observe(original)
    came = draw(made, version=4, group_id=77)
    assert [rollout.reward for rollout in came] == [1.0, 0.0]
    for rollout, before in zip(came, original, strict=True):
        assert (rollout.env, rollout.group_id, rollout.source) == ("again", 77, "replay")
        assert (rollout.example_id, rollout.policy_version) == (105, 2)
        assert rollout.has_logprobs and not rollout.is_live
        for name in ("token_ids", "loss_mask", "inference_logprobs", "roles", "policy_versions"):
            ours, theirs = getattr(rollout.samples[0], name), getattr(before.samples[0], name)
            assert ours.dtype == theirs.dtype
            np.testing.assert_array_equal(ours, theirs)
    replayed = {"replayed": {"env": "fresh", "group_id": 5}}
    assert came[0].info == {"note": [1, None]} | replayed
    assert came[0].task == {"prompt": "p"}


def test_credit_and_later_changes_of_the_original_are_not_stored():
    made = replay()
    original = group(0)
    original[0].assign_advantages(3.0)
    original[0].assign_weights("rl", [1.0, 1.0, 1.0])
    original[0].assign_stream("values", 0.5)
    made.observe(original)
    original[0].reward = 9.0
    original[0].samples[0].token_ids[:] = 0
    original[0].freeze()
    (rollout, _) = draw(made)
    assert (rollout.reward, rollout.frozen, rollout.assigned) == (1.0, False, set())
    sample = rollout.samples[0]
    assert not any(getattr(sample, name) for name in CREDIT)
    assert sample.token_ids.tolist() == [0, 1, 2, 3, 4]
    rollout.assign_advantages(1.0)
    sample.token_ids[0] = 4  # writable, like a new sample


def test_the_reward_is_stored_as_the_env_gave_it():
    made = replay()
    original = group(0)
    for rollout in original:
        given = {"reward": rollout.reward, "rewards": {}, "metrics": {}, "info": {"a": 1}}
        rollout.given, rollout.reward, rollout.metrics = given, rollout.reward - 5, {"charged": 1.0}
    made.observe(original)
    came = draw(made)
    assert [(rollout.reward, rollout.metrics) for rollout in came] == [(1.0, {}), (0.0, {})]
    assert came[0].info["a"] == 1 and came[0].given is None


def test_two_draws_of_one_group_share_nothing():
    made = replay(max_reuse=2)
    made.observe(group(0))
    first, second = draw(made), draw(made)
    for ours, theirs in zip(first, second, strict=True):
        assert ours is not theirs
        assert not np.shares_memory(ours.samples[0].token_ids, theirs.samples[0].token_ids)


@given(
    logprobs=st.lists(st.floats(width=32, max_value=0.0, allow_nan=False), min_size=1, max_size=6),
    reward=st.floats(allow_nan=False, allow_infinity=False),
)
@property_test
def test_stored_values_are_exact(logprobs, reward):
    size = len(logprobs)
    sample = Sample(
        token_ids=range(size),
        loss_mask=[True] * size,
        inference_logprobs=logprobs,
        temperature=0.7,
        is_repeat=[False] * size,
    )
    rollout = Rollout(env="e", example_id=1, group_id=2, reward=reward, samples=[sample])
    (back,) = restore(keep([rollout]))
    assert back.reward == reward
    assert back.samples[0].inference_logprobs.tobytes() == sample.inference_logprobs.tobytes()
    assert (back.samples[0].temperature, back.samples[0].roles) == (0.7, None)
    assert back.samples[0].is_repeat.tolist() == [False] * size


def test_every_field_of_a_rollout_is_stored_except_the_listed_ones():
    values = {
        "env": "e",
        "example_id": 3,
        "group_id": 4,
        "reward": np.float64(0.1),
        "samples": [],
        "rewards": {"a": np.float32(0.5)},
        "reward_weights": {"a": np.float32(0.25)},
        "metrics": {"m": 2.0},
        "info": {"x": (1, 2), "y": np.arange(2)},
        "num_turns": 5,
        "is_truncated": True,
        "stop_condition": "length",
        "policy_version": 6,
        "episode_id": 7,
        "agent": "solver",
        "task": {"prompt": "p"},
        "messages": [{"role": "assistant", "content": "a"}],
        "tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}],
        "source": "policy",
        "has_logprobs": True,
    }
    left_out = {f.name for f in fields(Rollout) if f.init} - set(values)
    assert left_out == {"trace", "assigned", "credited", "frozen", "place", "given"}
    (back,) = restore(keep([Rollout(**values, trace=object())]))
    kept = {name: getattr(back, name) for name in values}
    plain = {"info": {"x": [1, 2], "y": [0, 1]}, "rewards": {"a": 0.5}}
    assert kept == values | plain | {"reward_weights": {"a": 0.25}}
    assert back.trace is None


def test_only_groups_of_its_env_are_stored():
    made = replay()
    assert not made.is_ready
    made.observe(group(0, env="other"))
    made.observe(group(0, env="again"))
    assert not made.is_ready and draw(made) == []
    made.observe(group(0))
    assert made.is_ready


# -- order, reuse, staleness -------------------------------------------------------------------


def test_the_order_decides_the_next_group():
    for order, expected in (("oldest", [0, 1, 2, 3]), ("newest", [3, 2, 1, 0])):
        made = replay(order=order)
        for group_id in range(4):
            made.observe(group(group_id))
        assert [drawn(made)[0] for _ in range(4)] == expected


def test_uniform_draws_are_seeded_and_reach_every_group():
    def draws(seed):
        made = replay(seed=seed, max_reuse=1000)
        for group_id in range(4):
            made.observe(group(group_id))
        return [drawn(made)[0] for _ in range(200)]

    once, again, other = draws(1), draws(1), draws(2)
    assert once == again != other
    assert all(abs(once.count(group_id) - 50) < 25 for group_id in range(4))


def test_a_group_is_returned_max_reuse_times():
    made = replay(max_reuse=2, order="oldest")
    made.observe(group(0))
    made.observe(group(1))
    assert [drawn(made) for _ in range(5)] == [[0], [0], [1], [1], []]
    assert made.metrics()["evictions/max_reuse"] == 2.0


def test_a_new_group_replaces_the_oldest():
    made = replay(capacity=2, order="oldest")
    for group_id in range(5):
        made.observe(group(group_id))
    assert made.metrics()["evictions/capacity"] == 3.0
    assert [drawn(made) for _ in range(3)] == [[3], [4], []]


def test_a_group_older_than_the_bound_is_never_returned():
    made = replay(max_staleness=2, order="oldest")
    made.observe(group(0, version=3))
    made.observe(group(1, version=4))
    assert drawn(made, version=6) == [1]  # 6 - 3 > 2
    assert made.metrics()["evictions/stale"] == 1.0


def test_groups_of_other_envs_advance_the_version():
    made = replay(max_staleness=2)
    made.observe(group(0, version=3))
    made.observe(group(9, version=6, env="other"))
    assert not made.is_ready


def test_a_group_that_arrives_stale_replaces_no_other():
    made = replay(max_staleness=1, capacity=1)
    made.observe(group(0, version=5))
    made.observe(group(1, version=3))
    assert drawn(made, version=5) == [0]


def test_a_group_waits_until_its_first_step_is_over():
    made = replay(min_staleness=2, max_staleness=3)
    made.observe(group(0, version=5))
    assert not made.is_ready and drawn(made, version=6) == []
    assert drawn(made, version=7) == [0]


def test_bounds_that_allow_no_age_are_refused():
    with pytest.raises(ValueError, match="min_staleness 3 is more than max_staleness 2"):
        ReplayConfig(env="fresh", min_staleness=3, max_staleness=2)


def test_a_group_is_as_old_as_its_oldest_rollout():
    made = replay(max_staleness=2)
    mixed = group(0, version=5)
    mixed[1].policy_version = 2
    made.observe(mixed)
    assert not made.is_ready


def test_metrics_equal_hand_computed_numbers():
    made = replay(capacity=2, max_staleness=3, order="oldest", max_reuse=5)
    for group_id, version in ((0, 1), (1, 2), (2, 4)):
        made.observe(group(group_id, version))
    drawn(made, version=4)  # group 1: staleness 2
    drawn(made, version=5)  # group 1: staleness 3
    drawn(made, version=6)  # group 1 is stale; group 2: staleness 2
    assert made.metrics() == {
        "size": 1.0,
        "drawn": 3.0,
        "evictions/capacity": 1.0,
        "evictions/stale": 1.0,
        "evictions/max_reuse": 0.0,
        "staleness/mean": pytest.approx(7 / 3),
        "staleness/max": 3.0,
    }
    assert made.metrics() == {
        "size": 1.0,
        "drawn": 0.0,
        "evictions/capacity": 0.0,
        "evictions/stale": 0.0,
        "evictions/max_reuse": 0.0,
    }


# -- properties --------------------------------------------------------------------------------

STEP = st.sampled_from(["observe", "observe", "draw", "version", "other", "metrics"])
CONFIG = st.fixed_dictionaries(
    {
        "capacity": st.integers(1, 4),
        "max_staleness": st.integers(0, 3),
        "max_reuse": st.integers(1, 3),
        "order": st.sampled_from(["uniform", "newest", "oldest"]),
        "seed": st.integers(0, 3),
    }
)


def act(made, steps, version=0, next_id=0):
    """All results of the source, with the version of each request."""
    answers = []
    for step in steps:
        if step == "observe":
            made.observe(group(next_id, version - next_id % 2 if version else 0))
            next_id += 1
        elif step == "other":
            made.observe(group(0, version, env="other"))
        elif step == "draw":
            answers.append((version, draw(made, version)))
        elif step == "metrics":
            answers.append((version, made.metrics()))
        else:
            version += 1
    return answers, version, next_id


@given(config=CONFIG, steps=st.lists(STEP, max_size=50))
@property_test
def test_the_bounds_hold_whatever_happens(config, steps):
    made = replay(**config)
    uses, version, next_id = {}, 0, 0
    for step in steps:
        answers, version, next_id = act(made, [step], version, next_id)
        assert len(made._kept) <= config["capacity"]
        for asked, answer in answers:
            if isinstance(answer, list) and answer:
                assert asked - answer[0].policy_version <= config["max_staleness"]
                original = answer[0].info["replayed"]["group_id"]
                uses[original] = uses.get(original, 0) + 1
    assert all(count <= config["max_reuse"] for count in uses.values())


def told(answers):
    return [
        (version, [(r.info, r.policy_version, r.reward) for r in a] if isinstance(a, list) else a)
        for version, a in answers
    ]


@given(config=CONFIG, before=st.lists(STEP, max_size=30), after=st.lists(STEP, max_size=30))
@property_test
def test_saving_and_loading_changes_nothing(config, before, after):
    going_on, loaded = replay(**config), replay(**config)
    _, version, next_id = act(going_on, before)
    with tempfile.TemporaryDirectory() as folder:
        going_on.save(Path(folder))
        loaded.load(Path(folder))
    rest = [*after, "metrics", "draw", "draw", "metrics"]
    ours, theirs = (act(made, rest, version, next_id)[0] for made in (loaded, going_on))
    assert told(ours) == told(theirs)


def test_draws_continue_after_a_load(tmp_path):
    going_on, loaded = replay(max_reuse=99), replay(max_reuse=99)
    for group_id in range(20):
        going_on.observe(group(group_id))
    for _ in range(7):
        drawn(going_on)
    going_on.save(tmp_path)
    loaded.load(tmp_path)
    assert [drawn(loaded) for _ in range(20)] == [drawn(going_on) for _ in range(20)]


def test_narrower_bounds_apply_to_saved_groups(tmp_path):
    wide = replay(capacity=10, max_staleness=9, max_reuse=9, order="newest")
    for group_id, version in ((0, 1), (1, 6), (2, 7), (3, 8), (4, 8)):
        wide.observe(group(group_id, version))
    for _ in range(2):
        assert drawn(wide, version=8) == [4]
    wide.save(tmp_path)
    # 0 is stale, 4 is used up, and two of the other three fit the capacity
    narrow = replay(capacity=2, max_staleness=3, max_reuse=2, order="oldest")
    narrow.load(tmp_path)
    assert [drawn(narrow, version=8) for _ in range(5)] == [[2], [2], [3], [3], []]


# -- bad input ---------------------------------------------------------------------------------


def test_an_env_cannot_replay_itself():
    with pytest.raises(ConfigError, match=r"env 'fresh': algo\.sampling\.source\.env: got the env"):
        replay(label="fresh")


@pytest.mark.parametrize(
    ("source", "has_logprobs", "got"),
    [
        ("dataset", False, "of source 'dataset' without logprobs"),
        ("frozen", True, "of source 'frozen'. "),
        ("replay", True, "of source 'replay'. "),
        ("policy", False, "of source 'policy' without logprobs"),
    ],
)
def test_groups_that_the_policy_did_not_sample_are_refused(source, has_logprobs, got):
    members = group(0)
    members[1].source, members[1].has_logprobs = source, has_logprobs
    made = replay()
    with pytest.raises(ConfigError, match=f"env 'again': .* = 'fresh': .* {got}"):
        made.observe(members)
    assert not made.is_ready


def test_an_unknown_env_is_named():
    made = Replay(ReplayConfig(env="frehs"))
    with pytest.raises(ConfigError) as caught:
        asyncio.run(made.setup(FakeHost(env="again", envs=("fresh", "again"))))
    assert str(caught.value) == (
        "env 'again': algo.sampling.source.env: the run has no training env 'frehs'; it has "
        "'fresh', 'again'"
    )


def test_the_state_of_another_env_is_refused(tmp_path):
    other = Replay(ReplayConfig(env="other"))
    other.save(tmp_path)
    with pytest.raises(ConfigError, match=r"env 'again': .* contains groups of env 'other', but"):
        replay().load(tmp_path)


@pytest.mark.parametrize("damage", [None, b"", b"\x93nonsense", b"\x81\xa3env\xa5fresh"])
def test_a_damaged_or_missing_state_is_refused(tmp_path, damage):
    if damage is not None:
        (tmp_path / "replay.msgpack").write_bytes(damage)
    with pytest.raises(ConfigError, match=r"env 'again': expected the state of its replay in"):
        replay().load(tmp_path)


def test_replay_feeds_every_component():
    assert Replay.feeds == {"rl", "ce", "ref_kl"}
