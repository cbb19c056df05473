"""Rows of bounded length: nothing lost, nothing twice, nothing misaligned, few rows."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl import Rollout, Sample, StreamError
from prime_rl.config.run import RunConfig
from prime_rl.orchestrator.packer import (
    Packer,
    alone,
    batch_frames,
    batch_to_pack,
    check_routes,
    pack,
    pack_ranks,
    plan_rows,
)
from prime_rl.registry.components import installed_losses
from prime_rl.registry.manager import Hooks
from prime_rl.rollout import Batch
from prime_rl.streams import ROUTES, STREAMS, concatenate, is_absent
from prime_rl.testing import make_rollout
from prime_rl.wire import decode_batch
from prime_rl.wire.micro_batch import MEASURED

FILLS = {"advantages": 0.0, "rl_weights": 1.0, "ce_weights": 0.0, "ref_kl_weights": 0.0,
         "ref_logprobs": np.nan}  # fmt: skip
LENGTHS = st.lists(st.integers(1, 20), max_size=40)


def test_longest_first_each_into_the_fullest_row_with_room():
    # 6 | 5 | 4 fits beside 6 (room 4) and 5 (room 5): the fuller is 6; 3 beside 5; 2 beside 5+3.
    assert plan_rows([3, 6, 2, 5, 4], 10) == [[1, 4], [3, 0, 2]]


def test_best_fit_beats_first_fit():
    # First fit would put the 3 beside the 5 (room 5) and then need a third row for the last 5.
    rows = plan_rows([5, 7, 3, 5], 10)
    assert sorted(sorted(row) for row in rows) == [[0, 3], [1, 2]]


def test_nothing_to_pack():
    assert plan_rows([], 10) == []
    assert pack([], [], 10) == []


def test_a_sample_longer_than_a_row_is_refused():
    with pytest.raises(StreamError) as caught:
        plan_rows([3, 11], 10)
    assert str(caught.value) == (
        "sample 1 has 11 tokens, a row holds 10. Raise trainer.micro_batch_tokens."
    )


@given(LENGTHS)
def test_every_sample_in_one_row_and_no_row_over_capacity(lengths):
    rows = plan_rows(lengths, 20)
    assert sorted(itertools.chain(*rows)) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in row) <= 20 for row in rows)


def fewest_rows(lengths, capacity):
    """The optimum, by trying everything."""
    best = len(lengths)

    def place(index, rows):
        nonlocal best
        if len(rows) >= best:
            return
        if index == len(lengths):
            best = len(rows)
            return
        for i, used in enumerate(rows):
            if used + lengths[index] <= capacity and used not in rows[:i]:
                place(index + 1, [*rows[:i], used + lengths[index], *rows[i + 1 :]])
        place(index + 1, [*rows, lengths[index]])

    place(0, [])
    return best


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8))
def test_close_to_the_fewest_rows_possible(lengths):
    optimum = fewest_rows(sorted(lengths, reverse=True), 20)
    assert len(plan_rows(lengths, 20)) <= 11 / 9 * optimum + 6 / 9


@given(st.lists(st.integers(1, 50), min_size=50, max_size=300))
def test_no_row_is_opened_needlessly(lengths):
    """Best fit opens a row only where nothing fits: no row fits whole into another's room."""
    totals = sorted(sum(lengths[i] for i in row) for row in plan_rows(lengths, 100))
    assert len(totals) < 2 or totals[0] + totals[1] > 100


@st.composite
def mixed(draw):
    """Samples of every mix of streams."""
    samples = []
    for number in range(draw(st.integers(1, 12))):
        size = draw(st.integers(1, 9))
        start = 1 + 100 * number
        tokens = np.arange(start, start + size)
        mask = draw(st.lists(st.booleans(), min_size=size, max_size=size))
        present = draw(st.sets(st.sampled_from(STREAMS)))
        if any(mask):  # rl members, whose weights below are not zero
            present.add("advantages")
        if "ref_kl_weights" in present:
            present.add("ref_logprobs")
        samples.append(
            Sample(
                token_ids=tokens,
                loss_mask=mask,
                inference_logprobs=-tokens / 7,
                temperature=draw(st.sampled_from([0.5, 1.0])),
                **{name: tokens / (3 + STREAMS.index(name)) for name in present},
            )
        )
    return samples


