"""Weights from memory to memory: all of them arrive as they were, or nobody takes any."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import warm
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from waiting import LIMIT

from prime_rl import WeightsError
from prime_rl_broadcast import group as group_module
from prime_rl_broadcast.group import (
    ALIGNMENT,
    BUCKET_BYTES,
    Attendance,
    buckets,
    header_of,
    num_bytes,
)
from prime_rl_broadcast.meeting import (
    Meeting,
    TensorInfo,
    call_off,
    decline,
    invitation,
    invite,
)

CPU = torch.device("cpu")
Stream = Iterator[tuple[str, Tensor]]


@pytest.fixture
def meet(tmp_path: Path) -> Callable[..., Meeting]:
    """Makes meetings of one group, the first rank's."""
    (tmp_path / "group").mkdir()
    number = iter(range(9))

    def make(size: int, timeout: float = LIMIT, group: str = "group") -> Meeting:
        folder = tmp_path / f"meeting_{next(number)}"
        folder.mkdir()
        (tmp_path / group).mkdir(exist_ok=True)
        return Meeting(
            directory=str(folder),
            group=str(tmp_path / group),
            backend="gloo",
            rank=0,
            world_size=size,
            timeout=timeout,
            loopback=True,
        )

    return make


class Member:
    """An engine's worker: keeps what it receives."""

    def __init__(self, rank: int, refuses: str | None = None, fails: bool = False) -> None:
        self.rank, self.refuses, self.fails = rank, refuses, fails
        self.attendance = Attendance()
        self.got: dict[str, Tensor] = {}

    def take(self, meeting: Meeting) -> None:
        with self.attendance.at(meeting.attended_by(self.rank), CPU) as group:
            group.receive(lambda header: self.refuses, self.use)

    def use(self, stream: Stream) -> None:
        if self.fails:
            self.got = dict([next(stream)])
            raise ValueError("no memory")
        self.got = dict(stream)


def send(
    attendance: Attendance,
    meeting: Meeting,
    tensors: Mapping[str, Tensor],
    rounded: Mapping[str, torch.dtype] | None = None,
) -> None:
    with attendance.at(meeting, CPU) as group:
        group.send(header_of(tensors, rounded or {}), tensors.values())


def broadcast(
    attendance: Attendance, meeting: Meeting, tensors: Mapping[str, Tensor], *members: Member
) -> list[Exception | None]:
    """How it ended for the sender and each member."""
    with ThreadPoolExecutor(1 + len(members)) as pool:
        futures: list[Future[None]] = [pool.submit(send, attendance, meeting, tensors)]
        futures += [pool.submit(member.take, meeting) for member in members]
        return [future.exception() for future in futures]  # type: ignore[misc]


def some_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "odd": torch.randn(3, 5, generator=generator),
        "half": torch.randn(7, generator=generator).bfloat16(),
        "whole": torch.arange(11),
        "one": torch.tensor(True),
        "none": torch.zeros(0, 4),
        "large": torch.randn(64, 33, generator=generator),
        "last": torch.randn(2, generator=generator, dtype=torch.float64),
    }


def test_every_tensor_arrives_bit_for_bit_on_every_worker(
    meet: Callable[..., Meeting], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_module, "BUCKET_BYTES", 100)  # "large" is many times that
    tensors, members = some_tensors(), [Member(1), Member(2)]
    assert broadcast(Attendance(), meet(3), tensors, *members) == [None] * 3
    for member in members:
        assert list(member.got) == list(tensors)
        for name, tensor in tensors.items():
            assert member.got[name].dtype == tensor.dtype
            assert torch.equal(member.got[name], tensor), name


def test_what_is_to_be_rounded_is_rounded_on_the_way(meet: Callable[..., Meeting]) -> None:
    """1 + 2^-9 lies between the bfloat16 numbers 1 and 1 + 2^-7, nearer to 1."""
    tensors = {"a": torch.tensor([1 + 2**-9, -3.0]), "b": torch.tensor([1 + 2**-9])}
    meeting, member = meet(2), Member(1)
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(member.take, meeting)
        send(Attendance(), meeting, tensors, {"a": torch.bfloat16})
        taking.result()
    assert member.got["a"].dtype == torch.bfloat16 and member.got["a"].tolist() == [1.0, -3.0]
    assert torch.equal(member.got["b"], tensors["b"])


def test_who_has_met_before_stays_connected(meet: Callable[..., Meeting]) -> None:
    sender, member = Attendance(), Member(1)
    assert broadcast(sender, meet(2), {"a": torch.zeros(1)}, member) == [None, None]
    kept = member.attendance._group
    assert broadcast(sender, meet(2), {"a": torch.ones(1)}, member) == [None, None]
    assert member.attendance._group is kept and member.got["a"].tolist() == [1.0]


def test_one_that_refuses_keeps_all_from_taking_anything(meet: Callable[..., Meeting]) -> None:
    willing, refusing = Member(1), Member(2, refuses="'b' is missing")
    errors = broadcast(Attendance(), meet(3), some_tensors(), willing, refusing)
    assert [str(error) for error in errors] == ["rank 2 of the broadcast: 'b' is missing"] * 3
    assert all(isinstance(error, WeightsError) for error in errors)
    assert not willing.got and not refusing.got


