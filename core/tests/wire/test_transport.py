"""Both transports, over real sockets and real files."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from disks import SharedDisk
from pydantic import ValidationError
from waiting import LIMIT, Clock, until

from prime_rl import ConfigError, WireError
from prime_rl.config.run import TransportConfig
from prime_rl.rundir.launch import Launch
from prime_rl.rundir.machine import free_ports
from prime_rl.wire import transport as module
from prime_rl.wire.sealing import sealed, unsealed
from prime_rl.wire.transport import Receiver, Sender, make_receiver, make_sender, wire_dir


def free_port() -> int:
    """A port that is free right now."""
    return free_ports(1)[0]


def make_launch(transport: str, num_ranks: int = 1, hwm: int = 2) -> Launch:
    """What the supervisor would write."""
    return Launch(
        model_path="",
        served_model_name="",
        engine_urls=[],
        transport_type=transport,
        transport_host="127.0.0.1",
        transport_ports=[free_port() for _ in range(num_ranks)],
        transport_hwm=hwm,
        num_ranks=num_ranks,
    )


class Wire:
    """A sender and the receivers of all ranks."""

    def __init__(self, launch: Launch, run_dir: Path) -> None:
        self.sender: Sender = make_sender(launch, run_dir)
        self.receivers: list[Receiver] = [
            make_receiver(launch, run_dir, rank) for rank in range(launch.num_ranks)
        ]

    async def receive(self, rank: int = 0, timeout: float = LIMIT) -> bytes | None:
        frame = await asyncio.to_thread(self.receivers[rank].receive, timeout)
        return None if frame is None else bytes(frame)

    def close(self) -> None:
        self.sender.close()
        for receiver in self.receivers:
            receiver.close()


@pytest.fixture(params=["zmq", "filesystem"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def wire(transport: str, tmp_path: Path) -> Iterator[Wire]:
    wire = Wire(make_launch(transport), tmp_path)
    yield wire
    wire.close()


async def test_frames_of_any_size_arrive_in_order(wire: Wire) -> None:
    sizes = [0, 1, 2_000_000, 17]
    frames = [bytes([number + 1]) * size for number, size in enumerate(sizes)]

    async def send() -> None:
        for step, frame in enumerate(frames, 9):  # from 9 to 12: files sort by number, not name
            await wire.sender.send(step, [frame])

    sending = asyncio.create_task(send())
    assert [await wire.receive() for _ in frames] == frames
    await sending


async def test_the_sender_waits_while_hwm_batches_are_unread_and_drops_none(wire: Wire) -> None:
    sent: list[int] = []

    async def send() -> None:
        for step in range(1, 7):
            await wire.sender.send(step, [b"%d" % step])
            sent.append(step)

    sending = asyncio.create_task(send())
    await until(lambda: len(sent) >= 2)
    await asyncio.sleep(0.3)
    assert sent == [1, 2]  # hwm is 2
    assert await wire.receive() == b"1"
    await until(lambda: len(sent) >= 3)
    await asyncio.sleep(0.3)
    assert sent == [1, 2, 3]
    assert [await wire.receive() for _ in range(5)] == [b"2", b"3", b"4", b"5", b"6"]
    await sending


async def test_receive_returns_none_without_a_frame(wire: Wire) -> None:
    assert await wire.receive(timeout=0.05) is None


async def test_every_rank_gets_its_own_frame(transport: str, tmp_path: Path) -> None:
    wire = Wire(make_launch(transport, num_ranks=2), tmp_path)
    try:
        await wire.sender.send(1, [b"a1", b"b1"])
        await wire.sender.send(2, [b"a2", b"b2"])
        assert [await wire.receive(1), await wire.receive(1)] == [b"b1", b"b2"]
        assert [await wire.receive(0), await wire.receive(0)] == [b"a1", b"a2"]
        with pytest.raises(WireError, match="step 3: got 1 frames, expected one for each of 2"):
            await wire.sender.send(3, [b"a3"])
    finally:
        wire.close()


async def test_files_are_gone_once_every_rank_has_read(tmp_path: Path) -> None:
    wire = Wire(make_launch("filesystem", num_ranks=2), tmp_path)
    await wire.sender.send(1, [b"a", b"b"])
    assert await wire.receive(0) == b"a"
    assert [path.name for path in wire_dir(tmp_path).rglob("*")] == ["step_1", "rank_1.bin"]
    assert await wire.receive(1) == b"b"
    assert list(wire_dir(tmp_path).iterdir()) == []


async def test_ranks_that_read_at_the_same_time_both_get_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has taken its frame away before either looks whether the folder is empty."""
    wire = Wire(make_launch("filesystem", num_ranks=2), tmp_path)
    await wire.sender.send(1, [b"a", b"b"])
    unlink = Path.unlink

    def at_once(self: Path) -> None:
        for rank in (0, 1):
            unlink(self.with_name(f"rank_{rank}.bin"))
        self.parent.rmdir()

    monkeypatch.setattr(Path, "unlink", at_once)
    assert await wire.receive(0) == b"a"
    assert list(wire_dir(tmp_path).iterdir()) == []