@given(mixed())
def test_packing_mixed_streams_loses_nothing_and_misaligns_nothing(samples):
    envs = ["b" if int(sample.token_ids[0]) % 3 else "a" for sample in samples]
    by_first = {
        int(sample.token_ids[0]): (sample, env) for sample, env in zip(samples, envs, strict=True)
    }
    seen = []
    for row in pack(samples, envs, 12):
        assert len(row) <= 12
        carried = {name for name in STREAMS if getattr(row, name) is not None}
        ends = np.cumsum(row.sequence_lengths)
        members = []
        for s, end in enumerate(ends):
            at = slice(end - row.sequence_lengths[s], end)
            sample, env = by_first[int(row.token_ids[at][0])]
            members.append(sample)
            assert row.envs[row.env_ids[s]] == env
            assert row.temperatures[s] == np.float32(sample.temperature)
            np.testing.assert_array_equal(row.token_ids[at], sample.token_ids)
            np.testing.assert_array_equal(row.loss_mask[at], sample.loss_mask)
            np.testing.assert_array_equal(row.inference_logprobs[at], sample.inference_logprobs)
            for name in carried:
                own = getattr(sample, name)
                expected = np.full(len(sample), FILLS[name]) if own is None else own
                np.testing.assert_array_equal(getattr(row, name)[at], expected)
        assert carried == {
            name for name in STREAMS if any(getattr(m, name) is not None for m in members)
        }
        np.testing.assert_array_equal(
            row.position_ids, np.concatenate([np.arange(len(m)) for m in members])
        )
        seen += [int(member.token_ids[0]) for member in members]
    assert sorted(seen) == sorted(by_first)


def plain(size, **streams):
    return Sample(
        token_ids=np.arange(size),
        loss_mask=np.ones(size),
        inference_logprobs=np.zeros(size),
        **streams,
    )


def test_fills_in_numbers():
    echo = plain(2, advantages=[1, 2], ce_weights=[0, 0.5])
    distill = plain(1, rl_weights=[0], ref_kl_weights=[1], ref_logprobs=[-3])
    (row,) = pack([echo, distill], ["x", "y"], 3)
    streams = {name: getattr(row, name).tolist() for name in STREAMS}
    streams["ref_logprobs"] = [None if math.isnan(v) else v for v in streams["ref_logprobs"]]
    assert streams == {
        "advantages": [1, 2, 0],
        "rl_weights": [1, 1, 0],
        "ce_weights": [0, 0.5, 0],
        "ref_kl_weights": [0, 0, 1],
        "ref_logprobs": [None, None, -3],
    }


def test_plain_grpo_ships_no_weight_stream():
    (row,) = pack([plain(2, advantages=[1, 2])], ["x"], 3)
    present = [name for name in STREAMS if getattr(row, name) is not None]
    assert present == ["advantages"]


@pytest.mark.parametrize(
    ("versions", "lag"),
    [
        ([[4, 4], [4, 4]], None),
        ([[4, 4], [2, 3]], [-1, 1, 1, -1, 3, 2]),
        ([[4, 4], None], None),
    ],
)
def test_the_trainer_gets_the_lag_of_each_token_if_the_batch_has_several(versions, lag):
    """Step 6 trains version 5. The first token of each sample is the prompt."""
    rollouts = []
    for number, of_sample in enumerate(versions):
        sample = Sample(
            token_ids=np.arange(3),
            loss_mask=np.array([False, True, True]),
            inference_logprobs=np.zeros(3),
            policy_versions=None if of_sample is None else np.array([-1, *of_sample]),
            advantages=np.ones(3),
        )
        rollouts.append(
            Rollout(env="a", example_id=0, group_id=number, reward=1.0, samples=[sample])
        )
    packing = batch_to_pack(6, rollouts, installed_losses(), 16)
    _, (row,) = decode_batch(batch_frames(packing, 16)[0])
    column = row.streams.get("policy_lag")
    assert (None if column is None else column.tolist()) == lag


def test_an_empty_sample_is_refused():
    with pytest.raises(StreamError, match="every sequence needs at least one token"):
        pack([plain(0)], ["x"], 3)


def test_tokens_of_no_component_need_no_stream():
    observed = Sample(token_ids=[1, 2], loss_mask=[False] * 2, inference_logprobs=[0, 0])
    quiet = plain(2, rl_weights=[0, 0], ref_kl_weights=[0, 0], ce_weights=[1, 1])
    (row,) = pack([observed, quiet], ["a", "b"], 10)
    assert row.advantages is None and row.ref_logprobs is None


