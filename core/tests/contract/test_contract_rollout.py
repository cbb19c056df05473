"""Streams: three ways to assign, wrong ones refused with got and expected, frozen when stamped."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl import Rollout, Sample, StreamError
from prime_rl.orchestrator.packer import pack
from prime_rl.streams import members
from prime_rl.testing import make_rollout, make_sample


def sample(mask: str) -> Sample:
    """One character per token: the policy sampled ``#``."""
    trained = [character == "#" for character in mask]
    return Sample(
        token_ids=list(range(len(mask))), loss_mask=trained, inference_logprobs=[0.0] * len(mask)
    )


def rollout(*masks: str) -> Rollout:
    return Rollout(
        env="e", example_id=0, group_id=7, reward=0.0, samples=[sample(mask) for mask in masks]
    )


def columns(one: Rollout, name: str = "advantages") -> list[list[float]]:
    return [getattr(each, name).tolist() for each in one.samples]


def test_counts():
    one = rollout("..##", ".#")
    assert (one.num_tokens, one.num_trainable_tokens, one.num_input_tokens) == (6, 3, 3)


def test_a_scalar_goes_to_every_trainable_token():
    one = rollout("..##", ".#")
    one.assign_advantages(0.5)
    assert columns(one) == [[0, 0, 0.5, 0.5], [0, 0.5]]
    assert one.advantages.tolist() == [0.5, 0.5, 0.5]
    assert one.samples[0].advantages.dtype == np.float32


def test_a_negative_scalar_leaves_plain_zeros_off_the_mask():
    one = rollout(".#")
    one.assign_advantages(-1.0)
    assert not np.signbit(one.samples[0].advantages[0])


def test_one_value_per_trainable_token_in_order():
    one = rollout("..##", "#.")
    one.assign_advantages([1.0, 2.0, 3.0])
    assert columns(one) == [[0, 0, 1, 2], [3, 0]]


def test_one_value_per_token():
    one = rollout("..##", "#.")
    one.assign_advantages(np.array([0, 0, 1, 2, 3, 0.0]))
    assert columns(one) == [[0, 0, 1, 2], [3, 0]]


def test_both_lengths_are_one_where_every_token_is_trainable():
    one = rollout("##")
    one.assign_advantages([1.0, 2.0])
    assert columns(one) == [[1, 2]]


def test_the_streams_do_not_share_memory_with_the_arguments():
    given_values = np.array([1.0, 2.0], np.float32)
    one = rollout("##")
    one.assign_advantages(given_values)
    given_values[0] = 9.0
    assert columns(one) == [[1, 2]]


@pytest.mark.parametrize(
    ("values", "shape"),
    [([1.0], "(1,)"), ([1.0] * 4, "(4,)"), ([[1.0, 2.0, 3.0]], "(1, 3)"), ([], "(0,)")],
)
def test_any_other_length_is_an_error_with_got_and_expected(values, shape):
    with pytest.raises(StreamError) as caught:
        rollout("..##", "#.").assign_advantages(values)
    assert str(caught.value) == (
        f"env 'e', group 7: advantages: got shape {shape}, expected one value per trainable token "
        "(3,) or one per token (6,)"
    )


