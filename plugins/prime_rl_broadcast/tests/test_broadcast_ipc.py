"""Weights through memory that trainer and engines share: only processes of the run open it, and
nothing of it outlives them."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
import warm
from torch import Tensor
from waiting import LIMIT, eventually

from prime_rl import ConfigError, EngineError, PluginConfig, WeightsError
from prime_rl.rundir.launch import ADMIN_KEY
from prime_rl_broadcast import connection as connection_module
from prime_rl_broadcast import ipc, shared_memory
from prime_rl_broadcast.connection import Member, fill, header_of
from prime_rl_broadcast.delivery import BroadcastDelivery
from prime_rl_broadcast.group import BroadcastGroup
from prime_rl_broadcast.shared_memory import NAME, CudaError, HostMemory
from prime_rl_broadcast.transport import IpcTransport

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ipc needs Linux")

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
KEY = "the run's key"

ENGINE = """
import os, signal, sys, torch, msgspec
from pathlib import Path
from safetensors.torch import save_file
from prime_rl_broadcast import connection
from prime_rl_broadcast.group import BroadcastGroup
connection.BUCKET_BYTES = int(sys.argv[3])
folder = Path(sys.argv[2])
member = connection.Member()
def take(stream):
    received = {}
    for number, (name, tensor) in enumerate(stream):
        received[name] = tensor
        if number == 1 and (folder / "die").exists():
            os.kill(os.getpid(), signal.SIGKILL)
    save_file(received, folder / ".new")
    (folder / ".new").rename(folder / f"received_{version}")
for version, line in enumerate(sys.argv[1].split(" | ")):
    group = msgspec.json.decode(line, type=BroadcastGroup)
    with member.join(group, torch.device("cpu")) as joined:
        joined.receive(lambda header: None, take)
"""

TRAINER = """
import os, signal, sys, torch, msgspec
from prime_rl_broadcast import connection
from prime_rl_broadcast.group import BroadcastGroup
connection.BUCKET_BYTES = 4096
group = msgspec.json.decode(sys.argv[1], type=BroadcastGroup)
tensors = {str(n): torch.full((1024,), float(n)) for n in range(8)}
def until_killed():
    for number, tensor in enumerate(tensors.values()):
        if number == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        yield tensor
with connection.Member().join(group, torch.device("cpu")) as joined:
    joined.send(connection.header_of(tensors, {}), until_killed())
