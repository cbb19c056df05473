"""Micro batches over real sockets: strangers, and connections that break."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import zmq
from waiting import LIMIT
from zmq.utils import z85

from prime_rl import WireError
from prime_rl.rundir.attempts import PROCESS
from prime_rl.rundir.launch import ADMIN_KEY, Launch
from prime_rl.rundir.machine import free_ports
from prime_rl.wire import sockets
from prime_rl.wire.sockets import (
    FrameReceiver,
    FrameSender,
    know_server,
    sender_keys,
    wire_key,
)

FRAMES = [bytes([number]) * 2_000_000 for number in range(4)]


def launch(port: int) -> Launch:
    return Launch(
        model_path="",
        served_model_name="",
        engine_urls=[],
        transport_type="zmq",
        transport_host="127.0.0.1",
        transport_ports=[port],
    )


async def read_all(receiver: FrameReceiver) -> list[bytes]:
    """As many frames as are sent, and a look at whether one comes twice."""
    found: list[bytes] = []
    while len(found) < len(FRAMES):
        frame = await asyncio.to_thread(receiver.receive, 1.0)
        found += [] if frame is None else [bytes(frame)]
    assert await asyncio.to_thread(receiver.receive, 0.0) is None
    return found


async def send_all(sender: FrameSender) -> None:
    for step, frame in enumerate(FRAMES, 1):
        await sender.send(step, [frame])
    await sender.drain()


async def test_a_stranger_gets_no_frame_and_takes_none_away(monkeypatch, caplog, tmp_path):
    """Without any key, with a wrong one, and with that of an earlier attempt."""
    monkeypatch.setenv(PROCESS, f"2:orchestrator:{tmp_path}")
    monkeypatch.setenv(ADMIN_KEY, "secret")
    (port,) = free_ports(1)
    sender = FrameSender(launch(port))
    monkeypatch.setenv(PROCESS, f"1:trainer:{tmp_path}")
    late = FrameReceiver(launch(port), 0)
    monkeypatch.setenv(PROCESS, f"2:trainer:{tmp_path}")
    monkeypatch.setenv(ADMIN_KEY, "guess")
    wrong = FrameReceiver(launch(port), 0)
    monkeypatch.setenv(ADMIN_KEY, "secret")
    sending = asyncio.create_task(send_all(sender))
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(f"tcp://127.0.0.1:{port}")
        for request in ([b"0"], [b"9"], [b"0", b"7"], [b""], [wire_key(), b"0"]):
            stranger.send_multipart(request)
        with caplog.at_level(logging.WARNING):
            while not caplog.records:  # the sender has seen the stranger before the rank asks
                await asyncio.sleep(0.01)
        receiver = FrameReceiver(launch(port), 0)
        assert await read_all(receiver) == FRAMES
        await sending
        assert not stranger.poll(0)
        assert late.receive(0.0) is None and wrong.receive(0.0) is None
    for each in (receiver, late, wrong, sender):
        each.close()
    (record,) = caplog.records
    assert f"connects to tcp://127.0.0.1:{port}" in record.getMessage()


SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
NULL, CURVE = b"NULL".ljust(20, b"\0"), b"CURVE".ljust(20, b"\0")
READY = b"\x04\x26\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\0\0"
PART = b"\x01\xc8" + bytes(200)
"""A part of a message that says that more follow."""


@pytest.mark.parametrize(
    ("start", "part"),
    [
        (SIGNATURE + b"\x03\x00" + NULL + bytes(32) + READY, PART),
        (SIGNATURE + b"\x03\x00" + NULL + bytes(32), PART),
        (SIGNATURE + b"\x03\x01" + CURVE + bytes(32), PART),
        (SIGNATURE + b"\x03\x01" + CURVE + bytes(32), b"\x04\xc8" + bytes(200)),
        (SIGNATURE + b"\x03\x01" + CURVE + bytes(32), b"\x04\xc8\x05HELLO" + bytes(194)),
        (SIGNATURE + b"\x01\x05\x00\x00", PART),
        (b"\x01\x00", b"\xc9\x01" + bytes(200)),
        (b"", b"GET / HTTP/1.1\r\n"),
    ],
    ids=["null", "no ready", "curve", "command", "hello", "version 2", "version 1", "http"],
)
async def test_a_peer_without_the_key_cannot_fill_the_memory(start: bytes, part: bytes) -> None:
    """Its message has no end: the connection is ended, before more than buffers are full."""
    (port,) = free_ports(1)
    sender = FrameSender(launch(port))
    sending = asyncio.create_task(send_all(sender))
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(start)
    sent = 0
    with pytest.raises(OSError):
        while sent < 64 * 2**20:
            writer.write(part * 1000)
            await writer.drain()
            sent += len(part) * 1000
    writer.transport.abort()
    receiver = FrameReceiver(launch(port), 0)
    assert await read_all(receiver) == FRAMES
    await sending
    receiver.close()
    sender.close()


async def test_neither_the_key_nor_a_frame_travels_in_clear(monkeypatch) -> None:
    monkeypatch.setenv(ADMIN_KEY, "secret")
    (port,) = free_ports(1)
    seen = bytearray()
    sender = FrameSender(launch(port))
    async with breaking(port, [], seen) as relayed:
        receiver = FrameReceiver(launch(relayed), 0)
        await asyncio.to_thread(receiver.announce, 7)
        sending = asyncio.create_task(send_all(sender))
        assert await read_all(receiver) == FRAMES
        await sending
        receiver.close()
    sender.close()
    assert len(seen) > sum(map(len, FRAMES))
    public, secret = sender_keys()
    for hidden in (wire_key(), public, secret, z85.decode(public), FRAMES[3][:64]):
        assert hidden not in seen


async def test_a_process_in_the_place_of_the_sender_cannot_give_frames() -> None:
    """Who binds the port first gets no request, and what it sends is not read."""
    (port,) = free_ports(1)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as impostor:
        impostor.linger = 0
        impostor.bind(f"tcp://127.0.0.1:{port}")
        events = impostor.get_monitor_socket(zmq.EVENT_ACCEPTED)
        receiver = FrameReceiver(launch(port), 0)
        assert await asyncio.to_thread(events.poll, 60_000)
        assert await asyncio.to_thread(receiver.receive, 1.0) is None
        assert not impostor.poll(0)
        receiver.close()
        impostor.disable_monitor()
        events.close()


@asynccontextmanager
async def breaking(
    port: int, after: list[int], seen: bytearray | None = None
) -> AsyncIterator[int]:
    """A relay to ``port`` that breaks its first connections when so many bytes have come back on
    each. ``seen`` gets what it passes on."""
    breaks, relays = iter(after), set[asyncio.Task[None] | None]()

    async def pump(reader, writer, limit: float) -> None:
        count = 0
        while data := await reader.read(65_536):
            count += len(data)
            if seen is not None:
                seen.extend(data)
            if count > limit:
                break
            writer.write(data)
            await writer.drain()

    async def relay(reader, writer) -> None:
        relays.add(asyncio.current_task())
        limit = next(breaks, float("inf"))
        with suppress(OSError):
            above, to = await asyncio.open_connection("127.0.0.1", port)
            pumps = [pump(reader, to, float("inf")), pump(above, writer, limit)]
            _, rest = await asyncio.wait(
                map(asyncio.ensure_future, pumps), return_when=asyncio.FIRST_COMPLETED
            )
            for task in rest:
                task.cancel()
            for each in (writer, to):
                each.transport.abort()

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()
    await asyncio.gather(*filter(None, relays))
    await asyncio.sleep(0)  # an aborted transport closes its socket in the next round
    assert next(breaks, None) is None  # each has happened


async def test_a_connection_that_breaks_loses_no_frame() -> None:
    """In the handshake, within a frame, and between an answer and the next request."""
    (port,) = free_ports(1)
    sender = FrameSender(launch(port))
    async with breaking(port, [40, 1_000_000, 2_500_000]) as relayed:
        receiver = FrameReceiver(launch(relayed), 0)
        sending = asyncio.create_task(send_all(sender))
        assert await read_all(receiver) == FRAMES
        await sending
        receiver.close()
    sender.close()


async def test_a_request_that_is_too_long_ends_its_connection_only() -> None:
    (port,) = free_ports(1)
    sender, receiver = FrameSender(launch(port)), FrameReceiver(launch(port), 0)
    sending = asyncio.create_task(send_all(sender))
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        know_server(stranger, sender_keys()[0])  # else the handshake fails, and `send` may wait
        stranger.connect(f"tcp://127.0.0.1:{port}")
        stranger.send(bytes(10_000_000))
        assert await read_all(receiver) == FRAMES
        await sending
    receiver.close()
    sender.close()


async def test_a_sender_that_cannot_answer_any_more_raises_its_error() -> None:
    """Instead of a wait for ever: in ``send`` with no room left, and in ``drain``."""
    (port,) = free_ports(1)
    sender = FrameSender(launch(port))
    for step in range(sender.hwm):
        await sender.send(step, [b"frame"])
    waiting = asyncio.create_task(sender.send(sender.hwm, [b"frame"]))
    with zmq.Context() as context, context.socket(zmq.DEALER) as rank:
        rank.linger = 0
        rank.curve_serverkey, _ = sender_keys()
        rank.curve_publickey, rank.curve_secretkey = zmq.curve_keypair()
        rank.connect(f"tcp://127.0.0.1:{port}")
        rank.send(b"two")  # of another make: it has the key
        for work in (waiting, sender.drain()):
            with pytest.raises(WireError, match=f"from tcp://127.0.0.1:{port}: .*b'two'") as raised:
                async with asyncio.timeout(LIMIT):
                    await work
            assert isinstance(raised.value.__cause__, ValueError)
    sender.close()


async def test_a_rank_that_never_reads_ends_the_wait_for_it(monkeypatch) -> None:
    monkeypatch.setattr(sockets, "DRAIN_SECONDS", 0.05)
    (port,) = free_ports(1)
    sender = FrameSender(launch(port))
    await sender.send(1, [b"frame"])
    with pytest.raises(WireError, match=r"has not read .* no sign of life for 0\.05 s"):
        await sender.drain()
    sender.close()


async def test_a_rank_that_reads_late_is_waited_for_while_the_trainer_beats(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sockets, "DRAIN_SECONDS", 0.01)
    looks = []

    def last_beat(path: Path) -> int:
        looks.append(path)
        return len(looks)

    monkeypatch.setattr(sockets, "last_beat", last_beat)
    (port,) = free_ports(1)
    sender = FrameSender(launch(port), tmp_path / "trainer.json")
    await sender.send(1, [b"frame"])
    draining = asyncio.create_task(sender.drain())
    while len(looks) < 10:
        await asyncio.sleep(0.01)
    assert not draining.done()
    monkeypatch.setattr(sockets, "last_beat", lambda path: 0)  # it hangs
    with pytest.raises(WireError, match="no sign of life"):
        await draining
    assert {*looks} == {tmp_path / "trainer.json"}
    sender.close()


async def test_an_announcement_wakes_the_orchestrator(monkeypatch, caplog) -> None:
    """It looks at the files no sooner than that; and again soon if the disk is late. A process
    without the key wakes no one. Frames go on beside it."""
    monkeypatch.setattr(sockets, "LOOK_SECONDS", 3600.0)
    monkeypatch.setenv(ADMIN_KEY, "secret")
    (port,) = free_ports(1)
    sender, receiver = FrameSender(launch(port)), FrameReceiver(launch(port), 0)
    sending = asyncio.create_task(send_all(sender))
    looking = asyncio.create_task(sender.announced(6))
    monkeypatch.setenv(ADMIN_KEY, "guess")
    stranger = FrameReceiver(launch(port), 0)
    with caplog.at_level(logging.WARNING):
        stranger.announce(7)
        while not caplog.records:
            await asyncio.sleep(0.01)
    assert await read_all(receiver) == FRAMES and not looking.done()
    await asyncio.to_thread(receiver.announce, 7)  # from a thread that writes files
    async with asyncio.timeout(60):
        await looking
        await sender.announced(6)  # at once: 7 is there, but did not show
    late = asyncio.create_task(sender.announced(7))
    receiver.announce(8)
    async with asyncio.timeout(60):
        await late
        await sending
    for each in (receiver, stranger, sender):
        each.close()