def test_truncation_cuts_every_column():
    columns = {name: [1, 2, 3] for name in ("roles", "is_content", "policy_versions", *STREAMS)}
    sample = plain(3, temperature=0.5, **columns)
    short = sample.cut(2)
    assert len(short) == 2 and short.temperature == 0.5
    for name in ("token_ids", "loss_mask", "inference_logprobs", *columns):
        np.testing.assert_array_equal(getattr(short, name), getattr(sample, name)[:2])


@given(mixed(), st.integers(1, 9))
def test_truncation_cuts_all_streams_of_a_batch(samples, limit):
    """Packed after the cut: each sequence is a prefix of its sample, in every column."""
    by_first = {int(sample.token_ids[0]): sample for sample in samples}
    short = [sample.cut(limit) for sample in samples]
    for row in pack(short, ["a"] * len(samples), 12):
        ends = np.cumsum(row.sequence_lengths)
        for length, end in zip(row.sequence_lengths, ends, strict=True):
            at = slice(end - length, end)
            sample = by_first[int(row.token_ids[at][0])]
            assert length == min(len(sample), limit)
            for name in ("token_ids", "loss_mask", "inference_logprobs", *STREAMS):
                own, packed = getattr(sample, name), getattr(row, name)
                if own is not None:
                    np.testing.assert_array_equal(packed[at], own[:limit])
                elif packed is not None:
                    expected = np.full(length, FILLS[name], np.float32)
                    np.testing.assert_array_equal(packed[at], expected)


def test_a_sample_whose_trainable_tokens_are_all_cut_off_has_no_member():
    sample = Sample(
        token_ids=[1, 2, 3],
        loss_mask=[False, False, True],
        inference_logprobs=[0, 0, -1],
        advantages=[0, 0, 5],
    )
    (row,) = pack([sample.cut(2), plain(2, advantages=[1, 1])], ["a", "b"], 10)
    assert row.loss_mask.tolist() == [False, False, True, True]
    assert row.advantages.tolist() == [0, 0, 1, 1]


def test_truncation_leaves_what_fits_and_what_is_absent():
    sample = plain(3)
    assert sample.cut(3) is sample
    assert sample.cut(2).advantages is None


def test_columns_of_the_orchestrator_stay_off_the_wire():
    bare = {"token_ids": [1, 2], "loss_mask": [0, 1], "inference_logprobs": [0, -1],
            "advantages": [0, 0.5]}  # fmt: skip
    known = {"roles": [1, 2], "is_content": [1, 1], "is_repeat": [0, 0], "policy_versions": [-1, 3],
             "node_ids": [0, 1]}  # fmt: skip
    frames = [
        batch_frames(alone([Sample(**bare, **more)] * 2, ["a", "b"]), 8) for more in ({}, known)
    ]
    assert frames[0] == frames[1]


def test_a_batch_of_few_groups_has_fewer_minibatches_and_says_so(caplog):
    tables = {"model": {"name": "m"}, "max_steps": 1, "seq_len": 10}
    config = RunConfig.model_validate({**tables, "trainer": {"minibatches": 3}})
    # Five tokens each: rows of two, and groups of three, one and two rollouts.
    rollouts = [
        make_rollout(float(n), group_id=group) for n, group in enumerate([2, 2, 2, 5, 7, 7])
    ]
    for rollout in rollouts:
        rollout.assign_advantages(rollout.reward)

    def minibatches(kept):
        (frame,) = Packer(config, 1, Hooks(), installed_losses()).pack(Batch(4, kept))
        rows = decode_batch(frame)[1]
        return [(row.minibatch, sorted(set(row.advantages[row.loss_mask]))) for row in rows]

    assert minibatches(rollouts) == [(0, [0, 1]), (0, [2]), (1, [4, 5]), (2, [3])]
    assert not caplog.text
    assert minibatches(rollouts[2:4]) == [(0, [2]), (1, [3])]
    assert caplog.messages == [
        "step 4: the batch has 2 groups, which are not split, so it has 2 minibatches instead "
        "of 3 (trainer.minibatches)"
    ]


