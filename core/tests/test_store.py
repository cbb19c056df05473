"""Rollouts on disk: every float as it was, no pickle, whole or not at all."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl import Rollout, Sample
from prime_rl.orchestrator.store import read_rollouts, write_rollouts
from prime_rl.rollout import STREAMS

COLUMNS = ("token_ids", "loss_mask", "inference_logprobs", "roles", "is_content",
           "policy_versions", *STREAMS)  # fmt: skip


def back(tmp_path, *rollouts, dropped=None, step=3):
    path = tmp_path / "rollouts" / "step_3.msgpack"
    write_rollouts(path, step, rollouts, dropped or {})
    assert [entry.name for entry in path.parent.iterdir()] == ["step_3.msgpack"]
    return read_rollouts(path)


def full():
    third = np.float32(1) / np.float32(3)
    sample = Sample(
        token_ids=[1, 2], loss_mask=[0, 1], inference_logprobs=[0, -third], temperature=0.7,
        roles=[1, 2], is_content=[1, 0], policy_versions=[-1, 4],
        **{name: [0.0, third * index] for index, name in enumerate(STREAMS)},
    )  # fmt: skip
    return Rollout(
        env="e", example_id=1, group_id=2, reward=0.1 + 0.2, samples=[sample], num_turns=2,
        rewards={"a": 1 / 3}, metrics={"m": 2.0}, info={"k": [1, {"x": None}]}, is_truncated=True,
        stop_condition="max_turns", policy_version=4,
    )  # fmt: skip


def test_everything_comes_back(tmp_path):
    rollout = full()
    step, (again,), reasons = back(tmp_path, rollout)
    assert step == 3 and reasons == [None]
    for name in ("env", "example_id", "group_id", "reward", "rewards", "metrics", "info",
                 "num_turns", "is_truncated", "stop_condition", "policy_version"):  # fmt: skip
        assert getattr(again, name) == getattr(rollout, name), name
    assert again.samples[0].temperature == 0.7
    for name in COLUMNS:
        before, after = getattr(rollout.samples[0], name), getattr(again.samples[0], name)
        assert before.dtype == after.dtype
        np.testing.assert_array_equal(before, after)


def test_absent_columns_stay_absent(tmp_path):
    plain = Rollout(
        env="e", example_id=0, group_id=0, reward=0.0,
        samples=[Sample(token_ids=[1], loss_mask=[1], inference_logprobs=[-1.0])],
    )  # fmt: skip
    _, (again,), _ = back(tmp_path, plain)
    assert all(getattr(again.samples[0], name) is None for name in COLUMNS[3:])


def test_why_each_was_dropped(tmp_path):
    kept, dropped = full(), full()
    _, _, reasons = back(tmp_path, kept, dropped, dropped={id(dropped): "stale"})
    assert reasons == [None, "stale"]


def test_numbers_of_numpy_stay_numbers(tmp_path):
    rollout = full()
    rollout.reward = np.float32(0.1)
    rollout.metrics = {"a": np.float32(0.25), "b": np.int64(3)}
    rollout.info = {"array": np.array([1.5, 2.5]), "flag": np.bool_(True), "object": {1}}
    _, (again,), _ = back(tmp_path, rollout)
    assert again.reward == float(np.float32(0.1))
    assert again.metrics == {"a": 0.25, "b": 3}
    assert again.info["array"] == [1.5, 2.5] and again.info["flag"] is True


def test_what_msgpack_cannot_hold_is_kept_as_text(tmp_path):
    class Thing:
        def __str__(self):
            return "a thing"

    rollout = full()
    rollout.info = {"thing": Thing()}
    assert back(tmp_path, rollout)[1][0].info == {"thing": "a thing"}


def test_a_second_write_replaces_the_first(tmp_path):
    back(tmp_path, full(), full())
    assert len(back(tmp_path, full())[1]) == 1


@given(st.lists(st.floats(width=32, allow_nan=True), min_size=1, max_size=9), st.floats())
def test_floats_are_exact_bit_for_bit(tmp_path_factory, logprobs, reward):
    column = np.array(logprobs, np.float32)
    sample = Sample(
        token_ids=np.arange(len(column)), loss_mask=column > 0, inference_logprobs=column
    )
    rollout = Rollout(env="e", example_id=0, group_id=0, reward=reward, samples=[sample])
    _, (again,), _ = back(tmp_path_factory.mktemp("store"), rollout)
    assert again.samples[0].inference_logprobs.tobytes() == column.tobytes()
    assert again.reward == reward or (math.isnan(again.reward) and math.isnan(reward))


def test_a_file_cut_short_is_an_error(tmp_path):
    back(tmp_path, full())
    path = tmp_path / "rollouts" / "step_3.msgpack"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(Exception, match="truncated"):
        read_rollouts(path)