"""


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADMIN_KEY, KEY)


NewGroup = Callable[..., BroadcastGroup]


@pytest.fixture
def new_group(tmp_path: Path) -> NewGroup:
    """Makes broadcasts of one group, for rank 0."""
    number = iter(range(99))

    def make(size: int = 2, timeout: float = LIMIT, group: str = "group") -> BroadcastGroup:
        folder = tmp_path / f"meeting_{next(number)}"
        folder.mkdir()
        return BroadcastGroup(
            directory=str(folder), group=str(tmp_path / group), backend="ipc", rank=0,
            world_size=size, timeout=timeout, loopback=True,
        )  # fmt: skip

    return make


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    processes = []

    def begin(code: str, *arguments: str) -> Any:
        process = warm.Popen([sys.executable, "-c", code, *arguments])
        processes.append(process)
        return process

    yield begin
    for process in processes:
        process.kill()
        process.wait()


def order(group: BroadcastGroup, rank: int = 1) -> str:
    return msgspec.json.encode(group.for_worker(rank)).decode()


def weights(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((300, 7), (1,), (33, 65), (0, 4), (4096,))
    return {f"w{n}": torch.randn(s, generator=generator) for n, s in enumerate(shapes)}


def send(member: Member, group: BroadcastGroup, tensors: dict[str, Tensor]) -> None:
    with member.join(group, CPU) as connection:
        connection.send(header_of(tensors, {}), tensors.values())


def shared_here() -> int:
    """Anonymous files of this module that this process has open or mapped."""
    links = [os.readlink(f"/proc/self/fd/{n}") for n in open_files()]
    return sum(NAME in link for link in links) + Path("/proc/self/maps").read_text().count(NAME)


def open_files() -> list[str]:
    names = os.listdir("/proc/self/fd")
    return [name for name in names if os.path.lexists(f"/proc/self/fd/{name}")]


def names_in_shm() -> set[str]:
    return {
        name for name in os.listdir("/dev/shm") if "prime" in name or f"_{os.getpid()}_" in name
    }


def test_a_process_gets_each_of_several_versions_bit_for_bit_and_nothing_is_left(
    tmp_path: Path, new_group: NewGroup, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file

    monkeypatch.setattr(connection_module, "BUCKET_BYTES", 4096)
    before = names_in_shm()
    groups = [new_group() for _ in range(3)]
    engine = start(ENGINE, " | ".join(map(order, groups)), str(tmp_path), "4096")
    sender = Member()
    for version, group in enumerate(groups):
        send(sender, group, weights(version))
        received = tmp_path / f"received_{version}"
        eventually(received.exists, engine)
        assert shared_here() == 0  # also between two versions, while both stay connected
        found = load_file(received)
        assert found.keys() == weights(version).keys()
        assert all(found[name].equal(t) for name, t in weights(version).items())

    assert engine.wait(LIMIT) == 0
    assert names_in_shm() == before


def test_an_engine_that_is_killed_is_an_error_at_once_and_its_successor_gets_the_next_version(
    tmp_path: Path, new_group: NewGroup, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "BUCKET_BYTES", 4096)
    before = names_in_shm()
    (tmp_path / "die").touch()
    sender, first = Member(), new_group()
    engine = start(ENGINE, order(first), str(tmp_path), "4096")
    with pytest.raises(WeightsError, match=r"the broadcast failed: .*(left|reset|pipe)"):
        send(sender, first, weights(1))
    assert engine.wait(LIMIT) == -signal.SIGKILL and shared_here() == 0

    (tmp_path / "die").unlink()
    second = new_group(group="another")
    engine = start(ENGINE, order(second), str(tmp_path), "4096")
    send(sender, second, weights(2))
    assert engine.wait(LIMIT) == 0 and (tmp_path / "received_0").exists()
    assert names_in_shm() == before


def test_a_trainer_that_is_killed_while_it_sends_is_an_error_at_once(
    new_group: NewGroup, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine applies nothing: the last agreement is missing."""
    monkeypatch.setattr(connection_module, "BUCKET_BYTES", 4096)
    group = new_group()
    before = names_in_shm()
    trainer = start(TRAINER, msgspec.json.encode(group).decode())
    got: list[dict[str, Tensor]] = []
    with (
        pytest.raises(WeightsError, match="the broadcast failed"),
        Member().join(group.for_worker(1), CPU) as joined,
    ):
        joined.receive(lambda header: None, lambda stream: got.append(dict(stream)))
    assert trainer.wait(LIMIT) == -signal.SIGKILL
    assert not got and shared_here() == 0 and names_in_shm() == before


def connected(group: BroadcastGroup) -> socket.socket:
    stranger = socket.socket(socket.AF_UNIX)

    def can_connect() -> bool:
        try:
            stranger.connect(ipc.address(group, KEY))
        except ConnectionRefusedError:
            return False
        return True

    eventually(can_connect)
    return stranger


