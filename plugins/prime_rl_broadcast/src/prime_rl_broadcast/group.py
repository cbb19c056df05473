"""A process group of the trainer and the engines: weights go out, or none do.

    header -> everybody checks it -> all agree -> tensors in buckets -> all agree

Rank 0 sends. A member that refuses says so when all agree, and then none goes on. One that fails
later still takes what is sent, so that nobody waits for it, and the sender hears of it.

The group stands beside whatever ``torch.distributed`` has set up in the process.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
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
from prime_rl_broadcast.meeting import Check, Meeting

BUCKET_BYTES = 64 * 2**20
"""Small tensors travel together; a larger one by itself."""
ALIGNMENT = 16
"""Bytes: where a tensor may begin in a bucket."""
SAID_BYTES = 512
"""What one member can say when all agree."""


class WeightGroup:
    """One member's end of a group. It outlives a meeting: the next one of the same members finds it
    connected."""

    def __init__(self, meeting: Meeting, device: torch.device) -> None:
        """Connect; every member does at the same time."""
        self.path, self.rank, self.size = meeting.group, meeting.rank, meeting.world_size
        self.broken = False
        """Somebody has left or refused: it is not used again."""
        self.device = device if meeting.backend == "nccl" else torch.device("cpu")
        store = dist.FileStore(str(Path(meeting.group) / "store"), meeting.world_size)  # type: ignore[attr-defined]
        store.set_timeout(timedelta(seconds=meeting.timeout))
        with _told(meeting), self._talking():
            self._backend = _connect(meeting, store)
            self._agree(None)  # NCCL connects at the first word
        self._store = store  # gone with us

    def send(self, header: Header, tensors: Iterable[Tensor]) -> None:
        """As rank 0: pass weights on. ``tensors`` come in the order of ``header``, one at a time,
        on any device and of any type."""
        self._send_bytes(msgspec.json.encode(header))
        self._agree(None)
        stream = iter(tensors)
        for bucket in buckets(header):
            buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=self.device)
            for start, info in bucket.places:
                values = next(stream).detach().flatten()
                place = buffer[start : start + num_bytes(info)].view(DTYPES[info.dtype])
                place.copy_(values)  # rounds, if it has to
            self._pass_on(buffer)
        self._agree(None)

    def receive(self, check: Check, use: Callable[[Iterator[tuple[str, Tensor]]], object]) -> None:
        """As any other: take weights. ``check`` returns why a header is refused, or None; ``use``
        gets names and tensors, which are its own. Raises what ``use`` does; what happens to others
        after that is theirs."""
        header = msgspec.json.decode(self._receive_bytes(), type=Header)
        self._agree(check(header))
        stream = self._tensors(header)
        problem: Exception | None = None
        try:
            use(stream)
        except Exception as error:
            problem = error
        with suppress(WeightsError):  # the others' affair
            for _ in stream:  # what is sent has to be taken
                pass
            if not self.broken:
                self._agree(None if problem is None else f"{type(problem).__name__}: {problem}")
        if problem is not None:
            raise problem

    def close(self) -> None:
        """Break the connections."""
        with suppress(RuntimeError):
            self._backend.abort()
        self._backend = None

    def _tensors(self, header: Header) -> Iterator[tuple[str, Tensor]]:
        for bucket in buckets(header):
            buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=self.device)
            self._pass_on(buffer)
            for start, info in bucket.places:
                data = buffer[start : start + num_bytes(info)]
                yield info.name, data.view(DTYPES[info.dtype]).view(info.shape)

    def _send_bytes(self, data: bytes) -> None:
        self._pass_on(torch.tensor([len(data)], dtype=torch.int64, device=self.device))
        self._pass_on(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device))

    def _receive_bytes(self) -> bytes:
        size = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._pass_on(size)
        data = torch.empty(int(size), dtype=torch.uint8, device=self.device)
        self._pass_on(data)
        return data.cpu().numpy().tobytes()

    def _pass_on(self, tensor: Tensor) -> None:
        if not len(tensor):
            return
        with self._talking():
            self._backend.broadcast(tensor, 0).wait()

    def _agree(self, problem: str | None) -> None:
        """Nobody goes on unless all can."""
        said = torch.zeros(SAID_BYTES, dtype=torch.uint8)
        text = (problem or "").encode()[:SAID_BYTES]
        said[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        mine = said.to(self.device)
        everybody = [torch.empty_like(mine) for _ in range(self.size)]
        with self._talking():
            self._backend.allgather([everybody], [mine]).wait()
        for rank, column in enumerate(everybody):
            if words := column.cpu().numpy().tobytes().rstrip(b"\0"):
                self.broken = True
                raise WeightsError(
                    f"rank {rank} of the broadcast: {words.decode(errors='replace')}"
                )

    @contextmanager
    def _talking(self) -> Iterator[None]:
        """A member that dies breaks the connection; one that hangs lets the time run out."""
        try:
            yield
        except RuntimeError as error:  # torch's DistBackendError among them
            self.broken = True
            raise WeightsError(f"the broadcast broke off: {error}") from error


class Attendance:
    """Takes one member to its meetings, and keeps the group between them."""

    def __init__(self) -> None:
        self._group: WeightGroup | None = None

    @contextmanager
    def at(self, meeting: Meeting, device: torch.device) -> Iterator[WeightGroup]:
        """The group, when all have come. After an error it is not used again."""
        group, self._group = self._group, None
        if group is not None and (group.path, group.rank) != (meeting.group, meeting.rank):
            group.close()
            group = None
        known = "for the first time" if group is None else "connected before"
        try:
            meeting.wait_for_all(f"{language(meeting.backend)}, {known}")
        except WeightsError:
            if group is not None:
                group.close()
            raise
        if group is None:
            group = WeightGroup(meeting, device)
        try:
            yield group
        except BaseException as error:
            group.close()  # who waits for us shall not wait for long
            clear_frames(error.__traceback__)  # they hold what has come, as long as the error lives
            raise
        if group.broken:
            group.close()
        else:
            self._group = group


def language(backend: str) -> str:
    """What members must have in common: NCCL of one version talks to no other."""
    if backend != "nccl":
        return backend
    major, minor, *_ = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return f"NCCL {major}.{minor}"


class Bucket(msgspec.Struct):
    """Tensors that travel together."""

    places: list[tuple[int, TensorInfo]]
    """Each with the byte where it begins."""
    num_bytes: int


def buckets(header: Header) -> Iterator[Bucket]:
    """How everybody cuts what a header announces; tensors keep their order."""
    bucket = Bucket([], 0)
    for info in header:
        start = -(-bucket.num_bytes // ALIGNMENT) * ALIGNMENT
        if bucket.places and start + num_bytes(info) > BUCKET_BYTES:
            yield bucket
            bucket, start = Bucket([], 0), 0
        bucket.places.append((start, info))
        bucket.num_bytes = start + num_bytes(info)
    if bucket.places:
        yield bucket


def _connect(meeting: Meeting, store: Any) -> Any:
    timeout = timedelta(seconds=meeting.timeout)
    if meeting.backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, meeting.rank, meeting.world_size, options)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(hostname=_own_address(meeting))]
    return gloo(store, meeting.rank, meeting.world_size, options)


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


def _own_address(meeting: Meeting) -> str:
    """Where we listen while weights are passed on."""
    if meeting.loopback:
        return "127.0.0.1"
    return os.environ.get(NODE_ADDRESS) or own_address()


@contextmanager
def _told(meeting: Meeting) -> Iterator[None]:
    """What NCCL learns from the environment alone: errors are raised where one waits, instead of
    ending the process; and of one machine nobody listens on more than loopback."""
    told = {"TORCH_NCCL_BLOCKING_WAIT": "1"}
    if meeting.loopback and sys.platform == "linux" and "NCCL_SOCKET_IFNAME" not in os.environ:
        told["NCCL_SOCKET_IFNAME"] = "lo"
    before = {key: os.environ.get(key) for key in told}
    os.environ.update(told)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key)
            else:
                os.environ[key] = value
