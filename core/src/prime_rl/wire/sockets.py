"""Micro batches by ZMQ: ``rollout_transport.type = "zmq"``. Nothing here imports torch.

    receiver ------[n]----> sender: the rank has read frames 0 .. n - 1 and wants frame n
    receiver <--[n, frame]-- sender
    rank 0 --[n, version]--> sender: weights of this version are complete

A receiver asks again every second. The sender answers a connection once per frame. If a connection
breaks, the next one asks for the frame again. An announcement that is lost delays a version by
``LOOK_SECONDS``: its files are the record.

Connections are encrypted (CURVE). Both ends derive the sender's key pair from the run's key, so its
public half is a secret too. A peer without it cannot complete the handshake, neither as receiver
nor as sender. Nothing else is read from such a peer.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from prime_rl import WireError
from prime_rl.rundir.attempts import identity
from prime_rl.rundir.launch import ADMIN_KEY, Launch
from prime_rl.rundir.status import last_beat
from prime_rl.wire.sealing import check_num_frames, sealed, unsealed

log = logging.getLogger(__name__)

ASK_SECONDS = 1.0
HEARTBEAT_MS = 10_000
"""A connection without a sign of life for this long is made again."""
LINGER_MS = 1000
"""How long a receiver that closes tries to tell what it has read, or announces a version."""
DRAIN_SECONDS = 1800.0
"""How long the trainer may give no sign of life, while a rank has frames to read at the end of the
run: it may be in a step, or write a checkpoint."""
LOOK_SECONDS = 1.0
"""Between two looks at the files of versions, while none is announced."""
SHOWN_SECONDS = 0.02
"""The same after an announcement, until the disk shows the version."""
MOST_ASKED = 512
"""Bytes of a request, or of a part of the handshake: a longer one ends its connection."""
STRANGERS = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


def wire_key() -> bytes:
    """The key of this attempt at the run, derived from the run's admin key. A process of an earlier
    attempt has another key."""
    process = identity(os.environ)
    text = ""
    if process is not None:
        attempt, _, run_dir = process
        text = f"{attempt}:{run_dir}"
    return hmac.digest(os.environ.get(ADMIN_KEY, "").encode(), text.encode(), "sha256")


def sender_keys() -> tuple[bytes, bytes]:
    """The sender's public and secret key. Raises ``WireError`` if this libzmq cannot encrypt."""
    if not zmq.has("curve"):
        raise WireError(
            'rollout_transport.type = "zmq" needs a libzmq with CURVE, which this pyzmq '
            f"({zmq.__version__}, libzmq {zmq.zmq_version()}) lacks. Install pyzmq from its wheel, "
            'or set rollout_transport.type = "filesystem".'
        )
    return curve_keys(wire_key())


def curve_keys(key: bytes) -> tuple[bytes, bytes]:
    """The public and the secret key of a CURVE server, from 32 secret bytes that both ends know."""
    secret = z85.encode(key)
    return zmq.curve_public(secret), secret


def know_server(socket: zmq.Socket[Any], public: bytes) -> None:
    """Have a client encrypt, with a key pair of its own, and for the server with this key only."""
    socket.curve_serverkey = public
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()


class FrameSender:
    """Binds one port per rank. ``send`` waits for a rank that has not connected yet."""

    def __init__(self, launch: Launch, trainer: Path | None = None) -> None:
        """``trainer``: its status, whose beats are signs of life; None: only that it reads."""
        self._trainer = trainer
        self.hwm = launch.transport_hwm
        _, secret = sender_keys()

        self._context = zmq.asyncio.Context()
        self._outboxes: list[Outbox] = []
        self._news = News()
        self._serving: list[asyncio.Task[None]] = []
        for port in launch.transport_ports:
            socket = self._context.socket(zmq.ROUTER)
            socket.heartbeat_ivl = HEARTBEAT_MS
            socket.maxmsgsize = MOST_ASKED
            socket.curve_server = 1
            socket.curve_secretkey = secret

            address = f"tcp://{launch.transport_host}:{port}"
            try:
                socket.bind(address)
            except zmq.ZMQError as error:
                self.close()
                raise WireError(
                    f"cannot send micro batches from {address}: {error}. "
                    "Leave rollout_transport.port out to get a free port."
                ) from error

            self._outboxes.append(Outbox(socket, address, self._news))

    async def send(self, step: int, frames: Sequence[bytes]) -> None:
        check_num_frames(step, frames, len(self._outboxes))
        if not self._serving:
            self._serving = [asyncio.create_task(outbox.serve()) for outbox in self._outboxes]
            self._serving += [asyncio.create_task(outbox.watch()) for outbox in self._outboxes]

        for outbox, frame in zip(self._outboxes, frames, strict=True):
            # With this frame at most `hwm` are unread.
            await outbox.wait(self.hwm - 1)
            await outbox.put(sealed(frame))

    async def drain(self) -> None:
        """See ``Sender.drain``. Raises ``WireError`` after ``DRAIN_SECONDS`` without a beat of the
        trainer and without a frame that it read."""
        for outbox in self._outboxes:
            while outbox.num_unread:
                before = (outbox.num_unread, self._last_beat())
                try:
                    async with asyncio.timeout(DRAIN_SECONDS):
                        await outbox.wait(0)
                except TimeoutError:
                    # A frame read or a beat restarts the timeout: a step may be long.
                    if (outbox.num_unread, self._last_beat()) != before:
                        continue

                    raise WireError(
                        "the trainer has not read its last micro batches from "
                        f"{outbox.address}, and has given no sign of life for "
                        f"{DRAIN_SECONDS:g} s. See logs/latest/trainer.log, and go on with "
                        "--resume."
                    ) from None

    def _last_beat(self) -> int | None:
        return None if self._trainer is None else last_beat(self._trainer)

    async def announced(self, after: int) -> None:
        await self._news.wait(after)

    def close(self) -> None:
        for task in self._serving:
            task.cancel()
        self._context.destroy(linger=0)