def test_a_process_without_the_key_gets_no_memory_and_stops_no_member(new_group: NewGroup) -> None:
    """It knows the address, and the rank of a member that is yet to come."""
    group = new_group()
    Path(group.directory, "here_1").write_text("ipc, connecting")
    tensors = weights(3)
    with ThreadPoolExecutor(2) as pool:
        sending = pool.submit(send, Member(), group, tensors)
        with connected(group) as stranger:
            hello = (2).to_bytes(ipc.RANK, "little") + bytes(ipc.NONCE)
            stranger.sendall(hello)
            answer = stranger.recv(ipc.NONCE + ipc.PROOF)
            said = hello + answer[: ipc.NONCE]
            assert answer[ipc.NONCE :] == ipc.proof(KEY, b"rank 0", said)
            stranger.sendall(ipc.proof("another key", b"member", said))
            data, descriptors, *_ = socket.recv_fds(stranger, 1, 9)
            assert (data, descriptors) == (b"", [])
        with connected(group) as stranger:  # the answer of rank 0 is no proof of a member
            stranger.sendall(hello)
            answer = stranger.recv(ipc.NONCE + ipc.PROOF)
            stranger.sendall(answer[ipc.NONCE :])
            assert stranger.recv(1) == b""

        got: dict[str, Tensor] = {}
        with Member().join(group.for_worker(1), CPU) as joined:
            joined.receive(lambda header: None, got.update)
        sending.result()
    assert all(got[name].equal(tensor) for name, tensor in tensors.items())


def test_a_member_takes_nothing_from_a_process_without_the_key(new_group: NewGroup) -> None:
    group = new_group()
    Path(group.directory, "here_0").write_text("ipc, connecting")
    with socket.socket(socket.AF_UNIX) as impostor, ThreadPoolExecutor(1) as pool:
        impostor.bind(ipc.address(group, KEY))
        impostor.listen()

        def take() -> None:
            with Member().join(group.for_worker(1), CPU):
                pass

        taking = pool.submit(take)
        peer, _ = impostor.accept()
        with peer:
            peer.recv(ipc.RANK + ipc.NONCE)
            peer.sendall(bytes(ipc.NONCE + ipc.PROOF))
            with pytest.raises(WeightsError, match="rank 0 does not know the run's key"):
                taking.result()


def test_without_the_runs_key_there_is_no_connection(
    new_group: NewGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ADMIN_KEY)
    with pytest.raises(WeightsError, match=f"'ipc' needs the run's key: {ADMIN_KEY} is not set"):
        ipc.IpcConnection(new_group(), CPU)


def test_a_member_that_never_connects_is_waited_for_no_longer_than_the_timeout(
    new_group: NewGroup,
) -> None:
    with pytest.raises(WeightsError, match="the broadcast failed: timed out"):
        ipc.IpcConnection(new_group(timeout=0.05), CPU)


def test_a_peer_that_leaves_after_a_whole_message_is_no_error() -> None:
    """It was one: an empty message had a second, empty write, which found the pipe broken."""
    ours, theirs = socket.socketpair()

    class Leaving:
        """The peer reads what was written, and leaves."""

        def settimeout(self, seconds: float) -> None:
            ours.settimeout(seconds)

        def sendall(self, data: bytes) -> None:
            ours.sendall(data)
            if ipc._Channel(theirs, 5.0).receive() == (b"", []):
                theirs.close()

        def close(self) -> None:
            ours.close()

    with ours:
        ipc._Channel(cast(socket.socket, Leaving()), 5.0).send(b"")
        assert theirs.fileno() == -1


def test_a_receiver_can_neither_write_to_the_memory_nor_shrink_it() -> None:
    memory = HostMemory(8192)
    try:
        with pytest.raises(PermissionError):
            os.ftruncate(memory.descriptor, 4096)
        with pytest.raises(PermissionError):
            os.pwrite(memory.descriptor, b"x", 0)
        with pytest.raises(PermissionError):
            mmap.mmap(memory.descriptor, 8192)
        memory.tensor.fill_(7)
        assert os.pread(memory.descriptor, 2, 8190) == b"\x07\x07"
    finally:
        memory.close()
    assert shared_here() == 0