def test_credit_off_the_mask_is_an_error():
    with pytest.raises(StreamError) as caught:
        rollout("..##").assign_advantages([0.0, 1.0, 1.0, 1.0])
    assert str(caught.value) == (
        "env 'e', group 7: advantages: got credit on 1 tokens the policy did not sample; expected "
        "0.0 there. To train env-provided tokens use the hook observation_weights."
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_credit_that_is_not_finite_is_an_error(bad):
    with pytest.raises(StreamError, match=r"env 'e', group 7: advantages: got (nan|-?inf), exp"):
        rollout(".#").assign_advantages(bad)
    with pytest.raises(StreamError, match=r"advantages: got (nan|-?inf), expected finite numbers"):
        rollout(".##").assign_advantages([1.0, bad])


def test_advantages_are_none_until_every_sample_has_them():
    one = rollout(".#", ".#")
    assert one.advantages is None
    one.samples[0].advantages = np.zeros(2, np.float32)
    assert one.advantages is None
    assert Rollout(env="e", example_id=0, group_id=0, reward=0.0, samples=[]).advantages is None


@pytest.mark.parametrize("component", ["rl", "ce", "ref_kl"])
def test_weights_of_a_component(component):
    one = rollout(".##")
    one.assign_weights(component, [0.5, 2.0])
    assert columns(one, f"{component}_weights") == [[0, 0.5, 2]]
    one.assign_weights(component, [1.0, 0.5, 2.0])  # ce may weigh env-provided tokens
    assert columns(one, f"{component}_weights") == [[1, 0.5, 2]]


def test_reference_logprobs():
    one = rollout(".##")
    one.assign_ref_logprobs([-1.0, -2.0])
    assert columns(one, "ref_logprobs") == [[0, -1, -2]]
    one.assign_ref_logprobs([-3.0, -1.0, -2.0])
    assert columns(one, "ref_logprobs") == [[-3, -1, -2]]


def test_weights_and_reference_logprobs_must_be_finite_and_aligned():
    nan = float("nan")
    for assign in (
        lambda values: rollout(".##").assign_weights("rl", values),
        lambda values: rollout(".##").assign_ref_logprobs(values),
    ):
        with pytest.raises(StreamError, match="got nan, expected finite"):
            assign([nan, 1.0])
        with pytest.raises(StreamError, match=r"got shape \(1,\), expected .*\(2,\) or .*\(3,\)"):
            assign([1.0])


def test_a_stamped_rollout_takes_no_more_credit():
    one = rollout(".#")
    one.assign_advantages(1.0)
    one.freeze()
    for assign in (
        lambda: one.assign_advantages(2.0),
        lambda: one.assign_weights("ce", [1.0]),
        lambda: one.assign_ref_logprobs([1.0]),
    ):
        with pytest.raises(StreamError, match=r"env 'e', group 7: \w+ are frozen: the rollout is"):
            assign()
    assert columns(one) == [[0, 1]]


@pytest.mark.parametrize("name", ["token_ids", "loss_mask", "inference_logprobs", "advantages"])
def test_a_stamped_column_is_read_only(name):
    one = rollout(".#")
    one.assign_advantages(1.0)
    one.freeze()
    with pytest.raises(ValueError, match="read-only"):
        getattr(one.samples[0], name)[0] = 1


@pytest.mark.parametrize(
    "name", ["loss_mask", "inference_logprobs", "roles", "is_content", "policy_versions",
             "advantages", "rl_weights", "ce_weights", "ref_kl_weights", "ref_logprobs"],
)  # fmt: skip
def test_every_column_of_a_sample_must_align(name):
    fine = {"token_ids": [1, 2], "loss_mask": [0, 1], "inference_logprobs": [0.0, -1.0]}
    with pytest.raises(StreamError) as caught:
        Sample(**(fine | {name: [0, 1, 1]}))
    assert str(caught.value) == (
        f"sample: column {name!r} must align with token_ids: got shape (3,), expected (2,)"
    )


def test_columns_are_cast_to_their_types():
    one = Sample(
        token_ids=[1], loss_mask=[1], inference_logprobs=[-1], roles=[2], is_content=[1],
        policy_versions=[3], advantages=[1], ref_logprobs=[1],
    )  # fmt: skip
    kinds = {name: getattr(one, name).dtype.str for name in ("token_ids", "loss_mask", "roles")}
    assert kinds == {"token_ids": "<i4", "loss_mask": "|b1", "roles": "|i1"}
    assert one.advantages.dtype == one.ref_logprobs.dtype == np.float32
    assert one.policy_versions.dtype == np.int32 and one.is_content.dtype == np.bool_


MASKS = st.lists(st.text("#.", min_size=1, max_size=12), min_size=1, max_size=4)


@given(MASKS, st.data())
def test_the_two_list_forms_agree(masks, data):
    compact, full = rollout(*masks), rollout(*masks)
    finite = st.floats(-8, 8, width=32)
    count = compact.num_trainable_tokens
    values = data.draw(st.lists(finite, min_size=count, max_size=count))
    spread, rest = [], iter(values)
    for character in "".join(masks):
        spread.append(next(rest) if character == "#" else 0.0)
    full.assign_advantages(spread)
    assert full.advantages.tolist() == values
    compact.assign_advantages(values)
    assert columns(compact) == columns(full)


def path(ids, nodes, sampled, repeated=0):
    """A sample whose first ``repeated`` tokens an earlier sample holds; log μ is minus the node."""
    mask = [s and place >= repeated for place, s in enumerate(sampled)]
    return Sample(
        token_ids=ids,
        loss_mask=mask,
        inference_logprobs=[-float(node) * own for node, own in zip(nodes, mask, strict=True)],
        is_repeat=[place < repeated for place in range(len(ids))],
        node_ids=nodes,
    )


def test_a_path_has_what_was_sampled_before_its_fork():
    one = rollout()
    one.samples = [
        path([9, 5, 6], [0, 1, 1], [False, True, True]),
        path([9, 5, 6, 8, 7], [0, 1, 1, 2, 3], [False, True, True, False, True], repeated=3),
    ]
    assert list(one.shared_prefixes) == [(1, 0, 3)]
    masks, logprobs = zip(*one.sampled_paths, strict=True)
    assert [mask.tolist() for mask in masks] == [
        [False, True, True],
        [False, True, True, False, True],
    ]
    assert [column.tolist() for column in logprobs] == [[0, -1, -1], [0, -1, -1, 0, -3]]
    assert not one.samples[1].loss_mask[:3].any()  # the samples stay as they are


def test_nodes_distinguish_siblings_with_the_same_tokens():
    """Node 2 says what node 1 says; the third sample goes on from node 2."""
    sampled = [False, True, True]
    one = rollout()
    one.samples = [
        path([9, 5, 5], [0, 1, 1], sampled),
        path([9, 5, 5], [0, 2, 2], sampled, repeated=1),
        path([9, 5, 5, 7], [0, 2, 2, 3], [*sampled, True], repeated=3),
    ]
    assert list(one.shared_prefixes) == [(1, 0, 1), (2, 1, 3)]
    assert one.sampled_paths[2][1].tolist() == [0, -2, -2, -3]


def test_without_nodes_a_prefix_is_found_by_its_tokens():
    one = rollout("..#", "...#")
    one.samples[1].is_repeat = np.array([True, True, True, False])
    assert list(one.shared_prefixes) == [(1, 0, 3)]
    assert one.sampled_paths[1][0].tolist() == [False, False, True, True]


def test_a_rollout_without_samples_takes_any_credit():
    empty = Rollout(env="e", example_id=0, group_id=7, reward=0.0, samples=[])
    empty.assign_advantages(1.0)
    empty.assign_advantages([])
    assert empty.samples == [] and empty.advantages is None


def test_weights_are_one_number_per_token_and_a_stream_has_at_least_one():
    one = rollout("..##")
    with pytest.raises(StreamError, match=r"ce_weights: got shape \(2, 2\), expected one value"):
        one.assign_weights("ce", [[1.0, 2.0], [3.0, 4.0]])
    with pytest.raises(StreamError, match=r"top: got shape \(2, 0\), expected one value"):
        one.assign_stream("top", np.zeros((2, 0)))


def test_a_rollout_is_cut_with_the_samples_that_have_something_to_train():
    """Prompts of two and three tokens; the second sample's first sampled token is its fourth."""
    rollout = make_rollout(completion=4)
    rollout.samples.append(make_sample(prompt=3, completion=1))
    assert rollout.cut(6) == 0 and not rollout.is_truncated
    assert rollout.cut(3) == 2 and rollout.is_truncated
    assert [sample.loss_mask.tolist() for sample in rollout.samples] == [[False, False, True]]


def test_the_first_token_of_a_sequence_is_no_member():
    """Nothing predicts it: it would only stand in the divisors."""
    sample = Sample(
        token_ids=[1, 2, 3],
        loss_mask=[True, True, False],
        inference_logprobs=[-1, -1, 0],
        ce_weights=[1, 0, 1],
    )
    assert members(sample, "rl").tolist() == [False, True, False]
    assert members(sample, "ce").tolist() == [False, False, True]
    row, *_ = pack([sample, sample], ["a", "a"], 10)
    assert members(row, "rl").tolist() == [False, True, False] * 2
    assert members(row, "ce").tolist() == [False, False, True] * 2
    assert sample.loss_mask.tolist() == [True, True, False]


def test_a_rollout_of_one_token_without_a_prompt_has_no_member():
    sample = Sample(token_ids=[1], loss_mask=[True], inference_logprobs=[-1])
    rollout = Rollout(env="e", example_id=0, group_id=0, reward=1.0, samples=[sample])
    assert not rollout.has_members


def test_what_the_turns_that_are_cut_off_have_earned_goes_to_the_last_one_left():
    """Three replies of one token, nodes 1, 3 and 5; the cut is within the third message."""
    sample = Sample(
        token_ids=[7, 1, 8, 2, 9, 3],
        loss_mask=[False, True] * 3,
        inference_logprobs=[0, -1] * 3,
        node_ids=[0, 1, 2, 3, 4, 5],
    )
    rollout = Rollout(env="e", example_id=0, group_id=0, reward=1.0, samples=[sample])
    rollout.info = {"turn_rewards": {"1": 0.25, "5": 2.0}, "other": 1}
    rollout.cut(5)
    assert rollout.info == {"turn_rewards": {"1": 0.25, "3": 2.0}, "other": 1}
    assert [turn.reward for turn in rollout.turns] == [None, 0.25, None, 2.0, None]
    rollout.cut(2)
    assert rollout.info["turn_rewards"] == {"1": 2.25}
