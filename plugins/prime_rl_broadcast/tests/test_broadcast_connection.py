"""Weights from memory to memory: every tensor arrives unchanged, or no member takes any."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
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
from prime_rl.rundir.attempts import PROCESS
from prime_rl.rundir.directory import new_attempt
from prime_rl.rundir.launch import ADMIN_KEY
from prime_rl_broadcast import connection as connection_module
from prime_rl_broadcast.connection import (
    ALIGNMENT,
    BUCKET_BYTES,
    Member,
    buckets,
    header_of,
    num_bytes,
)
from prime_rl_broadcast.group import (
    BroadcastGroup,
    TensorInfo,
    decline,
    opened,
)

CPU = torch.device("cpu")
Stream = Iterator[tuple[str, Tensor]]
NewGroup = Callable[..., BroadcastGroup]


@pytest.fixture(params=["gloo", "ipc"])
def new_group(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> NewGroup:
    """Makes broadcasts of one group, for rank 0."""
    monkeypatch.setenv(ADMIN_KEY, "the run's key")
    (tmp_path / "group").mkdir()
    number = iter(range(9))

    def make(size: int, timeout: float = LIMIT, group: str = "group") -> BroadcastGroup:
        folder = tmp_path / f"meeting_{next(number)}"
        folder.mkdir()
        (tmp_path / group).mkdir(exist_ok=True)
        return BroadcastGroup(
            directory=str(folder),
            group=str(tmp_path / group),
            backend=request.param,
            rank=0,
            world_size=size,
            timeout=timeout,
            loopback=True,
        )

    return make


class Worker:
    """An engine's worker: keeps what it receives."""

    def __init__(self, rank: int, refuses: str | None = None, fails: bool = False) -> None:
        self.rank, self.refuses, self.fails = rank, refuses, fails
        self.member = Member()
        self.got: dict[str, Tensor] = {}

    def take(self, group: BroadcastGroup) -> None:
        with self.member.join(group.for_worker(self.rank), CPU) as connection:
            connection.receive(lambda header: self.refuses, self.use)

    def use(self, stream: Stream) -> None:
        if self.fails:
            self.got = dict([next(stream)])
            raise ValueError("no memory")
        self.got = dict(stream)


def send(
    member: Member,
    group: BroadcastGroup,
    tensors: Mapping[str, Tensor],
    rounded: Mapping[str, torch.dtype] | None = None,
) -> None:
    with member.join(group, CPU) as connection:
        connection.send(header_of(tensors, rounded or {}), tensors.values())


def broadcast(
    sender: Member, group: BroadcastGroup, tensors: Mapping[str, Tensor], *workers: Worker
) -> list[Exception | None]:
    """The error, or None, of the sender and of each worker."""
    with ThreadPoolExecutor(1 + len(workers)) as pool:
        futures: list[Future[None]] = [pool.submit(send, sender, group, tensors)]
        futures += [pool.submit(worker.take, group) for worker in workers]
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
    new_group: NewGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "BUCKET_BYTES", 100)  # "large" is many times that
    tensors, workers = some_tensors(), [Worker(1), Worker(2)]
    assert broadcast(Member(), new_group(3), tensors, *workers) == [None] * 3
    for worker in workers:
        assert list(worker.got) == list(tensors)
        for name, tensor in tensors.items():
            assert worker.got[name].dtype == tensor.dtype
            assert torch.equal(worker.got[name], tensor), name


def test_a_tensor_is_rounded_to_the_type_of_the_header(
    new_group: NewGroup,
) -> None:
    """1 + 2^-9 lies between the bfloat16 numbers 1 and 1 + 2^-7, nearer to 1."""
    tensors = {"a": torch.tensor([1 + 2**-9, -3.0]), "b": torch.tensor([1 + 2**-9])}
    group, worker = new_group(2), Worker(1)
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(worker.take, group)
        send(Member(), group, tensors, {"a": torch.bfloat16})
        taking.result()
    assert worker.got["a"].dtype == torch.bfloat16 and worker.got["a"].tolist() == [1.0, -3.0]
    assert torch.equal(worker.got["b"], tensors["b"])


