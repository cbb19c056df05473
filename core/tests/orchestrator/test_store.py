"""Rollouts on disk: exact floats, no pickle, atomic writes."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl import Rollout, Sample
from prime_rl.errors import RunError
from prime_rl.orchestrator.store import (
    RolloutStore,
    read_rollouts,
    read_step,
    step_files,
    write_rollouts,
)
from prime_rl.rollout import STREAMS

COLUMNS = ("token_ids", "loss_mask", "inference_logprobs", "roles", "is_content",
           "policy_versions", "node_ids", *STREAMS)  # fmt: skip


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
        node_ids=[0, 3], **{name: [0.0, third * index] for index, name in enumerate(STREAMS)},
    )  # fmt: skip
    return Rollout(
        env="e", example_id=1, group_id=2, reward=0.1 + 0.2, samples=[sample], num_turns=2,
        rewards={"a": 1 / 3}, metrics={"m": 2.0}, info={"k": [1, {"x": None}]}, is_truncated=True,
        stop_condition="max_turns", policy_version=4,
    )  # fmt: skip


def test_every_field_is_read_back(tmp_path):
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


def test_the_reason_of_each_dropped_rollout_is_saved(tmp_path):
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


def test_a_value_without_a_msgpack_type_is_saved_as_text(tmp_path):
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


def test_a_truncated_file_is_an_error(tmp_path):
    back(tmp_path, full())
    path = tmp_path / "rollouts" / "step_3.msgpack"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(Exception, match="truncated"):
        read_rollouts(path)


# -- what replaying needs ------------------------------------------------------------------------


def member(group_id, reward=0.0):
    sample = Sample(token_ids=[1, 2], loss_mask=[0, 1], inference_logprobs=[0, -1.0])
    return Rollout(env="e", example_id=0, group_id=group_id, reward=reward, samples=[sample])


def test_places_give_the_order_of_scoring(tmp_path):
    late, early = [member(0), member(0)], [member(1)]
    store = RolloutStore(tmp_path)
    store.group_scored(early)
    store.group_scored(late)
    store.write(1, [late[0], early[0], late[1]], {})
    stored = read_step(step_files(tmp_path)[1])
    places = [each.rollout.place for each in stored.rollouts]
    assert [place[1:] for place in places] == [(1, 0, 2), (0, 0, 1), (1, 1, 2)]
    assert len({place[0] for place in places}) == 1


def test_siblings_that_wait_for_a_batch_are_saved_apart(tmp_path):
    group = [member(7, 0.25), member(7, 0.75)]
    store = RolloutStore(tmp_path)
    store.group_scored(group)
    store.group_scored([member(8)])
    store.write(1, group[:1], {})
    store.write(2, group[1:], {})
    first, second = (read_step(path) for path in step_files(tmp_path).values())
    assert [each.rollout.reward for each in first.rollouts] == [0.25]
    assert [(w.rollout.reward, w.rollout.place[1:]) for w in first.waiting] == [(0.75, (0, 1, 2))]
    assert [each.rollout.reward for each in second.rollouts] == [0.75] and second.waiting == []
    assert len(read_rollouts(step_files(tmp_path)[1])[1]) == 1


def test_places_of_a_later_attempt_come_after_those_of_an_earlier_one(tmp_path):
    """What was scored before and waited in a checkpoint keeps its place."""
    before, after = [member(0), member(0)], [member(1)]
    RolloutStore(tmp_path).group_scored(before)
    write_rollouts(tmp_path / "buffered.msgpack", 1, before, {})
    _, restored, _ = read_rollouts(tmp_path / "buffered.msgpack")
    store = RolloutStore(tmp_path)
    store.group_scored(after)
    store.write(2, [*after, *restored], {})
    places = [each.rollout.place for each in read_step(step_files(tmp_path)[2]).rollouts]
    assert sorted(places) == [places[1], places[2], places[0]]
    assert places[1:] == [rollout.place for rollout in before]


def test_kept_rollouts_are_in_the_order_of_packing(tmp_path):
    third, first, dropped, second = (member(g, g / 10) for g in (3, 1, 0, 1))
    store = RolloutStore(tmp_path)
    store.write(1, [third, first, dropped, second], {id(dropped): "stale"})
    kept = read_step(step_files(tmp_path)[1]).kept
    assert [rollout.group_id for rollout in kept] == [1, 1, 3]


def test_the_digests_of_frames_are_saved(tmp_path):
    RolloutStore(tmp_path).write(1, [], {}, [b"abc"])
    (frame,) = read_step(step_files(tmp_path)[1]).frames
    assert frame.num_bytes == 3
    assert frame.sha256 == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_step_files_are_in_order_without_other_files(tmp_path):
    store = RolloutStore(tmp_path)
    for step in (10, 9):
        store.write(step, [], {})
    (tmp_path / "rollouts" / "step_x.msgpack").touch()
    assert list(step_files(tmp_path)) == [9, 10]


def test_another_kind_of_file_is_refused_by_name(tmp_path):
    path = tmp_path / "other.msgpack"
    path.write_bytes(b"\x81\xa1a\x01")
    with pytest.raises(RunError, match=r"other.msgpack: not a file of rollouts"):
        read_step(path)