class News:
    """The newest version of the weights that the trainer has announced."""

    def __init__(self) -> None:
        self._version = -1
        self._changed = asyncio.Event()

    def hear(self, version: int) -> None:
        # Announcements use separate connections, so an older one may arrive last.
        self._version = max(self._version, version)
        self._changed.set()

    async def wait(self, after: int) -> None:
        """Until one later than ``after`` is announced; for a moment if it is already."""
        if self._version > after:
            await asyncio.sleep(SHOWN_SECONDS)
            return

        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_SECONDS):
                await self._changed.wait()


class Outbox:
    """The frames of one rank that it has not read."""

    def __init__(self, socket: zmq.asyncio.Socket, address: str, news: News) -> None:
        self._socket = socket
        self.address = address
        self._strangers = socket.get_monitor_socket(STRANGERS)
        self._news = news

        self._unread: deque[bytes] = deque()
        self._num_read = 0
        self._peer = b""
        self._sent = -1
        """The connection that asked last, and the last frame that it got."""

        self._read = asyncio.Condition()
        self._failure: Exception | None = None
        """What ended ``serve``."""

    @property
    def num_unread(self) -> int:
        return len(self._unread)

    async def put(self, frame: bytes) -> None:
        self._unread.append(frame)
        await self._answer()

    async def wait(self, unread: int) -> None:
        """Until the rank has at most ``unread`` frames to read. Raises ``WireError`` if no request
        is answered any more."""
        async with self._read:
            await self._read.wait_for(lambda: self._failure or len(self._unread) <= unread)
        if self._failure is not None:
            cause = f"{type(self._failure).__name__}: {self._failure}"
            raise WireError(
                f"no micro batch can be sent from {self.address}: the task that answers the "
                f"trainer's requests ended ({cause}). Go on with --resume."
            ) from self._failure

    async def serve(self) -> None:
        """Answer what the rank asks, until it is cancelled."""
        try:
            await self._serve()
        except Exception as error:
            async with self._read:
                self._failure = error
                self._read.notify_all()

    async def _serve(self) -> None:
        while True:
            peer, *asked = await self._socket.recv_multipart()
            if len(asked) == 2:  # on a connection of its own, which gets no frames
                self._news.hear(int(asked[1]))
                continue

            (number,) = asked
            # The frame on the old connection may be lost, so it is sent again on this one.
            if peer != self._peer:
                self._peer = peer
                self._sent = -1

            # A request for frame n confirms the frames before it.
            while self._unread and self._num_read < int(number):
                self._unread.popleft()
                self._num_read += 1

            async with self._read:
                self._read.notify_all()
            await self._answer()

    async def _answer(self) -> None:
        """Send the next frame, unless this connection has got it."""
        if self._peer and self._unread and self._sent < self._num_read:
            number = self._num_read
            # Set before the await: `put` and `_serve` must not both send the frame.
            self._sent = number
            message = [self._peer, b"%d" % number, self._unread[0]]
            await self._socket.send_multipart(message, copy=False)

    async def watch(self) -> None:
        """Say once that there are peers without the key."""
        await recv_monitor_message(self._strangers)
        log.warning(
            "a process without this run's key connects to %s, the port of micro batches: it is "
            "refused",
            self.address,
        )


class FrameReceiver:
    """Connects to the orchestrator, which may not have bound its port yet."""

    def __init__(self, launch: Launch, rank: int) -> None:
        self._next = 0
        self._asked = 0.0
        self._context = zmq.Context()
        self._address = f"tcp://{launch.transport_host}:{launch.transport_ports[rank]}"
        self._sender_key, _ = sender_keys()
        self._socket = self._encrypted_socket()
        self._socket.heartbeat_ivl = HEARTBEAT_MS
        self._socket.immediate = 1  # ask on a connection that stands
        self._socket.connect(self._address)

    def receive(self, timeout: float) -> memoryview | None:
        end = time.monotonic() + timeout
        while True:
            now = time.monotonic()
            if now >= self._asked + ASK_SECONDS:
                self._ask()

            if not self._socket.poll(int(1000 * max(0.0, min(end - now, ASK_SECONDS)))):
                if now >= end:
                    return None
                continue

            number, frame = self._socket.recv_multipart(copy=False)
            if int(number.bytes) == self._next:  # otherwise it came on two connections
                self._next += 1  # the next request confirms it
                self._ask()
                return unsealed(frame.buffer)

    def announce(self, version: int) -> None:
        with self._encrypted_socket() as socket:  # another's may not leave its thread
            socket.linger = LINGER_MS
            socket.connect(self._address)
            socket.send_multipart([b"%d" % self._next, b"%d" % version])

    def _encrypted_socket(self) -> zmq.Socket[bytes]:
        """A socket with a key pair of its own, for the sender with the run's key only."""
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        know_server(socket, self._sender_key)
        return socket

    def _ask(self) -> None:
        with suppress(zmq.Again):  # not connected: again in a moment
            self._socket.send(b"%d" % self._next, zmq.NOBLOCK)
            self._asked = time.monotonic()

    def close(self) -> None:
        self._context.destroy(linger=LINGER_MS)
