"""Weights to engines on the trainer's machine, through memory that both sides see.

    rank 0     fill memory -> "bucket n is in memory m" ...... wait for the answers -> fill it again
    others                     copy it into memory of their own -> "done"

The processes find each other at a Unix socket in Linux' abstract name space: it has no file, so a
process that is killed leaves none. Both ends prove that they know the run's key before anything
else is said. The memory is shared for the length of one broadcast (``shared_memory.py``).
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import torch
from torch import Tensor

from prime_rl import Header, WeightsError
from prime_rl.rundir.launch import ADMIN_KEY
from prime_rl_broadcast.connection import Connection, buckets
from prime_rl_broadcast.group import BroadcastGroup
from prime_rl_broadcast.shared_memory import (
    CudaMemory,
    HostMemory,
    OpenedCuda,
    OpenedHost,
    has_driver,
)

CONNECT_SECONDS = 0.005
"""Between two attempts to connect, until rank 0 listens."""
NONCE = 32
"""Bytes of the random numbers that proofs are of."""
PROOF = 32
RANK = 8
HOST = torch.device("cpu")


class _Shared(msgspec.Struct):
    """What rank 0 announces."""

    header: Header
    on_gpu: bool
    """Whether the memory is a GPU's; else descriptors of the host's come with this."""
    handles: list[bytes]


class IpcConnection(Connection):
    """Rank 0 has a socket for each other member, which has one for rank 0."""

    def __init__(self, group: BroadcastGroup, device: torch.device) -> None:
        """Connect. All members must do so at the same time. Raises ``WeightsError``."""
        super().__init__(group, device)
        self._memories: list[HostMemory | CudaMemory] = []
        """On rank 0: the memories that this broadcast shares."""
        self._filled = 0
        """On rank 0: number of announced buckets. Bucket n is in memory n modulo their number."""
        self._unanswered = 0
        """On rank 0: announced buckets that some member has not copied yet."""
        self._opened: list[OpenedHost | OpenedCuda] = []
        self._problem: str | None = None
        self._peers: dict[int, _Channel] = {}
        key = os.environ.get(ADMIN_KEY, "")
        if not key:
            raise WeightsError(
                f"the weight transport 'ipc' needs the run's key: {ADMIN_KEY} is not set"
            )

        self._on_gpu = has_driver(device)
        """Whether all members' memory is GPUs'."""
        try:
            with self._errors_named():
                if group.rank == 0:
                    self._listen(group, key)
                else:
                    self._join(group, key)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._release()
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()

    # -- connecting -------------------------------------------------------------------------------

    def _listen(self, group: BroadcastGroup, key: str) -> None:
        deadline = time.monotonic() + group.timeout
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address(group, key))
            listener.listen(group.world_size)
            while len(self._peers) + 1 < group.world_size:
                listener.settimeout(max(deadline - time.monotonic(), CONNECT_SECONDS))
                channel = _Channel(listener.accept()[0], group.timeout)
                try:
                    rank, on_gpu = self._admit(channel, key)
                except (OSError, ValueError):  # a stranger, or a member that has ended
                    channel.close()
                    continue
                self._peers[rank] = channel
                self._on_gpu = self._on_gpu and on_gpu

    def _admit(self, channel: _Channel, key: str) -> tuple[int, bool]:
        """The rank of a member that has shown that it knows the key, and whether it receives on a
        GPU. Raises ``ValueError`` for any other process."""
        # Processes of other users are not waited for.
        if channel.peer_user() != os.geteuid():
            raise ValueError("another user")
        hello = channel.exactly(RANK + NONCE)
        ours = secrets.token_bytes(NONCE)
        channel.write(ours + proof(key, b"rank 0", hello + ours))
        answer = channel.exactly(PROOF)
        if not hmac.compare_digest(answer, proof(key, b"member", hello + ours)):
            raise ValueError("another key")
        number = int.from_bytes(hello[:RANK], "little")
        rank, on_gpu = divmod(number, 2)
        if not 1 <= rank < self.size or rank in self._peers:
            raise ValueError("another rank")
        return rank, bool(on_gpu)

    def _join(self, group: BroadcastGroup, key: str) -> None:
        deadline = time.monotonic() + group.timeout
        while True:
            connected = socket.socket(socket.AF_UNIX)
            connected.settimeout(group.timeout)
            try:
                connected.connect(address(group, key))
                break
            except ConnectionRefusedError:  # rank 0 does not listen yet
                connected.close()
                if time.monotonic() > deadline:
                    raise
                time.sleep(CONNECT_SECONDS)

        channel = self._peers[0] = _Channel(connected, group.timeout)
        number = 2 * group.rank + self._on_gpu
        hello = number.to_bytes(RANK, "little") + secrets.token_bytes(NONCE)
        channel.write(hello)
        theirs = channel.exactly(NONCE)
        shown = channel.exactly(PROOF)
        if not hmac.compare_digest(shown, proof(key, b"rank 0", hello + theirs)):
            raise OSError("rank 0 does not know the run's key")
        channel.write(proof(key, b"member", hello + theirs))

    # -- as rank 0 --------------------------------------------------------------------------------

    def _send_header(self, header: Header) -> None:
        with self._errors_named():
            size = max((bucket.num_bytes for bucket in buckets(header)), default=0)
            # Two on the host, so that filling one and copying the other take place at once. A GPU
            # copies faster than the host fills, and its memory is the engine's.
            number = 1 if self._on_gpu else 2
            for _ in range(number if size else 0):
                memory = CudaMemory(size, self.device) if self._on_gpu else HostMemory(size)
                self._memories.append(memory)

            handles = [memory.handle for memory in self._memories]
            descriptors = [m.descriptor for m in self._memories if m.descriptor is not None]
            data = msgspec.msgpack.encode(_Shared(header, self._on_gpu, handles))
            for peer in self._peers.values():
                peer.send(data, descriptors)

    def _buffers(self, header: Header) -> Iterator[Tensor]:
        for bucket in buckets(header):
            if not bucket.num_bytes:
                yield torch.empty(0, dtype=torch.uint8)
                continue
            while self._unanswered >= len(self._memories):
                self._wait_for_answers()
            memory = self._memories[self._filled % len(self._memories)]
            yield memory.tensor[: bucket.num_bytes]

    def _send(self, buffer: Tensor) -> None:
        if not len(buffer):
            return
        number = self._filled % len(self._memories)
        memory = self._memories[number]
        assert buffer.data_ptr() == memory.tensor.data_ptr()
        with self._errors_named():
            memory.written()
            for peer in self._peers.values():
                peer.send(bytes([number]))
        self._filled += 1
        self._unanswered += 1

    def _wait_for_answers(self) -> None:
        """Wait until all members have copied the oldest bucket that is not copied everywhere."""
        with self._errors_named():
            for peer in self._peers.values():
                peer.receive()
        self._unanswered -= 1

    # -- as any other rank ------------------------------------------------------------------------

    def _receive_header(self) -> Header:
        with self._errors_named():
            data, descriptors = self._peers[0].receive()
        shared = msgspec.msgpack.decode(data, type=_Shared)
        self._opened = [OpenedHost(descriptor) for descriptor in descriptors]
        try:
            if shared.on_gpu:
                self._opened = [OpenedCuda(handle, self.device) for handle in shared.handles]
        except RuntimeError as error:
            self._problem = f"cannot open the trainer's GPU memory: {error}"

        if not shared.on_gpu:
            self.device = HOST
        return shared.header

    def _unable(self) -> str | None:
        return self._problem

    def _fetch(self, buffer: Tensor) -> None:
        with self._errors_named():
            data, _ = self._peers[0].receive()
            self._opened[data[0]].read(buffer)
            self._peers[0].send(b"")

    # -- as both ----------------------------------------------------------------------------------

    def _exchange(self, problem: str) -> list[str]:
        while self._unanswered:
            self._wait_for_answers()
        with self._errors_named():
            if self.rank:
                self._peers[0].send(problem.encode(errors="replace"))
                words: list[str] = json.loads(self._peers[0].receive()[0])
                return words

            problems = [problem] + [""] * (self.size - 1)
            for rank, peer in self._peers.items():
                problems[rank] = peer.receive()[0].decode()
            for peer in self._peers.values():
                peer.send(json.dumps(problems).encode())
            return problems

    def _release(self) -> None:
        self._filled = self._unanswered = 0
        self._problem = None
        shared: list[Any] = [*self._opened, *self._memories]
        self._opened = []
        self._memories = []
        for memory in shared:
            with suppress(RuntimeError):  # the GPU is gone, and its memory with it
                memory.close()


def address(group: BroadcastGroup, key: str) -> str:
    """The name of a group's socket. Only a process with the key can foresee it, and take it."""
    return f"\0prime-rl-{hmac.digest(key.encode(), group.group.encode(), 'sha256').hex()}"


