"""The connections among the trainer and the engines: of a process group here, of shared memory in
``ipc``.

    header -> every member checks it -> all agree -> tensors in buckets -> all agree

Rank 0 sends. If a member refuses the header, the agreement fails for all before any tensor is sent.
A member that fails later still receives the rest, so that the others do not wait, and the sender
gets its error from the second agreement.

A process group is independent of those that ``torch.distributed`` has in this process.
"""

from __future__ import annotations

import math
import os
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from threading import Thread
from traceback import clear_frames
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from prime_rl import Header, TensorInfo, WeightsError
from prime_rl.rundir.launch import NODE_ADDRESS
from prime_rl.weights.tensors import DTYPES as DTYPES
from prime_rl.weights.tensors import header_of as header_of
from prime_rl.weights.tensors import num_bytes as num_bytes
from prime_rl.weights.tensors import pieces_of as pieces_of
from prime_rl_broadcast.group import BroadcastGroup, Check

BUCKET_BYTES = 64 * 2**20
"""Small tensors share a bucket; a larger one has its own."""
PIECE = 16 * 2**20
"""Elements that are rounded at a time on their way from the host to a device."""
ALIGNMENT = 16
"""Alignment in bytes of each tensor in a bucket."""
NON_BLOCKING = (2, 27)
"""Versions of NCCL from which communicators connect without blocking."""
OPEN_SECONDS = 0.1
"""Between two looks whether the broadcast is still open, while members connect."""
PROBLEM_BYTES = 512
"""Longest error that a member can report in an agreement."""


class Connection(ABC):
    """One member's end of the connections among all. It outlives a broadcast: the next one of the
    same members uses it again."""

    def __init__(self, group: BroadcastGroup, device: torch.device) -> None:
        """``device``: where this member receives tensors."""
        self.path = group.group
        self.rank = group.rank
        self.size = group.world_size
        self.broken = False
        """A member has left or refused: the connection is not used again."""
        self.device = device

    def send(self, header: Header, tensors: Iterable[Tensor]) -> None:
        """Broadcast weights, on rank 0. ``tensors`` come in the order of ``header``, one at a time,
        on any device and of any type."""
        self.send_buckets(header, filled(header, tensors, self._buffers(header)))

    def send_buckets(self, header: Header, buffers: Iterable[Tensor]) -> None:
        """Broadcast the filled ``buckets`` of ``header`` in their order, on rank 0."""
        try:
            self._send_header(header)
            self._agree(None)
            for buffer in buffers:
                self._send(buffer)
            self._agree(None)
        finally:
            self._release()

    def receive(self, check: Check, use: Callable[[Iterator[tuple[str, Tensor]]], object]) -> None:
        """Receive weights, on every rank but 0. ``check`` returns why a header is refused, or None;
        ``use`` gets names and tensors and may keep them. Raises what ``use`` raises; errors of
        other members after that are ignored."""
        problem: Exception | None = None
        try:
            header = self._receive_header()
            self._agree(self._unable() or check(header))
            stream = self._tensors(header)
            try:
                use(stream)
            except Exception as error:
                problem = error

            with suppress(WeightsError):  # another member failed; ours is complete
                for _ in stream:  # the sender blocks until every member has received all buckets
                    pass
                self._release()
                if not self.broken:
                    self._agree(None if problem is None else f"{type(problem).__name__}: {problem}")
        finally:
            self._release()

        if problem is not None:
            raise problem

    @abstractmethod
    def close(self) -> None:
        """Break the connections, so that peers do not wait."""

    @abstractmethod
    def _send_header(self, header: Header) -> None: ...

    @abstractmethod
    def _receive_header(self) -> Header: ...

    @abstractmethod
    def _send(self, buffer: Tensor) -> None:
        """Send a filled bucket to all, on rank 0."""

    @abstractmethod
    def _fetch(self, buffer: Tensor) -> None:
        """Receive the next bucket into ``buffer``, on every rank but 0."""

    @abstractmethod
    def _exchange(self, problem: str) -> list[str]:
        """The problem of each rank, empty if it has none."""

    def _buffers(self, header: Header) -> Iterator[Tensor]:
        """Memory that the buckets of ``header`` are filled into, one after another, on rank 0."""
        return (new_buffer(bucket, self.device) for bucket in buckets(header))

    def _unable(self) -> str | None:
        """Why this member cannot receive what the header announces; None: it can."""
        return None

    def _release(self) -> None:  # noqa: B027 - a process group has nothing to free
        """Free what the broadcast took. Called again, it does nothing."""

    def _tensors(self, header: Header) -> Iterator[tuple[str, Tensor]]:
        for bucket in buckets(header):
            buffer = new_buffer(bucket, self.device)
            if len(buffer):
                self._fetch(buffer)
            yield from bucket.tensors(buffer)

    def _agree(self, problem: str | None) -> None:
        """Exchange errors: raises ``WeightsError`` on every member if one has a ``problem``."""
        for rank, words in enumerate(self._exchange(problem or "")):
            if words:
                self.broken = True
                raise WeightsError(f"rank {rank} of the broadcast: {words}")

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        """A member that dies breaks the connection; one that hangs causes a timeout."""
        try:
            yield
        except (RuntimeError, OSError) as error:  # torch's DistBackendError among them
            self.broken = True
            raise WeightsError(f"the broadcast failed: {error}") from error