class Driver:
    """A CUDA driver whose device memory is memory of the host, which handles name."""

    memory: dict[int, Any]

    def __init__(self) -> None:
        self.memory = {}
        self.opened: list[int] = []
        self.refuses: dict[str, int] = {}
        self.contexts = 0
        self.depth = threading.local()

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            if name in self.refuses:
                return self.refuses[name]
            if not name.startswith(("cuDevice", "cuCtx", "cuGetError")):
                assert getattr(self.depth, "now", 0) == 1, f"{name} without a context"
            return int(getattr(self, f"do_{name}")(*arguments) or 0)

        return call

    def do_cuDevicePrimaryCtxRetain(self, context: Any, number: Any) -> None:
        self.contexts += 1
        context._obj.value = 77

    def do_cuDevicePrimaryCtxRelease_v2(self, number: Any) -> None:
        self.contexts -= 1

    def do_cuCtxPushCurrent_v2(self, context: Any) -> None:
        assert context.value == 77
        self.depth.now = getattr(self.depth, "now", 0) + 1

    def do_cuCtxPopCurrent_v2(self, context: Any) -> None:
        self.depth.now -= 1

    def do_cuMemAlloc_v2(self, pointer: Any, size: Any) -> None:
        block = ctypes.create_string_buffer(size.value)
        pointer._obj.value = ctypes.addressof(block)
        self.memory[ctypes.addressof(block)] = block

    def do_cuMemFree_v2(self, pointer: Any) -> None:
        assert pointer.value not in self.opened, "freed before it was closed"
        del self.memory[pointer.value]

    def do_cuIpcGetMemHandle(self, handle: Any, pointer: Any) -> None:
        name = pointer.value.to_bytes(shared_memory.HANDLE_BYTES, "little")
        ctypes.memmove(ctypes.addressof(handle._obj), name, len(name))

    def do_cuIpcOpenMemHandle_v2(self, pointer: Any, handle: Any, flags: Any) -> None:
        assert flags.value == 1
        address = int.from_bytes(bytes(handle), "little")
        assert address in self.memory
        pointer._obj.value = address
        self.opened.append(address)

    def do_cuIpcCloseMemHandle(self, pointer: Any) -> None:
        self.opened.remove(pointer.value)

    def do_cuMemcpyDtoDAsync_v2(self, target: Any, source: Any, size: Any, stream: Any) -> None:
        ctypes.memmove(target.value, source.value, size.value)

    def do_cuGetErrorString(self, code: int, text: Any) -> None:
        text._obj.value = b"a reason"


class Stream:
    cuda_stream = 0

    def synchronize(self) -> None:
        pass


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """This process has a GPU, whose tensors lie on the host."""
    fake = Driver()
    monkeypatch.setattr(shared_memory, "load_driver", lambda: fake)
    monkeypatch.setattr(ipc, "has_driver", lambda device: device.type == "cuda")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())

    def tensor(self: Any, pointer: int, size: int) -> Tensor:
        return torch.frombuffer(fake.memory[pointer], dtype=torch.uint8)

    def new_buffer(bucket: Any, device: Any) -> Tensor:
        return torch.empty(bucket.num_bytes, dtype=torch.uint8)

    monkeypatch.setattr(shared_memory.Driver, "tensor", tensor)
    monkeypatch.setattr(connection_module, "new_buffer", new_buffer)
    return fake


def broadcast(
    group: BroadcastGroup, tensors: dict[str, Tensor], *devices: torch.device
) -> list[Any]:
    """What each rank has then, or its error. The first device is rank 0's."""

    def take(rank: int, device: torch.device) -> dict[str, Tensor]:
        got: dict[str, Tensor] = {}
        with Member().join(group.for_worker(rank), device) as joined:
            joined.receive(lambda header: None, got.update)
        return got

    def give() -> None:
        with Member().join(group, devices[0]) as joined:
            joined.send(header_of(tensors, {}), tensors.values())

    with ThreadPoolExecutor(len(devices)) as pool:
        futures: list[Any] = [pool.submit(give)]
        futures += [pool.submit(take, rank, d) for rank, d in enumerate(devices) if rank]
        return [future.exception() or future.result() for future in futures]


