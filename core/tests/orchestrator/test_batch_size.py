"""A batch of tokens: what it takes, and how much is requested for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from test_dispatcher import World, settle

from prime_rl.config.orchestrator import BATCH_SIZE, OrchestratorConfig
from prime_rl.orchestrator.admission.admission import Admission, Standing
from prime_rl.orchestrator.admission.tickets import Ticket
from prime_rl.orchestrator.batch_size import BatchSize
from prime_rl.orchestrator.buffer import Buffer, NothingToTrain
from prime_rl.rollout import Rollout
from prime_rl.testing import make_rollout


def rollout(tokens: int, group: int = 0, version: int = 0) -> Rollout:
    """Of so many tokens: a prompt of one, and a reply."""
    made = make_rollout(1.0, group_id=group, prompt=1, completion=tokens - 1)
    made.policy_version = version
    assert made.num_tokens == tokens
    return made


def buffer(tokens: int, whole: bool = False, patience: int = 9) -> Buffer:
    keeps: Any = SimpleNamespace(objectors=lambda rollout, group=(): [], group_filters=[])
    return Buffer(
        size=BatchSize(None, tokens=tokens, longest=64),
        max_off_policy_steps=1000,
        pre=keeps,
        post=keeps,
        max_empty_batches=patience,
        whole_groups=whole,
    )


# -- the buffer ---------------------------------------------------------------------------------


@given(
    size=st.integers(1, 200),
    lengths=st.lists(st.integers(2, 64), max_size=80),
    together=st.integers(1, 5),
)
def test_a_batch_is_the_shortest_start_with_enough_tokens(
    size: int, lengths: list[int], together: int
) -> None:
    full = buffer(size)
    batches: list[list[int]] = []
    for start in range(0, len(lengths), together):
        full.add([rollout(each, group=start) for each in lengths[start : start + together]])
        while full.is_full:
            taken = full.take()
            batches.append([each.num_tokens for each in taken.kept])
    for batch in batches:
        assert sum(batch) >= size > sum(batch[:-1])
    trained = [each for batch in batches for each in batch]
    assert trained == lengths[: len(trained)]
    assert full.num_buffered == sum(lengths[len(trained) :]) < size


def test_a_loss_over_groups_gets_the_last_group_whole() -> None:
    full = buffer(10, whole=True)
    full.add([rollout(6, group=1), rollout(6, group=1), rollout(6, group=1)])
    full.add([rollout(6, group=2)])
    assert [each.group_id for each in full.take().kept] == [1, 1, 1]
    assert full.num_buffered == 6


def test_what_waits_is_restored_with_its_tokens() -> None:
    full = buffer(10)
    full.add([rollout(6), rollout(6), rollout(7)])
    full.take()
    other = buffer(10)
    other.restore(full.buffered)
    assert other.num_buffered == full.num_buffered == 7


def test_the_patience_is_in_batches_of_tokens() -> None:
    """Failed rollouts count as the longest, until others have come back."""
    full = buffer(128, patience=2)
    full.note_failed(3, "e")
    with pytest.raises(NothingToTrain, match="the last 4 rollouts left nothing"):
        full.note_failed(1, "e")


# -- what is requested --------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    lag=st.integers(1, 4),
    size=st.integers(20, 400),
    lengths=st.lists(st.integers(2, 64), min_size=1, max_size=40),
)
def test_no_more_is_requested_than_may_train_by_the_estimate(
    lag: int, size: int, lengths: list[int]
) -> None:
    """accepted + requested <= (S + version + 1) * batch, in tokens, but for the last group."""
    batch = BatchSize(None, tokens=size, longest=64)
    admission = Admission(
        batch_size=batch.places,
        max_off_policy_steps=lag,
        max_steps=1000,
        places=lambda env, members: members * batch.expected(env),
        unit=batch.expected,
        lead=float(lag),
    )
    at = Standing(version=0, step=1, num_buffered=0)
    opened: list[Ticket] = []
    for length in lengths:
        while admission.room(at) > 0:
            # Before each group there is room: it exceeds the bound by itself at most.
            requested = sum(ticket.size for ticket in opened) * batch.expected("e")
            assert at.num_buffered + requested < (lag + 1) * size
            ticket = Ticket(env_name="e", size=2)
            admission.choose(ticket)
            admission.open(ticket, 0, 0.0)
            opened.append(ticket)
        requested = sum(ticket.size for ticket in opened) * batch.expected("e")
        assert at.num_buffered + requested > (lag + 1) * size - 1e-6  # and no less
        if not opened:
            break
        done = opened.pop(0)
        admission.complete(done, 1.0)
        admission.remove(done)
        batch.came_back("e", [rollout(length), rollout(length)])
        at = Standing(version=0, step=1, num_buffered=at.num_buffered + 2 * length)


def test_the_estimate_follows_and_is_saved() -> None:
    batch = BatchSize(None, tokens=1000, longest=64)
    assert batch.expected("e") == 64.0
    batch.came_back("e", [rollout(10), rollout(20)])
    assert batch.expected("e") == 15.0 and batch.expected("other") == 64.0
    for _ in range(2000):
        batch.came_back("e", [rollout(40)])
    assert batch.expected("e") == pytest.approx(40.0, abs=0.5)
    other = BatchSize(None, tokens=1000, longest=64)
    other.resume(batch.means)
    assert other.expected("e") == batch.expected("e")


def test_a_batch_of_rollouts_counts_each_as_one() -> None:
    batch = BatchSize(8)
    batch.came_back("e", [rollout(10)])
    assert (batch.of(rollout(30)), batch.expected("e"), batch.means) == (1, 1.0, {})


async def test_the_dispatcher_requests_more_when_rollouts_turn_out_to_be_short() -> None:
    async with World(size=2, lag=1, token_batch_size=256, seq_len=64) as world:
        assert world.dispatcher.num_inflight == 8  # two batches of four that are as long as may be
        await world.end(0, 1.0, 1.0)
        group = world.dispatcher.arrivals.get_nowait()
        tokens = sum(each.num_tokens for each in group.survivors)
        world.num_buffered = tokens
        world.dispatcher.taken(group)
        await settle()
        mean = tokens / 2
        left = 2 * 256 - tokens
        open_now = world.dispatcher.num_inflight
        assert left <= open_now * mean < left + 2 * mean
        assert world.dispatcher.requested.tokens == {"e": mean}


# -- the config ---------------------------------------------------------------------------------


def test_one_of_the_two_sizes_is_set_and_rollouts_are_the_default() -> None:
    assert OrchestratorConfig().batch_size == BATCH_SIZE == 128
    tokens = OrchestratorConfig(token_batch_size=4096)
    assert tokens.batch_size is None
    assert OrchestratorConfig.model_validate(tokens.model_dump(mode="json")) == tokens
    with pytest.raises(ValidationError, match="a batch has one size"):
        OrchestratorConfig(token_batch_size=4096, batch_size=128)


def test_a_synchronous_run_counts_rollouts() -> None:
    with pytest.raises(ValidationError, match="needs max_off_policy_steps >= 1"):
        OrchestratorConfig(token_batch_size=4096, max_off_policy_steps=0)
