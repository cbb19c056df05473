"""Batches keep their size whatever is dropped; every rollout is decided on exactly once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl import Filter, PluginConfig, RunError, hookimpl
from prime_rl.orchestrator.batch_size import BatchSize
from prime_rl.orchestrator.buffer import Buffer, FilterSlot
from prime_rl.registry.manager import Hooks
from prime_rl.testing import make_rollout


class Reject(Filter):
    name = "reject"

    def __init__(self, reward):
        super().__init__(PluginConfig())
        self.reward = reward

    @hookimpl
    def filter_rollout(self, rollout):
        return "no" if rollout.reward == self.reward else None


PRE, POST, FINE = 1.0, 2.0, 3.0


def assembler(size=2, patience=10, lag=8, first_step=1, whole_groups=False):
    return Buffer(
        batch_size=size,
        max_off_policy_steps=lag,
        pre=FilterSlot("pre_batch_filters", Hooks(), [(Reject(PRE), True)]),
        post=FilterSlot("post_batch_filters", Hooks(), [(Reject(POST), True)]),
        max_empty_batches=patience,
        first_step=first_step,
        whole_groups=whole_groups,
    )


def rollouts(*rewards, version=0, group_id=0):
    made = [make_rollout(reward, group_id=group_id) for reward in rewards]
    for rollout in made:
        rollout.policy_version = version
    return made


def test_a_batch_is_filled_first_in_first_out():
    one, group = assembler(size=2), rollouts(FINE, FINE, FINE)
    one.add(group)
    assert one.is_full and one.num_buffered == 3
    batch = one.take()
    assert batch.step == 1 and batch.kept == group[:2]
    assert not one.is_full and one.num_buffered == 1 and one.batch.step == 2


def test_dropped_rollouts_are_replaced():
    one = assembler(size=2)
    one.add(rollouts(PRE, POST, FINE))
    assert not one.is_full and one.num_buffered == 1
    late = rollouts(FINE)
    one.add(late)
    batch = one.take()
    assert len(batch.kept) == 2 and batch.kept[1] is late[0]
    assert sorted(batch.dropped.values()) == ["post_batch_filters", "pre_batch_filters"]
    assert list(batch.objections.values()) == [{"reject": "no"}] * 2


class Says(Filter):
    """Objects with a text of the rollout's own."""

    def __init__(self, name, threshold):
        super().__init__(PluginConfig())
        self.name = name
        self.threshold = threshold

    @hookimpl
    def filter_rollout(self, rollout):
        return f"{rollout.reward} < {self.threshold}" if rollout.reward < self.threshold else None


def test_each_enforcing_filter_that_dropped_a_rollout_is_kept_with_its_reason():
    filters = [(Says("low", 1.0), True), (Says("lower", 0.5), True), (Says("watched", 9.0), False)]
    one = Buffer(
        batch_size=1,
        max_off_policy_steps=8,
        pre=FilterSlot("pre_batch_filters", Hooks(), filters),
        post=FilterSlot("post_batch_filters", Hooks(), []),
        max_empty_batches=9,
    )
    both, low, fine = group = rollouts(0.25, 0.75, 2.0)
    one.add(group)
    batch = one.take()
    assert batch.kept == [fine]
    assert batch.dropped == dict.fromkeys((id(both), id(low)), "pre_batch_filters")
    assert batch.objections == {
        id(both): {"low": "0.25 < 1.0", "lower": "0.25 < 0.5"},
        id(low): {"low": "0.75 < 1.0"},
    }


def test_another_buffer_goes_on_with_the_reasons():
    one = assembler(size=2)
    one.add(rollouts(PRE, FINE, POST))
    again = assembler(size=2)
    again.restore(one.buffered, objections=one.batch.objections)
    assert again.batch.objections == one.batch.objections and len(again.batch.objections) == 2


def test_pre_batch_filters_run_on_arrival_and_post_batch_filters_when_there_is_room():
    one = assembler(size=1)
    one.add(rollouts(FINE, PRE, POST, FINE))
    metrics = one.take_metrics()
    assert metrics["filters/pre_batch_filters/dropped"] == 1 / 4
    assert metrics["filters/post_batch_filters/dropped"] == 0.0
    one.take()
    assert one.is_full
    assert one.take_metrics()["filters/post_batch_filters/dropped"] == 1 / 2


def test_a_batch_is_in_dispatch_order_whatever_order_groups_arrive_in():
    one = assembler(size=4)
    for group_id in (2, 0):
        one.add(rollouts(FINE, FINE, group_id=group_id))
    assert [rollout.group_id for rollout in one.take().kept] == [0, 0, 2, 2]


@pytest.mark.parametrize(("lag", "kept"), [(0, [3]), (1, [2, 3]), (8, [0, 1, 2, 3])])
def test_staleness_is_the_trained_version_less_the_starting_one(lag, kept):
    one = assembler(size=4, lag=lag, first_step=4)  # batch 4 trains version 3
    group = [rollouts(FINE, version=version)[0] for version in (0, 1, 2, 3)]
    assert [one.staleness(rollout) for rollout in group] == [3, 2, 1, 0]
    one.add(group)
    assert [rollout.policy_version for rollout in one.batch.kept] == kept
    assert list(one.batch.dropped.values()) == ["stale"] * (4 - len(kept))
    assert one.batch.objections == {}


