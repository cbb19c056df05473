"""Rows for several ranks: as many for each, about as much work, nothing lost."""

import itertools
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_rl import Sample
from prime_rl.orchestrator.balance import sample_costs, split_groups
from prime_rl.orchestrator.packer import (
    BatchToPack,
    SampleToPack,
    alone,
    batch_frames,
    pack,
    pack_ranks,
    plan_rows,
)
from prime_rl.orchestrator.rank_balance import imbalance, plan_ranks
from prime_rl.wire import decode_batch, encode_batch

LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=60)


def plan(lengths, capacity, num_ranks, attention_flops=0.0):
    return plan_ranks(
        plan_rows(lengths, capacity),
        lengths,
        capacity,
        num_ranks,
        sample_costs(lengths, attention_flops),
    )


def made(length, **streams):
    tokens = np.arange(1, length + 1)
    return Sample(
        token_ids=tokens,
        loss_mask=tokens > 1,
        inference_logprobs=-tokens / 7,
        **({"advantages": tokens / 3} | streams),
    )


def test_the_costliest_sample_goes_where_there_is_least_work_so_far():
    # 9 to rank 0, 8 to rank 1, 7 to rank 1 (15), 6 to rank 0 (15).
    assert plan([9, 8, 7, 6], 20, 2) == [[[0, 3]], [[1, 2]]]


def test_the_fewest_rows_are_used_if_they_balance_better():
    # As above 9 + 5 + 4 = 18 and 8 + 7 = 15; the tight rows are 9 + 8 = 17 and 7 + 5 + 4 = 16.
    assert plan([9, 8, 7, 5, 4], 20, 2) == [[[0, 1]], [[2, 3, 4]]]


def test_each_rank_gets_the_fewest_rows_costliest_first():
    # 12 of 5 tokens, two per row: six rows, three per rank.
    ranks = plan([5] * 12, 10, 2)
    assert [[len(row) for row in rows] for rows in ranks] == [[2, 2, 2]] * 2
    ranks = plan([9, 1, 1, 9, 1, 1], 11, 2)
    assert [[sum([9, 1, 1, 9, 1, 1][i] for i in row) for row in rows] for rows in ranks] == [
        [11],
        [11],
    ]


def test_with_attention_one_long_sample_costs_as_much_as_many_short_ones():
    # 100 tokens at 0.01 a pair cost 200; ten of 10 cost 110: so the other rank gets all of those.
    assert sample_costs([100, 10], 0.01).tolist() == [200, 11]
    long, short = plan([100] + [10] * 10, 200, 2, attention_flops=0.01)
    assert (long, short) == ([[0]], [list(range(1, 11))])
    even = plan([100] + [10] * 10, 200, 2)
    assert [len(rows[0]) for rows in even] == [1, 10]
    without = plan([40] + [10] * 10, 200, 2)
    assert [len(rows[0]) for rows in without] == [4, 7]


def test_a_rank_may_have_nothing():
    assert plan([5], 10, 4) == [[[0]], [[]], [[]], [[]]]