async def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    launch = make_launch("zmq")
    first = make_sender(launch, tmp_path)
    with pytest.raises(WireError, match=f"127.0.0.1:{launch.transport_ports[0]}.*in use"):
        make_sender(launch, tmp_path)
    first.close()


def test_an_unknown_transport_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"rollout_transport.type 'pigeon' is unknown: expected 'filesystem' or 'zmq'",
    ):
        make_sender(make_launch("pigeon"), tmp_path)
    with pytest.raises(ValidationError, match="Input should be 'zmq' or 'filesystem'"):
        TransportConfig(type="pigeon")


async def test_a_disk_that_refuses_a_batch_ends_the_send_with_the_step_and_the_folder(
    tmp_path: Path,
) -> None:
    sender = make_sender(make_launch("filesystem"), tmp_path)
    wire_dir(tmp_path).rmdir()
    wire_dir(tmp_path).touch()
    with pytest.raises(WireError, match=r"cannot write the micro batches of step 1 to .*rollouts"):
        await sender.send(1, [b"a"])


async def test_draining_waits_until_every_frame_is_read(wire: Wire) -> None:
    await wire.sender.drain()  # nothing was sent
    for step in (1, 2):
        await wire.sender.send(step, [b"frame"])
    draining = asyncio.create_task(wire.sender.drain())
    for _ in range(2):
        await asyncio.sleep(0)
        assert not draining.done()
        assert await wire.receive() == b"frame"
    await asyncio.wait_for(draining, 60)


def test_every_flipped_bit_and_every_cut_of_a_frame_is_found() -> None:
    frame = bytes(range(40))
    whole = sealed(frame)
    assert unsealed(whole) == frame
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError, match=r"was damaged on the way.*--resume"):
            unsealed(bytes(damaged))
    for end in range(1, len(whole)):
        with pytest.raises(WireError, match=r"was damaged on the way"):
            unsealed(whole[:end])


async def test_a_frame_that_is_damaged_on_the_disk_is_not_delivered(tmp_path: Path) -> None:
    wire = Wire(make_launch("filesystem"), tmp_path)
    await wire.sender.send(1, [b"frame"])
    path = wire_dir(tmp_path) / "step_1" / "rank_0.bin"
    path.write_bytes(b"F" + path.read_bytes()[1:])
    with pytest.raises(WireError, match=r"a micro batch frame of 5 bytes was damaged"):
        await wire.receive()


async def test_files_that_a_disk_refuses_now_and_then_arrive_once_and_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = Wire(make_launch("filesystem", num_ranks=2, hwm=4), tmp_path)
    for step in range(1, 5):
        await wire.sender.send(step, [b"a%d" % step, b"b%d" % step])

    disk = SharedDisk(monkeypatch, tmp_path)
    waiting = [wire.sender.send(5, [b"a5", b"b5"]), wire.sender.drain()]
    tasks = [asyncio.create_task(each) for each in waiting]
    with disk.refusing():
        assert await wire.receive(0, timeout=0) is None
        await until(lambda: disk.refused > 5)
        # What cannot be seen may be unread.
        assert not any(task.done() for task in tasks)
        for task in tasks:
            task.cancel()

    with disk.refusing(0.5):
        for rank, name in enumerate((b"a", b"b")):
            found = [await wire.receive(rank) for _ in range(4)]
            assert found == [name + b"%d" % step for step in range(1, 5)]

    # Files that the disk refused to remove are not read again.
    for rank in (0, 1):
        assert await wire.receive(rank, timeout=0) is None
    await wire.sender.drain()


def test_a_frame_that_is_never_readable_ends_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes back, and makes the batch again: a wait would have no end."""
    monkeypatch.setattr(module, "time", Clock())
    receiver = module.FileReceiver(tmp_path, rank=0)
    (tmp_path / "step_1").mkdir()
    (tmp_path / "step_1" / "rank_0.bin").write_bytes(b"x")
    disk = SharedDisk(monkeypatch, tmp_path / "step_1" / "rank_0.bin")
    with disk.refusing():
        assert receiver.receive(module.UNREADABLE_SECONDS - 1.0) is None
        with pytest.raises(WireError, match=r"step_1/rank_0.bin cannot be read for 60 s: .*Stale"):
            receiver.receive(10.0)