def test_time_in_the_queue_counts_as_staleness():
    one = assembler(size=1, lag=0)
    one.add(rollouts(FINE, FINE))
    one.take()
    assert one.num_buffered == 0 and list(one.batch.dropped.values()) == ["stale"]


def test_a_stale_rollout_is_not_shown_to_the_filters():
    one = assembler(size=1, lag=0, first_step=2)
    one.add(rollouts(POST))
    assert list(one.batch.dropped.values()) == ["stale"]


def test_a_rollout_counts_for_the_batch_that_decides_on_it():
    one, group = assembler(size=1, lag=8), rollouts(FINE, POST, FINE, FINE)
    one.add(group)
    assert one.take().seen == group[:1]
    second = one.take()
    assert second.seen == group[1:3] and second.dropped == {id(group[1]): "post_batch_filters"}
    assert one.take().seen == group[3:]


def test_a_run_that_trains_nothing_stops_with_the_reasons():
    one = assembler(size=2, patience=2)
    one.add(rollouts(POST, POST))
    one.note_failed(1, "test")
    with pytest.raises(RunError) as caught:
        one.add(rollouts(POST))
    assert str(caught.value) == (
        "step 1: the last 4 rollouts left nothing to train (3 x post_batch_filters: reject, "
        "env 'test'; 1 x failed, env 'test'). A filter that drops every "
        "rollout often means that the rewards in each group are equal: the task is too easy or too "
        "hard for the policy. orchestrator.max_empty_batches sets the patience."
    )


def test_a_group_that_the_sampler_rejects_takes_no_place():
    one = assembler(size=1, patience=2)
    one.add(rollouts(FINE), rejected="every reward is 1.0")
    assert list(one.batch.dropped.values()) == ["sampler"] and one.num_buffered == 0
    assert list(one.batch.objections.values()) == [{"sampler": "every reward is 1.0"}]
    with pytest.raises(RunError, match=r"2 x sampler: every reward is 1.0, env 'test'"):
        one.add(rollouts(FINE), rejected="every reward is 1.0")


def test_a_rollout_of_a_frozen_model_never_grows_stale():
    one, (live, frozen) = assembler(size=1, lag=0, first_step=5), rollouts(FINE, FINE)
    frozen.source = "frozen"
    one.add([live, frozen])
    assert one.batch.kept == [frozen] and one.batch.dropped == {id(live): "stale"}


def test_a_run_of_failures_stops_too():
    one = assembler(size=2, patience=1)
    one.note_failed(1, "test")
    with pytest.raises(RunError, match=r"left nothing to train \(2 x failed, env 'test'\)"):
        one.note_failed(1, "test")


def test_a_run_of_failures_quotes_the_commonest_reason():
    one = assembler(size=4, patience=1)
    one.note_failure("TypeError: no")
    for number in range(3):
        one.note_failure(f"ModuleNotFoundError: no module\n'mine', example {number}")
    with pytest.raises(RunError) as caught:
        one.note_failed(4, "test")
    said = str(caught.value)
    assert "3 failed with: ModuleNotFoundError: no module 'mine', example 2. Each failure" in said
    assert "TypeError" not in said


def test_a_run_whose_prompts_are_too_long_is_told_to_raise_seq_len():
    one = assembler(size=4, patience=1)
    for _ in range(3):
        one.note_failure("ProviderError: Prompt length (11) exceeds maximum context length (8).")
    with pytest.raises(RunError, match=r"context length \(8\)\. Raise seq_len, or leave out"):
        one.note_failed(4, "test")


def test_reasons_of_failures_before_a_kept_rollout_are_not_quoted():
    one = assembler(size=2, patience=1)
    one.note_failure("TypeError: no")
    one.note_failed(1, "test")
    one.add(rollouts(FINE))
    one.note_failure("ValueError: " + "x" * 1000)
    with pytest.raises(RunError) as caught:
        one.note_failed(2, "test")
    assert "1 failed with: ValueError: xxx" in str(caught.value)
    assert "TypeError" not in str(caught.value) and len(str(caught.value)) < 900


def test_one_kept_rollout_renews_the_patience():
    one = assembler(size=2, patience=2)
    one.add(rollouts(POST, POST, POST, FINE, POST, POST, POST))
    counted = r"the last 4 rollouts .*\(3 x post_batch_filters: .*; 1 x pre_batch_filters"
    with pytest.raises(RunError, match=counted):
        one.add(rollouts(PRE))


