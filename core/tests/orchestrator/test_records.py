"""Rollouts on disk: exact floats, no pickle."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl import Rollout, Sample
from prime_rl.errors import RunError
from prime_rl.orchestrator.records import decode_rollouts, encode_rollouts
from prime_rl.streams import STREAMS

COLUMNS = ("token_ids", "loss_mask", "inference_logprobs", "roles", "is_content",
           "policy_versions", "node_ids", *STREAMS)  # fmt: skip


def back(folder, *rollouts, dropped=None):
    """The rollouts as they come back, and the reasons."""
    path = folder / "rollouts.msgpack"
    path.write_bytes(
        encode_rollouts(3, [(each, (dropped or {}).get(id(each))) for each in rollouts])
    )
    found = decode_rollouts(path)
    assert found["step"] == 3 and found["waiting"] == found["frames"] == []
    stored = found["rollouts"]
    return [each.rollout for each in stored], [each.dropped_by for each in stored]


def test_what_each_filter_said_comes_back_with_the_rollout_that_it_dropped(tmp_path):
    low, fine = full(), full()
    said = {"low": "0.25 < 1.0", "lower": "0.25 < 0.5"}
    content = encode_rollouts(
        3, [(low, "pre_batch_filters"), (fine, None)], objections={id(low): said}
    )
    (tmp_path / "file").write_bytes(content)
    dropped, kept = decode_rollouts(tmp_path / "file")["rollouts"]
    assert (dropped.dropped_by, dropped.objections) == ("pre_batch_filters", said)
    assert dropped.why_dropped == "low: 0.25 < 1.0; lower: 0.25 < 0.5"
    assert (kept.dropped_by, kept.objections, kept.why_dropped) == (None, {}, "")


def full():
    third = np.float32(1) / np.float32(3)
    sample = Sample(
        token_ids=[1, 2], loss_mask=[0, 1], inference_logprobs=[0, -third], temperature=0.7,
        roles=[1, 2], is_content=[1, 0], policy_versions=[-1, 4],
        node_ids=[0, 3], **{name: [0.0, third * index] for index, name in enumerate(STREAMS)},
    )  # fmt: skip
    return Rollout(
        env="e", example_id=1, group_id=2, reward=0.1 + 0.2, samples=[sample], num_turns=2,
        rewards={"a": 1 / 3}, metrics={"m": 2.0}, info={"k": [1, {"x": None}]}, is_truncated=True,
        stop_condition="max_turns", policy_version=4,
    )  # fmt: skip


def test_every_field_is_read_back(tmp_path):
    rollout = full()
    (again,), reasons = back(tmp_path, rollout)
    assert reasons == [None]
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
    (again,), _ = back(tmp_path, plain)
    assert all(getattr(again.samples[0], name) is None for name in COLUMNS[3:])


def test_the_reason_of_each_dropped_rollout_is_saved(tmp_path):
    kept, dropped = full(), full()
    _, reasons = back(tmp_path, kept, dropped, dropped={id(dropped): "stale"})
    assert reasons == [None, "stale"]


def test_numbers_of_numpy_stay_numbers(tmp_path):
    rollout = full()
    rollout.reward = np.float32(0.1)
    rollout.metrics = {"a": np.float32(0.25), "b": np.int64(3)}
    rollout.info = {"array": np.array([1.5, 2.5]), "flag": np.bool_(True), "object": {1}}
    (again,), _ = back(tmp_path, rollout)
    assert again.reward == float(np.float32(0.1))
    assert again.metrics == {"a": 0.25, "b": 3}
    assert again.info["array"] == [1.5, 2.5] and again.info["flag"] is True


def test_a_value_without_a_msgpack_type_is_saved_as_text(tmp_path):
    class Thing:
        def __str__(self):
            return "a thing"

    rollout = full()
    rollout.info = {"thing": Thing()}
    assert back(tmp_path, rollout)[0][0].info == {"thing": "a thing"}


@given(st.lists(st.floats(width=32, allow_nan=True), min_size=1, max_size=9), st.floats())
def test_floats_are_exact_bit_for_bit(tmp_path_factory, logprobs, reward):
    column = np.array(logprobs, np.float32)
    sample = Sample(
        token_ids=np.arange(len(column)), loss_mask=column > 0, inference_logprobs=column
    )
    rollout = Rollout(env="e", example_id=0, group_id=0, reward=reward, samples=[sample])
    (again,), _ = back(tmp_path_factory.mktemp("store"), rollout)
    assert again.samples[0].inference_logprobs.tobytes() == column.tobytes()
    assert again.reward == reward or (math.isnan(again.reward) and math.isnan(reward))


def test_a_truncated_file_is_an_error(tmp_path):
    back(tmp_path, full())
    path = tmp_path / "rollouts.msgpack"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(RunError, match="truncated"):
        decode_rollouts(path)


def test_another_kind_of_file_is_refused_by_name(tmp_path):
    path = tmp_path / "other.msgpack"
    path.write_bytes(b"\x81\xa1a\x01")
    with pytest.raises(RunError, match=r"other.msgpack: not a file of rollouts"):
        decode_rollouts(path)