@given(LENGTHS, st.integers(2, 6), st.sampled_from([0.0, 0.1]))
def test_every_sample_is_in_one_row_and_all_ranks_have_equally_many_rows(lengths, num_ranks, flops):
    ranks = plan(lengths, 20, num_ranks, flops)
    rows = list(itertools.chain(*ranks))
    assert sorted(itertools.chain(*rows)) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= 20 for row in rows)
    num_rows = -(-len(plan_rows(lengths, 20)) // num_ranks)
    assert [len(own) for own in ranks] == [num_rows] * num_ranks
    assert plan(lengths, 20, num_ranks, flops) == ranks
    costs = sample_costs(lengths, flops)
    for own in ranks:
        work = [sum(costs[i] for i in row) for row in own]
        assert work == pytest.approx(sorted(work, reverse=True))


@given(LENGTHS, st.integers(2, 6))
def test_the_busiest_rank_has_at_most_one_sample_more_than_the_mean(lengths, num_ranks):
    """Of longest-processing-time-first, where rows have room: the last sample that a rank got came
    when it had the least."""
    ranks = plan(lengths, 2000, num_ranks)
    totals = [sum(lengths[i] for row in own for i in row) for own in ranks]
    assert max(totals) - min(totals) <= max(lengths)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_ranks", [2, 8, 16])
def test_256_samples_are_balanced_within_five_percent(seed, num_ranks):
    lengths = np.random.default_rng(seed).integers(50, 2049, 256).tolist()
    ranks = plan(lengths, 8192, num_ranks, 1e-4)
    assert imbalance(ranks, sample_costs(lengths, 1e-4)) < 0.05


def test_32_ranks_of_16_rows_are_planned_fast():
    """In about 10 ms; no bound here: machines differ."""
    lengths = np.random.default_rng(0).integers(50, 2000, 3900).tolist()
    tight = plan_rows(lengths, 8192)
    started = time.perf_counter()
    ranks = plan_ranks(tight, lengths, 8192, 32, sample_costs(lengths, 1e-4))
    print(f"{1e3 * (time.perf_counter() - started):.1f} ms")
    assert len(ranks) == 32 and {len(rows) for rows in ranks} == {16}
    assert imbalance(ranks, sample_costs(lengths, 1e-4)) < 0.01


def test_one_rank_gets_the_rows_in_their_order():
    samples = [made(length) for length in (3, 6, 2, 5, 4)]
    envs = ["a", "b", "a", "a", "b"]
    (frame,) = batch_frames(replace(alone(samples, envs), step=7), 10, 1, 0.5)
    assert frame == encode_batch(7, pack(samples, envs, 10))


def test_every_rank_gets_a_frame_of_the_same_step_and_number_of_rows():
    samples = [made(length) for length in (9, 9, 3, 3, 3)]
    frames = batch_frames(replace(alone(samples, list("abcde")), step=4), 10, 2)
    decoded = [decode_batch(frame) for frame in frames]
    assert [step for step, _ in decoded] == [4, 4]
    assert [len(rows) for _, rows in decoded] == [2, 2]
    tokens = sum(len(row) for _, rows in decoded for row in rows)
    assert tokens == 27


def test_a_rank_without_samples_gets_a_row_that_trains_nothing():
    first, second = pack_ranks(alone([made(4)], ["a"]), 10, 2)
    assert len(first) == len(second) == 1
    assert first[0].loss_mask.any()
    (idle,) = second
    assert (len(idle), idle.envs, idle.loss_mask.tolist()) == (1, ("a",), [False])
    assert idle.token_ids.tolist() == [1] and idle.advantages is None


GROUPS = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 20)), min_size=1, max_size=40)


@given(GROUPS, st.integers(1, 6))
def test_minibatches_hold_every_sample_once_and_groups_whole(samples, number):
    groups, lengths = zip(*samples, strict=True)
    parts = split_groups(groups, sample_costs(lengths, 0.1), number)
    assert len(parts) == min(number, len(set(groups))) and all(parts)
    assert sorted(i for part in parts for i in part) == list(range(len(groups)))
    assert all(part == sorted(part) for part in parts)
    owners = [{n for n, part in enumerate(parts) for i in part if groups[i] == g} for g in groups]
    assert all(len(own) == 1 for own in owners)


@given(GROUPS, st.integers(2, 6))
def test_the_largest_minibatch_has_at_most_one_group_more_than_the_smallest(samples, number):
    groups, lengths = zip(*samples, strict=True)
    parts = split_groups(groups, sample_costs(lengths, 0.0), number)
    totals = [sum(lengths[i] for i in part) for part in parts]
    largest = max(sum(n for g, n in samples if g == group) for group in groups)
    assert max(totals) - min(totals) <= largest


def test_the_costliest_group_comes_first():
    groups, lengths = [4, 4, 5, 7, 7, 7], [2, 3, 9, 1, 2, 1]  # work 5, 9 and 4
    assert split_groups(groups, sample_costs(lengths, 0.0), 2) == [[2], [0, 1, 3, 4, 5]]
    # A long context counts more than its tokens: 5 + 13, 9 + 81, 4 + 6.
    assert split_groups(groups, sample_costs(lengths, 1.0), 3) == [[2], [0, 1], [3, 4, 5]]


def test_every_rank_gets_equally_many_rows_of_each_minibatch():
    samples = enumerate(zip(map(made, (9, 9, 3, 3, 3, 9, 8)), "abcdefg", strict=True))
    parts = [[1, 4, 5, 6], [0, 2, 3]]  # rows of ten tokens: three, so two for each rank; and two
    pieces = [SampleToPack(s, env, group=int(i in parts[1])) for i, (s, env) in samples]
    packing = BatchToPack(pieces, [[i] for i in range(7)], step=4)
    decoded = [decode_batch(frame)[1] for frame in batch_frames(packing, 10, 2, 0.0, 2)]
    assert [[row.minibatch for row in rows] for rows in decoded] == [[0, 0, 1]] * 2
    for number, part in enumerate(parts):
        rows = [row for rows in decoded for row in rows if row.minibatch == number]
        trained = {env for row in rows if row.loss_mask.any() for env in row.envs}
        assert trained == {"abcdefg"[i] for i in part}