def test_where_a_batch_counts_tokens_a_failed_rollout_counts_with_those_that_are_expected():
    """Two batches of 100 tokens: three failures of 64 are 192 of them, and four are 256."""
    one = Buffer(
        size=BatchSize(None, tokens=100, longest=64),
        max_off_policy_steps=8,
        pre=FilterSlot("pre_batch_filters", Hooks(), []),
        post=FilterSlot("post_batch_filters", Hooks(), []),
        max_empty_batches=2,
    )
    one.note_failed(3, "test")
    with pytest.raises(RunError, match=r"the last 4 rollouts .*\(4 x failed, env 'test'\)"):
        one.note_failed(1, "test")


@given(
    st.lists(st.lists(st.sampled_from([PRE, POST, FINE]), min_size=1, max_size=4), max_size=20),
    st.integers(1, 5),
    st.integers(0, 3),
)
def test_every_rollout_is_decided_on_exactly_once_and_batches_are_full(groups, size, lag):
    one, added, batches = assembler(size=size, patience=1000, lag=lag), [], []
    for number, rewards in enumerate(groups):
        group = rollouts(*rewards, version=one.batch.step - 1, group_id=number)
        added += group
        one.add(group)
        while one.is_full:
            batches.append(one.take())
    assert all(len(batch.kept) == size for batch in batches)
    for batch in [*batches, one.batch]:
        kept, dropped = {id(r) for r in batch.kept}, set(batch.dropped)
        assert kept | dropped == {id(r) for r in batch.seen} and not kept & dropped
        assert len(batch.seen) == len(kept) + len(dropped)
        assert all(batch.step - 1 - rollout.policy_version <= lag for rollout in batch.kept)
        assert all(rollout.reward == FINE for rollout in batch.kept)
    decided = [id(r) for batch in [*batches, one.batch] for r in batch.seen]
    assert len(decided) == len(set(decided)) == len(added) - len(one._pending)
    assert not one._pending or one.is_full


def groups_of(batch):
    return [rollout.group_id for rollout in batch.kept]


def test_a_batch_of_whole_groups_leaves_out_the_group_that_has_no_room():
    one = assembler(size=4, whole_groups=True)
    one.add(rollouts(FINE, POST, FINE, group_id=0))
    assert not one.is_full
    one.add(rollouts(FINE, FINE, FINE, group_id=1))
    assert one.is_full and groups_of(one.take()) == [0, 0]
    assert not one.is_full
    one.add(rollouts(FINE, group_id=2))
    assert groups_of(one.take()) == [1, 1, 1, 2]


def test_a_group_that_is_larger_than_a_batch_is_a_batch():
    """Of an env with several agents, or from a source."""
    one = assembler(size=2, whole_groups=True)
    one.add(rollouts(FINE, FINE, POST, FINE, group_id=0) + rollouts(FINE, group_id=1))
    assert groups_of(one.take()) == [0, 0, 0]
    one.add(rollouts(FINE, FINE, FINE, group_id=2))
    assert groups_of(one.take()) == [1] and groups_of(one.take()) == [2, 2, 2]


@given(st.lists(st.lists(st.sampled_from([PRE, POST, FINE]), max_size=7), max_size=12))
def test_no_batch_splits_a_group_and_a_restored_buffer_makes_the_same_batches(groups):
    one, batches = assembler(size=4, patience=999, whole_groups=True), []
    restored, others = assembler(size=4, patience=999, whole_groups=True), []
    for number, rewards in enumerate(groups):
        group = rollouts(*rewards, group_id=number)
        for buffer, taken in ((one, batches), (restored, others)):
            buffer.add(group)
            while buffer.is_full:
                taken.append(groups_of(buffer.take()))
        again = assembler(size=4, patience=999, first_step=restored.batch.step, whole_groups=True)
        again.restore(restored.buffered)
        restored = again
    assert batches == others
    assert all(batch for batch in batches)
    for number, rewards in enumerate(groups):
        assert sum(number in batch for batch in batches) <= 1
        found = [batch.count(number) for batch in batches if number in batch]
        assert found in ([], [rewards.count(FINE)])


class NotTheBest(Filter):
    name = "not_the_best"

    @hookimpl
    def filter_rollout(self, rollout, group):
        assert any(each is rollout for each in group)
        return "not the best" if rollout.reward < max(each.reward for each in group) else None


@pytest.mark.parametrize("slot", ["pre", "post"])
def test_a_filter_sees_the_group_also_when_it_is_split_or_restored(slot):
    def buffer():
        slots = {"pre": FilterSlot("pre", Hooks(), []), "post": FilterSlot("post", Hooks(), [])}
        slots[slot] = FilterSlot(slot, Hooks(), [(NotTheBest(PluginConfig()), True)])
        return Buffer(batch_size=1, max_off_policy_steps=8, max_empty_batches=9, **slots)

    one, group, other = buffer(), rollouts(1, 3, 2), rollouts(5, 4, group_id=1)
    one.add(group)
    one.add(other)
    resumed = buffer()
    resumed.restore(one.buffered)  # what a checkpoint of this moment has
    assert [
        r.reward for each in (one, resumed) for r in (*each.take().kept, *each.take().kept)
    ] == [
        *(3, 5),
        *(3, 5),
    ]