def proof(key: str, role: bytes, said: bytes) -> bytes:
    """That a process knows the key: of what both ends have said, and the role of one of them."""
    return hmac.digest(key.encode(), role + said, "sha256")


class _Channel:
    """Messages of any length on a socket, with descriptors."""

    def __init__(self, connected: socket.socket, timeout: float) -> None:
        connected.settimeout(timeout)
        self._socket = connected

    def close(self) -> None:
        self._socket.close()

    def __del__(self) -> None:  # a member that ends keeps its connection until then
        self.close()

    def peer_user(self) -> int:
        """The user that the process at the other end runs as."""
        size = 12  # struct ucred: pid, uid, gid
        credentials = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        return int.from_bytes(credentials[4:8], "little")

    def write(self, data: bytes) -> None:
        self._socket.sendall(data)

    def exactly(self, size: int) -> bytes:
        """The next bytes. Raises ``OSError`` if the other end has left."""
        data = bytearray()
        while len(data) < size:
            more = self._socket.recv(size - len(data))
            if not more:
                raise OSError("a member has left")
            data += more
        return bytes(data)

    def send(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        head = len(data).to_bytes(8, "little") + bytes([len(descriptors)])
        if descriptors:
            self._socket.sendall(head)
            socket.send_fds(self._socket, [b"\0"], list(descriptors))
            self._socket.sendall(data)
        else:
            # At once: who has read a whole message may leave before a second, empty part is sent.
            self._socket.sendall(head + data)

    def receive(self) -> tuple[bytes, list[int]]:
        """A message, and its descriptors, which the caller closes."""
        head = self.exactly(9)
        descriptors = list[int]()
        if head[8]:
            _, descriptors, _, _ = socket.recv_fds(self._socket, 1, head[8])
            for descriptor in descriptors:
                os.set_inheritable(descriptor, False)
        return self.exactly(int.from_bytes(head[:8], "little")), descriptors