def test_a_run_packs_rows_of_its_capacity_for_each_of_its_ranks_and_what_is_measured_apart():
    """Rollouts of five tokens: four train, in one row of ten for each rank; one is measured."""
    tables = {"model": {"name": "m"}, "max_steps": 1, "seq_len": 5}
    config = RunConfig.model_validate({**tables, "trainer": {"micro_batch_tokens": 10}})
    rollouts = [make_rollout(float(number), group_id=number) for number in range(5)]
    for rollout in rollouts:
        rollout.assign_advantages(rollout.reward)

    batch = Batch(1, kept=rollouts[:4], measured=rollouts[4:])
    frames = Packer(config, 2, Hooks(), installed_losses()).pack(batch)
    ranks = [decode_batch(frame)[1] for frame in frames]
    lengths = [[(row.minibatch, row.sequence_lengths.tolist()) for row in rows] for rows in ranks]
    assert lengths == [[(0, [5, 5]), (MEASURED, [5])], [(0, [5, 5]), (MEASURED, [1])]]
    trained = {a for rows in ranks for a in rows[0].advantages[rows[0].loss_mask]}
    row = ranks[0][1]
    assert trained == {0.0, 1.0, 2.0, 3.0}
    assert set(row.advantages[row.loss_mask]) == {4.0}


def test_ranks_that_compute_a_row_together_get_the_same_one() -> None:
    tables = {"model": {"name": "m"}, "max_steps": 1, "seq_len": 5}
    config = RunConfig.model_validate({**tables, "trainer": {"context_parallel": 2}})
    rollouts = [make_rollout(float(number), group_id=number) for number in range(2)]
    for rollout in rollouts:
        rollout.assign_advantages(rollout.reward)
    batch = Batch(1, kept=rollouts)

    first, second, third, fourth = Packer(config, 4, Hooks(), installed_losses()).pack(batch)
    assert first == second != third == fourth
    assert [len(decode_batch(frame)[1]) for frame in (first, third)] == [1, 1]


def routed(length, expert):
    sample = make_rollout(prompt=1, completion=length - 1).samples[0]
    if expert is not None:
        sample.routed_experts = np.full((length, 2, 2), expert, np.uint8)
        sample.routed_experts[..., 1] += 1
    return sample


def test_routes_lie_end_to_end_and_tokens_without_have_the_highest_number():
    packing = replace(alone([routed(3, 4), routed(2, None)], ["a", "a"]), needs=frozenset({ROUTES}))
    ((row,),) = pack_ranks(packing, capacity=8)
    assert row.streams[ROUTES].dtype == np.uint8
    assert row.streams[ROUTES][:, 1].tolist() == [[4, 5]] * 3 + [[255, 255]] * 2
    assert is_absent(row.streams[ROUTES]).tolist() == [False] * 3 + [True] * 2


def test_routes_are_not_sent_to_a_trainer_that_does_not_replay_them():
    ((row,),) = pack_ranks(alone([routed(3, 4)], ["a"]), capacity=8)
    assert ROUTES not in row.streams


def test_a_run_that_replays_routes_sends_them_with_what_is_measured_too():
    tables = {"model": {"name": "m"}, "max_steps": 1, "seq_len": 5}
    config = RunConfig.model_validate({**tables, "trainer": {"router_replay": True}})
    rollouts = [make_rollout(float(number), group_id=number) for number in range(2)]
    for expert, rollout in enumerate(rollouts):
        rollout.assign_advantages(rollout.reward)
        rollout.samples = [routed(5, expert)]

    batch = Batch(1, kept=rollouts[:1], measured=rollouts[1:])
    (frame,) = Packer(config, 1, Hooks(), installed_losses()).pack(batch)
    trained, measured = decode_batch(frame)[1]
    assert measured.minibatch == MEASURED
    for expert, row in enumerate((trained, measured)):
        assert row.streams[ROUTES][:, 1].tolist() == [[expert, expert + 1]] * 5


def test_routes_of_two_widths_become_the_wider_one():
    narrow = np.zeros((1, 2, 2), np.uint8)
    wide = np.full((1, 2, 2), 300, np.uint16)
    joined = concatenate([(1, narrow), (1, wide), (1, None)], ROUTES)
    assert joined.dtype == np.uint16
    assert joined[:, 0, 0].tolist() == [0, 300, 65535]
    assert is_absent(joined).tolist() == [False, False, True]


def test_a_rollout_of_the_policy_without_routes_ends_a_run_that_replays_them():
    rollout = make_rollout()
    with pytest.raises(StreamError, match="--enable-return-routed-experts"):
        check_routes([rollout])
    rollout.source = "frozen"  # imitated: its model has other experts
    check_routes([rollout])