def test_one_that_fails_on_the_way_fails_alone_and_the_sender_hears_of_it(
    meet: Callable[..., Meeting], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_module, "BUCKET_BYTES", 100)
    sound, failing = Member(1), Member(2, fails=True)
    sent, received, failed = broadcast(Attendance(), meet(3), some_tensors(), sound, failing)
    assert isinstance(sent, WeightsError) and "rank 2 of the broadcast: ValueError" in str(sent)
    assert isinstance(failed, ValueError) and received is None
    assert torch.equal(sound.got["last"], some_tensors()["last"])
    assert sound.attendance._group is None  # it would wait for one that is done with it


def test_an_error_that_lives_on_keeps_nothing_of_what_had_come(
    meet: Callable[..., Meeting],
) -> None:
    """A bucket may be gigabytes of a GPU, and errors stay in logs and cycles for a while."""
    member, came = Member(1), list["weakref.ref[Tensor]"]()

    def use(stream: Stream) -> None:
        _, tensor = next(stream)
        came.append(weakref.ref(tensor))
        raise ValueError("no memory")

    member.use = use  # type: ignore[method-assign]
    sent, failed = broadcast(Attendance(), meet(2), some_tensors(), member)
    assert isinstance(sent, WeightsError) and isinstance(failed, ValueError)
    assert [tensor() for tensor in came] == [None]


TAKES = """
import os, sys, torch, msgspec
from prime_rl_broadcast.group import Attendance
from prime_rl_broadcast.meeting import Meeting
meeting = msgspec.json.decode(sys.argv[1], type=Meeting)
with Attendance().at(meeting, torch.device("cpu")) as group:
    group.receive(lambda header: None, eval(sys.argv[2]))
"""


def test_a_member_that_dies_is_an_error_for_the_sender(meet: Callable[..., Meeting]) -> None:
    """Gloo does not tell who only receives: the other member waits for as long as it may."""
    meeting = meet(3)
    members = [
        warm.Popen([sys.executable, "-c", TAKES, told, use])
        for told, use in (
            (msgspec.json.encode(meeting.attended_by(1)).decode(), "dict"),
            (msgspec.json.encode(meeting.attended_by(2)).decode(), "lambda stream: os._exit(0)"),
        )
    ]
    try:
        large = {"large": torch.zeros(2**24)}  # more than a socket holds
        with pytest.raises(WeightsError, match="the broadcast broke off"):
            send(Attendance(), meeting, large)
        assert members[1].wait(LIMIT) == 0
    finally:
        for member in members:
            member.kill()
            member.wait()


def test_a_meeting_that_is_called_off_ends_for_who_waits(meet: Callable[..., Meeting]) -> None:
    meeting, member = meet(2), Member(1)
    timer = threading.Timer(0.05, call_off, [Path(meeting.directory), "engine b is gone"])
    timer.start()
    with pytest.raises(WeightsError, match="called off: engine b is gone"):
        member.take(meeting)
    timer.join()


def test_who_does_not_come_is_named(meet: Callable[..., Meeting]) -> None:
    with pytest.raises(WeightsError, match=r"rank 0, 2 of 3 did not come within 0.05 s"):
        Member(1).take(meet(3, timeout=0.05))


def test_one_that_was_started_anew_is_noticed_before_anybody_connects(
    meet: Callable[..., Meeting],
) -> None:
    sender = Attendance()
    assert broadcast(sender, meet(2), {"a": torch.zeros(1)}, Member(1)) == [None, None]
    errors = broadcast(sender, meet(2), {"a": torch.zeros(1)}, Member(1))
    assert all("gloo, for the first time" in str(error) for error in errors)
    fresh = meet(2, group="another")
    assert broadcast(sender, fresh, {"a": torch.zeros(1)}, Member(1)) == [None, None]


def test_an_invitation_comes_or_is_declined_but_not_both(
    tmp_path: Path, meet: Callable[..., Meeting]
) -> None:
    meeting = meet(2)
    assert invitation(tmp_path) is None
    assert invite(tmp_path, meeting) and invitation(tmp_path) == meeting
    assert not decline(tmp_path) and invitation(tmp_path) == meeting
    other = tmp_path / "other"
    other.mkdir()
    assert decline(other) and not invite(other, meeting) and invitation(other) is None


def test_members_of_one_machine_listen_on_loopback_and_others_at_their_own_address(
    meet: Callable[..., Meeting], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, elsewhere = meet(2), msgspec.structs.replace(meet(2), loopback=False)
    monkeypatch.setenv("PRIME_RL_NODE_ADDRESS", "192.0.2.7")
    assert group_module._own_address(here) == "127.0.0.1"
    assert group_module._own_address(elsewhere) == "192.0.2.7"
    monkeypatch.delenv("PRIME_RL_NODE_ADDRESS")
    assert group_module._own_address(elsewhere) == group_module.own_address()


SIZES = {"F32": 4, "BF16": 2, "I64": 8, "BOOL": 1}
infos = st.builds(
    TensorInfo,
    name=st.text("ab.", max_size=3),
    dtype=st.sampled_from(sorted(SIZES)),
    shape=st.lists(st.integers(0, 4096), max_size=3).map(
        lambda shape: [min(n, 300) for n in shape]
    ),
)


@given(st.lists(infos, max_size=12))
def test_buckets_hold_every_tensor_once_in_order_and_none_is_too_full(header: Any) -> None:
    found = list(buckets(header))
    assert [info for bucket in found for _, info in bucket.places] == header
    for bucket in found:
        end = 0
        for start, info in bucket.places:
            length = SIZES[info.dtype]
            for n in info.shape:
                length *= n
            assert start % ALIGNMENT == 0 and start >= end and num_bytes(info) == length
            end = start + length
        assert bucket.num_bytes == end
        assert len(bucket.places) == 1 or bucket.num_bytes <= BUCKET_BYTES