class GroupConnection(Connection):
    """Through a process group: gloo or NCCL."""

    def __init__(self, group: BroadcastGroup, device: torch.device) -> None:
        """Connect. All members must do so at the same time."""
        super().__init__(group, device if group.backend == "nccl" else torch.device("cpu"))
        store = dist.FileStore(str(Path(group.group) / "store"), group.world_size)  # type: ignore[attr-defined]
        store.set_timeout(timedelta(seconds=group.timeout))
        with _nccl_environment(group), self._errors_named():
            connect_now = _connect if group.backend == "nccl" else _connect_while_open
            self._backend = connect_now(group, store)
            self._agree(None)  # NCCL connects at the first collective

        self._store = store  # the file is removed with the object

    def close(self) -> None:
        with suppress(RuntimeError):
            self._backend.abort()
        self._backend = None

    def _send_header(self, header: Header) -> None:
        data = msgspec.json.encode(header)
        self._broadcast(torch.tensor([len(data)], dtype=torch.int64, device=self.device))
        self._broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device))

    def _receive_header(self) -> Header:
        size = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._broadcast(size)
        data = torch.empty(int(size), dtype=torch.uint8, device=self.device)
        self._broadcast(data)
        return msgspec.json.decode(data.cpu().numpy().tobytes(), type=Header)

    def _send(self, buffer: Tensor) -> None:
        if len(buffer):
            self._broadcast(buffer)

    def _fetch(self, buffer: Tensor) -> None:
        self._broadcast(buffer)

    def _broadcast(self, tensor: Tensor) -> None:
        with self._errors_named():
            self._backend.broadcast(tensor, 0).wait()

    def _exchange(self, problem: str) -> list[str]:
        said = torch.zeros(PROBLEM_BYTES, dtype=torch.uint8)
        text = problem.encode()[:PROBLEM_BYTES]
        said[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        mine = said.to(self.device)
        problems = [torch.empty_like(mine) for _ in range(self.size)]
        with self._errors_named():
            self._backend.allgather([problems], [mine]).wait()
        columns = [column.cpu().numpy().tobytes().rstrip(b"\0") for column in problems]
        return [column.decode(errors="replace") for column in columns]


class Member:
    """One member of broadcasts. It keeps its connection from one broadcast to the next."""

    def __init__(self) -> None:
        self._connection: Connection | None = None

    @contextmanager
    def join(self, group: BroadcastGroup, device: torch.device) -> Iterator[Connection]:
        """The connection, once every member is ready. After an error it is not used again. Raises
        ``WeightsError``."""
        connection = self._connection
        self._connection = None
        if connection and (connection.path, connection.rank) != (group.group, group.rank):
            connection.close()
            connection = None

        # A member that restarted has no connection: this shows before any member waits for it.
        state = "connecting" if connection is None else "connected"
        try:
            group.wait_for_all(f"{protocol(group.backend)}, {state}")
        except WeightsError:
            if connection is not None:
                connection.close()
            raise

        if connection is None:
            connection = connect(group, device)
        try:
            yield connection
        except BaseException as error:
            connection.close()  # unblock peers quickly
            clear_frames(error.__traceback__)  # the frames would keep received tensors alive
            raise

        if connection.broken:
            connection.close()
        else:
            self._connection = connection


def connect(group: BroadcastGroup, device: torch.device) -> Connection:
    """This member's connection. All members must connect at the same time. Raises
    ``WeightsError``."""
    if group.backend == "ipc":
        from prime_rl_broadcast.ipc import IpcConnection  # it imports this module

        return IpcConnection(group, device)
    return GroupConnection(group, device)


def protocol(backend: str) -> str:
    """What members must have in common: NCCL refuses another version, patch level included."""
    if backend != "nccl":
        return backend
    numbers = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return f"NCCL {'.'.join(map(str, numbers))}"


class Bucket(msgspec.Struct):
    """Tensors that are sent together."""

    places: list[tuple[int, TensorInfo]]
    """Offset in bytes, and tensor."""
    num_bytes: int

    def tensors(self, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Names, and the tensors in a buffer of this bucket: views."""
        for start, info in self.places:
            data = buffer[start : start + num_bytes(info)]
            yield info.name, data.view(DTYPES[info.dtype]).view(info.shape)


def new_buffer(bucket: Bucket, device: torch.device | None) -> Tensor:
    """[num_bytes] without values."""
    return torch.empty(bucket.num_bytes, dtype=torch.uint8, device=device)


def filled(
    header: Header, tensors: Iterable[Tensor], buffers: Iterable[Tensor]
) -> Iterator[Tensor]:
    """The buffers of a header's buckets, each with its tensors. A tensor, in the order of
    ``header``, is taken when its bucket is filled, and rounded to the header's type."""
    stream = iter(tensors)
    for bucket, buffer in zip(buckets(header), buffers, strict=True):
        for _, place in bucket.tensors(buffer):
            fill(place, next(stream).detach().view(place.shape))
        yield buffer


def fill(place: Tensor, source: Tensor) -> None:
    """Copy ``source`` into ``place``, rounded to its type."""
    if place.device == source.device or place.dtype == source.dtype:
        place.copy_(source)
        return

    # Torch would round on the host, into ordinary memory. The device rounds faster, and a piece at
    # a time takes little of its memory, which the engine has.
    flat = place.view(-1)
    values = source.reshape(-1)
    for start in range(0, len(values), PIECE):
        piece = slice(start, start + PIECE)
        flat[piece].copy_(values[piece].to(place.device, non_blocking=True))


def buckets(header: Header) -> Iterator[Bucket]:
    """Cut the tensors of a header into buckets, in order. All members get the same ones."""
    bucket = Bucket([], 0)
    for info in header:
        start = -(-bucket.num_bytes // ALIGNMENT) * ALIGNMENT
        if bucket.places and start + num_bytes(info) > BUCKET_BYTES:
            yield bucket
            bucket = Bucket([], 0)
            start = 0
        bucket.places.append((start, info))
        bucket.num_bytes = start + num_bytes(info)

    if bucket.places:
        yield bucket


def _connect(group: BroadcastGroup, store: Any) -> Any:
    timeout = timedelta(seconds=group.timeout)
    if group.backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        # That is the time of a collective. Connecting has none, unless it does not block; NCCL 2.26
        # may hang then (pytorch issue 153960).
        if torch.cuda.nccl.version() >= NON_BLOCKING:  # type: ignore[no-untyped-call]
            options.config.blocking = 0
        return dist.ProcessGroupNCCL(store, group.rank, group.world_size, options)

    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(hostname=_own_address(group))]
    return gloo(store, group.rank, group.world_size, options)


def _connect_while_open(group: BroadcastGroup, store: Any) -> Any:
    """Gloo waits for a member that has died until its timeout, and nothing interrupts it. So a
    thread connects, and is left to its timeout if the broadcast is over before."""
    connected = Future[Any]()

    def work() -> None:
        try:
            connected.set_result(_connect(group, store))
        except Exception as error:
            connected.set_exception(error)

    Thread(target=work, name="gloo connects", daemon=True).start()
    while not wait([connected], OPEN_SECONDS).done:
        group.check_open()

    return connected.result()


def own_address() -> str:
    """The numeric address at which other machines reach this machine: the source address of
    outgoing packets. Without a route, the address of the host name.

    Raises ``OSError`` if there is neither."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Reserved for documentation. Nothing is sent: the kernel only looks up the route.
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostbyname(socket.gethostname())


def _own_address(group: BroadcastGroup) -> str:
    """The address this member listens on during a broadcast."""
    if group.loopback:
        return "127.0.0.1"
    return os.environ.get(NODE_ADDRESS) or own_address()


@contextmanager
def _nccl_environment(group: BroadcastGroup) -> Iterator[None]:
    """Settings that NCCL reads from the environment only: errors are raised in ``wait`` instead of
    ending the process, connecting takes a limited time, and members on one machine listen on
    loopback only."""
    seconds = str(math.ceil(group.timeout))  # torch reads it once per process
    settings = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_NONBLOCKING_TIMEOUT": seconds}
    if group.loopback and sys.platform == "linux" and "NCCL_SOCKET_IFNAME" not in os.environ:
        settings["NCCL_SOCKET_IFNAME"] = "lo"
    before = {key: os.environ.get(key) for key in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key)
            else:
                os.environ[key] = value