def test_between_gpus_the_driver_shares_memory_that_is_closed_and_then_freed(
    new_group: NewGroup, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "BUCKET_BYTES", 4096)
    sent, *received = broadcast(new_group(3), weights(4), GPU, GPU, GPU)
    assert sent is None
    for found in received:
        assert all(found[name].equal(tensor) for name, tensor in weights(4).items())
    assert (driver.memory, driver.opened, driver.contexts) == ({}, [], 0)


def test_if_one_member_computes_on_the_host_its_memory_is_shared(
    new_group: NewGroup, driver: Driver
) -> None:
    driver.refuses = {"cuMemAlloc_v2": 2}
    for devices in ((GPU, GPU, CPU), (CPU, GPU, GPU)):
        sent, *received = broadcast(new_group(3), weights(5), *devices)
        assert sent is None
        for found in received:
            assert all(found[name].equal(tensor) for name, tensor in weights(5).items())


def test_a_member_that_cannot_open_the_gpus_memory_refuses_before_any_weight_is_sent(
    new_group: NewGroup, driver: Driver
) -> None:
    driver.refuses = {"cuIpcOpenMemHandle_v2": 801}
    reason = (
        "rank 1 of the broadcast: cannot open the trainer's GPU memory: cuIpcOpenMemHandle_v2: "
        "a reason (CUDA driver error 801)"
    )
    found = broadcast(new_group(2), weights(6), GPU, GPU)
    assert [str(error) for error in found] == [reason, reason]
    assert all(isinstance(error, WeightsError) for error in found)
    assert (driver.memory, driver.opened, driver.contexts) == ({}, [], 0)


@pytest.mark.parametrize("name", ["cuMemAlloc_v2", "cuIpcGetMemHandle"])
def test_a_gpu_without_memory_for_it_or_without_ipc_is_an_error_on_all_members(
    name: str, new_group: NewGroup, driver: Driver
) -> None:
    driver.refuses = {name: 2}
    sent, received = broadcast(new_group(2), weights(6), GPU, GPU)
    assert f"the broadcast failed: {name}: a reason" in str(sent)
    assert isinstance(received, WeightsError)
    assert (driver.memory, driver.contexts) == ({}, 0)


def test_a_machine_without_the_driver_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "DRIVER", "libcuda-that-is-not-there.so")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    with pytest.raises(CudaError, match="no CUDA driver: libcuda-that-is-not-there"):
        shared_memory.Driver(GPU)


def test_a_tensor_on_another_device_is_rounded_a_piece_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other device is ``meta``, whose tensors have no values: what is asked of it counts."""
    monkeypatch.setattr(connection_module, "PIECE", 5)
    asked: list[int] = []
    to = Tensor.to

    def note(self: Tensor, *given: Any, **named: Any) -> Tensor:
        asked.append(self.numel())
        return to(self, *given, **named)

    monkeypatch.setattr(Tensor, "to", note)
    fill(torch.empty(4, 3, dtype=torch.bfloat16, device="meta"), torch.ones(4, 3))
    assert asked == [5, 5, 2]


class Engine:
    def __init__(self, url: str) -> None:
        self.url = url
        self.session = object()
        self.receives = msgspec.convert(
            {"workers": 1, "backends": ["gloo", "ipc"]}, ipc_receives(), strict=False
        )


def ipc_receives() -> Any:
    from prime_rl.plugins.weight_transports import Receives

    return Receives


def test_an_engine_on_another_machine_is_refused(tmp_path: Path) -> None:
    delivery = BroadcastDelivery(tmp_path, "ipc", 1.0)
    delivery.check(Engine("http://127.0.0.1:80"))
    delivery.check(Engine("http://[::1]:80"))
    with pytest.raises(EngineError, match=r"10\.0\.0\.7:80 is not known to be on the trainer's ma"):
        delivery.check(Engine("http://10.0.0.7:80"))


def test_other_systems_than_linux_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = IpcTransport(PluginConfig())
    transport.check("cuda")
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match="'ipc', which needs Linux; this is darwin"):
        transport.check("auto")
