"""Frames round-trip in few bytes, and other bytes are refused."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl import StreamError, WireError
from prime_rl.streams import ROUTES, STREAMS
from prime_rl.wire import MicroBatch, decode_batch, encode_batch

COLUMNS = (
    "token_ids",
    "loss_mask",
    "inference_logprobs",
    "sequence_lengths",
    "temperatures",
    "env_ids",
    *STREAMS,
)


def make_micro_batch(
    lengths: list[int], streams: Collection[str] = ("advantages",), seed: int = 0
) -> MicroBatch:
    """Random columns; two envs by turns."""
    rng = np.random.default_rng(seed)
    total, number = sum(lengths), len(lengths)
    extra: dict[str, Any] = {
        name: rng.standard_normal(total).astype(np.float32) for name in sorted(streams)
    }
    return MicroBatch(
        token_ids=rng.integers(0, 2**31 - 1, total, dtype=np.int32),
        loss_mask=rng.random(total) < 0.5,
        inference_logprobs=-rng.random(total).astype(np.float32),
        sequence_lengths=np.array(lengths, np.int32),
        temperatures=rng.random(number).astype(np.float32),
        env_ids=(np.arange(number) % 2).astype(np.uint16),
        envs=("reverse-text", "überprüfung"),
        **extra,
    )


def assert_equal(first: MicroBatch, second: MicroBatch) -> None:
    """Every column bit by bit, with its dtype."""
    assert first.envs == second.envs
    for name in COLUMNS:
        expected, got = getattr(first, name), getattr(second, name)
        if expected is None:
            assert got is None
        else:
            assert got.dtype == expected.dtype
            assert got.tobytes() == expected.tobytes()


micro_batches = st.builds(
    make_micro_batch,
    st.lists(st.integers(1, 40), max_size=6),
    st.sets(st.sampled_from(STREAMS)),
    st.integers(0, 2**16),
)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**40), st.lists(micro_batches, max_size=4))
def test_any_mix_of_streams_survives_the_wire(step: int, rows: list[MicroBatch]) -> None:
    found, decoded = decode_batch(encode_batch(step, rows))
    assert found == step
    assert len(decoded) == len(rows)
    for row, got in zip(rows, decoded, strict=True):
        assert_equal(row, got)


def test_minibatches_survive_the_wire_and_one_costs_no_byte() -> None:
    rows = [make_micro_batch([3, 2]), make_micro_batch([4])]
    plain = encode_batch(5, rows)
    assert msgspec.msgpack.decode(plain[10 : 10 + header_size(plain)])[2:] == []
    parts = [replace(rows[0], minibatch=1), rows[1], replace(rows[1], minibatch=2)]
    frame = encode_batch(5, parts)
    assert msgspec.msgpack.decode(frame[10 : 10 + header_size(frame)])[2:] == [[1, 0, 2]]
    _, found = decode_batch(frame)
    assert [row.minibatch for row in found] == [1, 0, 2]
    for row, got in zip(parts, found, strict=True):
        assert_equal(row, got)


def header_size(frame: bytes) -> int:
    return int(struct.unpack_from("<4sHI", frame)[2])


def test_minibatch_numbers_of_another_number_of_rows_are_refused() -> None:
    header = msgspec.msgpack.encode([3, [], [0, 1]])
    frame = struct.pack("<4sHI", b"PRLB", 1, len(header)) + header
    with pytest.raises(WireError, match="2 minibatch numbers for 0 rows"):
        decode_batch(frame + bytes(-len(frame) % 8))


def test_plain_grpo_costs_at_most_thirteen_bytes_per_token() -> None:
    rows = [make_micro_batch([128] * 16, seed=seed) for seed in range(4)]  # 64 of 64 + 64
    num_bytes, num_tokens = len(encode_batch(1, rows)), 64 * 128
    # 12.125 a token; 10 a sequence of 128 tokens; headers and alignment
    assert num_bytes / num_tokens < 12.125 + 10 / 128 + 0.2
    assert num_bytes / num_tokens <= 13


@pytest.mark.parametrize("streams", [{"advantages"}, set(STREAMS)])
def test_a_frame_cut_anywhere_is_refused(streams: set[str]) -> None:
    frame = encode_batch(3, [make_micro_batch([3, 2], streams), make_micro_batch([1], streams)])
    for size in range(len(frame)):
        with pytest.raises(WireError):
            decode_batch(frame[:size])


def test_a_frame_with_bytes_behind_it_is_refused() -> None:
    frame = encode_batch(3, [make_micro_batch([3, 2])])
    with pytest.raises(
        WireError, match=f"should end at byte {len(frame)}, it has {len(frame) + 8}"
    ):
        decode_batch(frame + bytes(8))


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200))
def test_foreign_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        decode_batch(data)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=60))
def test_a_foreign_header_behind_our_magic_is_refused(header: bytes) -> None:
    with pytest.raises(WireError):
        decode_batch(struct.pack("<4sHI", b"PRLB", 1, len(header)) + header)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_frame_with_a_flipped_byte_raises_nothing_but_wire_errors(data: st.DataObject) -> None:
    frame = bytearray(encode_batch(3, [make_micro_batch([3, 2], {"ce_weights"})]))
    position = data.draw(st.integers(0, len(frame) - 1))
    frame[position] ^= data.draw(st.integers(1, 255))
    with suppress(WireError):
        decode_batch(bytes(frame))


def test_errors_name_the_found_value() -> None:
    frame = encode_batch(3, [make_micro_batch([3])])
    with pytest.raises(WireError, match="starts with b'PK"):
        decode_batch(b"PK\x03\x04" + frame[4:])
    with pytest.raises(WireError, match="wire version 9, this trainer reads 1"):
        decode_batch(frame[:4] + b"\x09\x00" + frame[6:])
    with pytest.raises(WireError, match="truncated: 5 bytes"):
        decode_batch(frame[:5])


def test_columns_that_do_not_align_are_not_sent() -> None:
    row = make_micro_batch([3, 2])
    row.advantages = np.zeros(4, np.float32)
    with pytest.raises(StreamError, match=r"'advantages'.*got shape \(4,\), expected \(5,\)"):
        encode_batch(1, [row])
    row = make_micro_batch([3, 2])
    row.sequence_lengths = np.array([3, 3], np.int32)
    with pytest.raises(StreamError, match="sum to 6, expected 5"):
        encode_batch(1, [row])
    row.sequence_lengths = np.array([5, 0], np.int32)
    with pytest.raises(StreamError, match="at least one token"):
        encode_batch(1, [row])


def test_decoded_columns_are_views_and_cost_no_object_per_token() -> None:
    frame = encode_batch(1, [make_micro_batch([1000] * 1000, {"advantages", "rl_weights"})])
    whole = np.frombuffer(frame, np.uint8)
    tracemalloc.start()
    _, (row,) = decode_batch(frame)
    held = tracemalloc.take_snapshot()
    tracemalloc.stop()
    for name in ("token_ids", "inference_logprobs", "advantages", "rl_weights", "temperatures"):
        column = getattr(row, name)
        assert np.shares_memory(column, whole)
        assert not column.flags.writeable
    # one million tokens; the unpacked mask is the only thing that grows with them
    assert sum(trace.count for trace in held.statistics("lineno")) < 1000
    assert sum(trace.size for trace in held.statistics("lineno")) < 1_100_000


def test_position_ids_restart_at_each_sequence() -> None:
    row = make_micro_batch([3, 1, 2])
    assert row.position_ids.tolist() == [0, 1, 2, 0, 0, 1]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_routes_take_their_own_bytes_and_keep_their_shape(dtype: Any) -> None:
    """Five tokens of three layers with two experts each: 30 numbers, of one byte or two."""
    rng = np.random.default_rng(0)
    routes = rng.integers(0, np.iinfo(dtype).max, (5, 3, 2), endpoint=True).astype(dtype)
    plain = make_micro_batch([3, 2])
    routed = replace(plain, streams={ROUTES: routes})
    size = len(encode_batch(1, [routed])) - len(encode_batch(1, [plain]))
    assert 0 <= size - routes.nbytes <= 48  # and its name, and padding
    _, (found,) = decode_batch(encode_batch(1, [routed]))
    assert found.streams[ROUTES].dtype == dtype
    np.testing.assert_array_equal(found.streams[ROUTES], routes)


@pytest.mark.parametrize("width", [b"0", b"7", b"x"])
def test_routes_whose_rows_do_not_fit_their_bytes_are_refused(width: bytes) -> None:
    batch = replace(make_micro_batch([3]), streams={ROUTES: np.zeros((3, 2, 2), np.uint8)})
    frame = encode_batch(1, [batch]).replace(b"|u1*2", b"|u1*" + width)
    with pytest.raises(WireError, match="expected a multiple of"):
        decode_batch(frame)