def test_members_stay_connected_between_broadcasts(
    new_group: NewGroup,
) -> None:
    sender, worker = Member(), Worker(1)
    assert broadcast(sender, new_group(2), {"a": torch.zeros(1)}, worker) == [None, None]
    kept = worker.member._connection
    assert broadcast(sender, new_group(2), {"a": torch.ones(1)}, worker) == [None, None]
    assert worker.member._connection is kept and worker.got["a"].tolist() == [1.0]


def test_if_one_member_refuses_no_member_takes_anything(
    new_group: NewGroup,
) -> None:
    willing, refusing = Worker(1), Worker(2, refuses="'b' is missing")
    errors = broadcast(Member(), new_group(3), some_tensors(), willing, refusing)
    assert [str(error) for error in errors] == ["rank 2 of the broadcast: 'b' is missing"] * 3
    assert all(isinstance(error, WeightsError) for error in errors)
    assert not willing.got and not refusing.got


def test_a_member_that_fails_while_receiving_is_reported_to_the_sender_only(
    new_group: NewGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "BUCKET_BYTES", 100)
    sound, failing = Worker(1), Worker(2, fails=True)
    sent, received, failed = broadcast(Member(), new_group(3), some_tensors(), sound, failing)
    assert isinstance(sent, WeightsError) and "rank 2 of the broadcast: ValueError" in str(sent)
    assert isinstance(failed, ValueError) and received is None
    assert torch.equal(sound.got["last"], some_tensors()["last"])
    assert sound.member._connection is None  # the failed member has left it


def test_a_kept_error_does_not_keep_received_tensors_alive(
    new_group: NewGroup,
) -> None:
    """A bucket may be gigabytes of GPU memory, and a logged error may live long."""
    worker, came = Worker(1), list["weakref.ref[Tensor]"]()

    def use(stream: Stream) -> None:
        _, tensor = next(stream)
        came.append(weakref.ref(tensor))
        raise ValueError("no memory")

    worker.use = use  # type: ignore[method-assign]
    sent, failed = broadcast(Member(), new_group(2), some_tensors(), worker)
    assert isinstance(sent, WeightsError) and isinstance(failed, ValueError)
    assert [tensor() for tensor in came] == [None]


TAKES = """
import os, sys, torch, msgspec
from prime_rl_broadcast.connection import Member
from prime_rl_broadcast.group import BroadcastGroup
group = msgspec.json.decode(sys.argv[1], type=BroadcastGroup)
with Member().join(group, torch.device("cpu")) as connection:
    connection.receive(lambda header: None, eval(sys.argv[2]))
"""


def test_a_member_that_dies_is_an_error_for_the_sender(
    new_group: NewGroup,
) -> None:
    """Gloo does not tell the other receiver, which waits until its timeout."""
    group = new_group(3)
    members = [
        warm.Popen([sys.executable, "-c", TAKES, order, use])
        for order, use in (
            (msgspec.json.encode(group.for_worker(1)).decode(), "dict"),
            (msgspec.json.encode(group.for_worker(2)).decode(), "lambda stream: os._exit(0)"),
        )
    ]
    try:
        large = {"large": torch.zeros(2**24)}  # more than a socket holds
        with pytest.raises(WeightsError, match="the broadcast failed"):
            send(Member(), group, large)
        assert members[1].wait(LIMIT) == 0
    finally:
        for member in members:
            member.kill()
            member.wait()


def test_an_abort_releases_a_waiting_member(new_group: NewGroup) -> None:
    group, worker = new_group(2), Worker(1)
    timer = threading.Timer(0.05, group.abort, ["engine b is gone"])
    timer.start()
    with pytest.raises(WeightsError, match="aborted: engine b is gone"):
        worker.take(group)
    timer.join()


