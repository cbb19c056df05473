"""Micro batches by ZMQ: ``rollout_transport.type = "zmq"``. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Sequence

import zmq
import zmq.asyncio

from prime_rl import WireError
from prime_rl.rundir.launch import Launch
from prime_rl.wire.transport import check_num_frames, sealed, unsealed


class FrameSender:
    """Binds one port per rank. ``send`` waits for a rank that has not connected yet.

    ZMQ bounds the bytes in flight and not the batches, so the receiver acknowledges each frame with
    an empty one.
    """

    def __init__(self, launch: Launch) -> None:
        self.hwm = launch.transport_hwm
        self._context = zmq.asyncio.Context()
        self._sockets: list[zmq.asyncio.Socket] = []
        self._unread = [0] * len(launch.transport_ports)
        for port in launch.transport_ports:
            socket = self._context.socket(zmq.DEALER)
            socket.linger = 0
            address = f"tcp://{launch.transport_host}:{port}"
            try:
                socket.bind(address)
            except zmq.ZMQError as error:
                socket.close()
                self.close()
                raise WireError(
                    f"cannot send micro batches from {address}: {error}. "
                    "Leave rollout_transport.port out to get a free port."
                ) from error
            self._sockets.append(socket)

    async def send(self, step: int, frames: Sequence[bytes]) -> None:
        check_num_frames(step, frames, len(self._sockets))
        for rank, frame in enumerate(frames):
            await self._wait(rank, self.hwm - 1)
            await self._sockets[rank].send(sealed(frame), copy=False)
            self._unread[rank] += 1

    async def drain(self) -> None:
        for rank in range(len(self._sockets)):
            await self._wait(rank, 0)

    async def _wait(self, rank: int, unread: int) -> None:
        """Until the rank has at most ``unread`` frames to read."""
        while self._unread[rank] > unread:
            await self._sockets[rank].recv()
            self._unread[rank] -= 1

    def close(self) -> None:
        self._context.destroy(linger=0)


class FrameReceiver:
    """Connects to the orchestrator, which may not have bound its port yet."""

    def __init__(self, launch: Launch, rank: int) -> None:
        host, port = launch.transport_host, launch.transport_ports[rank]
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(f"tcp://{host}:{port}")

    def receive(self, timeout: float) -> memoryview | None:
        if not self._socket.poll(int(timeout * 1000)):
            return None
        frame = self._socket.recv(copy=False)  # a view of ZMQ's buffer
        self._socket.send(b"")
        return unsealed(frame.buffer)

    def close(self) -> None:
        self._context.destroy(linger=0)