def test_an_orchestrator_that_is_replaced_releases_the_members_that_wait(
    new_group: NewGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new attempt begins before the old processes end; the engines serve both."""
    group, worker = new_group(2), Worker(1)
    new_attempt(tmp_path)
    monkeypatch.setenv(PROCESS, f"1:orchestrator:{tmp_path}")
    group.abort("the run ends")
    group.abort("again")
    monkeypatch.delenv(PROCESS)
    with pytest.raises(WeightsError, match="aborted: the run ends"):
        worker.take(group)


@pytest.mark.parametrize("over", ["aborted: the run ends", "is gone|No such file"])
def test_a_member_does_not_wait_for_one_that_has_died_before_it_connected(
    new_group: NewGroup, over: str
) -> None:
    """Nor does it once the next attempt has removed the broadcast."""
    group, worker = new_group(2, timeout=2.0), Worker(1)
    if group.backend == "ipc":
        return  # it connects by these files

    def end() -> None:
        group.wait_for_all("gloo, connecting")  # all are ready: the last thing that it does
        group.abort("the run ends") if "aborted" in over else shutil.rmtree(group.directory)

    ending = threading.Thread(target=end)
    ending.start()
    with pytest.raises(WeightsError, match=over):
        worker.take(group)
    ending.join()


def test_a_member_does_not_wait_in_a_broadcast_that_another_attempt_has_removed(
    new_group: NewGroup,
) -> None:
    """Its orchestrator was killed, and could not abort it."""
    group, worker = new_group(2), Worker(1)

    def end() -> None:
        while not (Path(group.directory) / "here_1").exists():
            pass
        shutil.rmtree(group.directory)

    ending = threading.Thread(target=end)
    ending.start()
    with pytest.raises(WeightsError, match="is gone: another attempt has begun"):
        worker.take(group)
    ending.join()


def test_a_timeout_names_the_missing_ranks(new_group: NewGroup) -> None:
    with pytest.raises(WeightsError, match=r"rank 0, 2 of 3 is not ready after 0.05 s"):
        Worker(1).take(new_group(3, timeout=0.05))


def test_a_restarted_member_is_noticed_before_any_member_connects(
    new_group: NewGroup,
) -> None:
    sender = Member()
    assert broadcast(sender, new_group(2), {"a": torch.zeros(1)}, Worker(1)) == [None, None]
    group = new_group(2)
    errors = broadcast(sender, group, {"a": torch.zeros(1)}, Worker(1))
    assert all(f"{group.backend}, connecting" in str(error) for error in errors)
    fresh = new_group(2, group="another")
    assert broadcast(sender, fresh, {"a": torch.zeros(1)}, Worker(1)) == [None, None]


def test_a_group_is_opened_or_declined_but_not_both(tmp_path: Path, new_group: NewGroup) -> None:
    group = new_group(2)
    assert opened(tmp_path) is None
    assert group.open(tmp_path) and opened(tmp_path) == group
    assert not decline(tmp_path) and opened(tmp_path) == group
    other = tmp_path / "other"
    other.mkdir()
    assert decline(other) and not group.open(other) and opened(other) is None


def test_members_on_one_machine_listen_on_loopback_others_on_their_own_address(
    new_group: NewGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, elsewhere = new_group(2), msgspec.structs.replace(new_group(2), loopback=False)
    monkeypatch.setenv("PRIME_RL_NODE_ADDRESS", "192.0.2.7")
    assert connection_module._own_address(here) == "127.0.0.1"
    assert connection_module._own_address(elsewhere) == "192.0.2.7"
    monkeypatch.delenv("PRIME_RL_NODE_ADDRESS")
    assert connection_module._own_address(elsewhere) == connection_module.own_address()


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
def test_buckets_hold_every_tensor_once_in_order_within_their_limit(header: Any) -> None:
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


@pytest.mark.parametrize(("version", "blocking"), [((2, 26, 5), None), ((2, 27), 0)])
def test_connecting_by_nccl_has_a_time_limit(
    version: tuple[int, ...],
    blocking: int | None,
    new_group: NewGroup,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What torch is asked for: a CPU build has no NCCL."""
    asked: list[Any] = []

    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace(blocking=None)

    class Group:
        def __init__(self, *arguments: Any) -> None:
            asked.extend([*arguments, os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"]])

    Group.Options = Options  # type: ignore[attr-defined]
    monkeypatch.delenv("TORCH_NCCL_NONBLOCKING_TIMEOUT", raising=False)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    group = msgspec.structs.replace(new_group(2, timeout=90.5), backend="nccl")
    with connection_module._nccl_environment(group):
        connection_module._connect(group, "store")
    store, rank, size, options, seconds = asked
    assert (store, rank, size, seconds) == ("store", 0, 2, "91")
    assert options._timeout.total_seconds() == 90.5
    assert options.config.blocking == blocking
    assert "TORCH_NCCL_NONBLOCKING_TIMEOUT" not in os.environ
