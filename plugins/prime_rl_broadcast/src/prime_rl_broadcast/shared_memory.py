"""Memory that rank 0 fills and other processes of this machine read: of the host, or of a GPU.

    host   an anonymous file (``memfd_create``): its descriptor goes through a socket
    GPU    memory of the CUDA driver: a handle of 64 bytes names it

Neither has a name in a file system: the kernel and the driver free it when the last process that
has it closes it or ends, however it ends. torch's own sharing (``torch.multiprocessing``) keeps its
counts in ``/dev/shm``, where they stay if the process is killed; and it shares a GPU's memory
between two processes of one version of torch only, which trainer and engine need not have.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

NAME = "prime-rl-weights"
"""The name of the anonymous files, for a reader of ``/proc``."""
SEAL_FUTURE_WRITE = 0x0010
"""``F_SEAL_FUTURE_WRITE`` of Linux 5.1, which the module ``fcntl`` does not name."""
DRIVER = "libcuda.so.1"
HANDLE_BYTES = 64
PEER_ACCESS = 1
"""``CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS``: the memory may be another GPU's."""


class CudaError(RuntimeError):
    """The CUDA driver refuses."""


class HostMemory:
    """Host memory as the process that shares it sees it."""

    def __init__(self, size: int) -> None:
        self.descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, size)
        pages = mmap.mmap(self.descriptor, size)
        # Others can neither shrink it below what this process has mapped, nor write to it.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals | SEAL_FUTURE_WRITE)
        self.tensor = torch.frombuffer(pages, dtype=torch.uint8)
        """[size]. The pages are freed with it."""

    @property
    def handle(self) -> bytes:
        """It has none but its descriptor."""
        return b""

    def written(self) -> None:
        """To be called before others read it."""

    def close(self) -> None:
        os.close(self.descriptor)
        del self.tensor


class OpenedHost:
    """Host memory as a process that reads it sees it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self, buffer: Tensor) -> None:
        """Its first bytes, into ``buffer`` [bytes] on the host.

        Read and not mapped: a mapping would take a page fault for each 4 KiB."""
        view = buffer.numpy().data
        done = 0
        while done < len(view):
            size = os.preadv(self._descriptor, [view[done:]], done)
            if size == 0:
                raise OSError(f"the shared memory ends after {done} of {len(view)} bytes")
            done += size

    def close(self) -> None:
        os.close(self._descriptor)


class CudaMemory:
    """On a GPU, of the process that shares it.

    Not from torch's allocator: a handle would name the whole segment that a tensor lies in, and
    segments that expand, as trainers use them, have none."""

    descriptor: int | None = None

    def __init__(self, size: int, device: torch.device) -> None:
        self._driver = Driver(device)
        self._pointer = self._driver.allocate(size)
        try:
            self.handle = self._driver.export(self._pointer)
            self.tensor = self._driver.tensor(self._pointer, size)
        except BaseException:
            self._driver.free(self._pointer)
            raise

    def written(self) -> None:
        self._driver.wait()

    def close(self) -> None:
        del self.tensor
        self._driver.free(self._pointer)


class OpenedCuda:
    """On a GPU, of a process that reads it."""

    def __init__(self, handle: bytes, device: torch.device) -> None:
        self._driver = Driver(device)
        self._pointer = self._driver.open(handle)

    def read(self, buffer: Tensor) -> None:
        """Its first bytes, into ``buffer`` [bytes] on the GPU."""
        self._driver.copy(self._pointer, buffer)
        self._driver.wait()  # rank 0 will write to it again

    def close(self) -> None:
        self._driver.close(self._pointer)


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class Driver:
    """What is needed of the CUDA driver, on one device, in torch's context."""

    def __init__(self, device: torch.device) -> None:
        """Raises ``CudaError`` without a driver."""
        self._device = device
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self._number = torch.cuda.current_device() if device.index is None else device.index
        try:
            self._library: Any = load_driver()
        except OSError as error:
            raise CudaError(f"no CUDA driver: {error}") from error

    def allocate(self, size: int) -> int:
        pointer = ctypes.c_uint64()
        with self._context():
            self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        return pointer.value

    def free(self, pointer: int) -> None:
        with self._context():
            self._call("cuMemFree_v2", ctypes.c_uint64(pointer))

    def export(self, pointer: int) -> bytes:
        """The handle by which another process opens what ``allocate`` returned."""
        handle = _Handle()
        with self._context():
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(pointer))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        pointer = ctypes.c_uint64()
        opened = _Handle.from_buffer_copy(handle)
        with self._context():
            self._call(
                "cuIpcOpenMemHandle_v2", ctypes.byref(pointer), opened, ctypes.c_uint(PEER_ACCESS)
            )
        return pointer.value

    def close(self, pointer: int) -> None:
        with self._context():
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(pointer))

    def copy(self, pointer: int, buffer: Tensor) -> None:
        """Fill ``buffer`` from a pointer, on torch's stream."""
        stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
        target = ctypes.c_uint64(buffer.data_ptr())
        size = ctypes.c_size_t(buffer.numel())
        with self._context():
            self._call("cuMemcpyDtoDAsync_v2", target, ctypes.c_uint64(pointer), size, stream)

    def wait(self) -> None:
        """Until the device has done what torch's stream has."""
        torch.cuda.current_stream(self._device).synchronize()

    def tensor(self, pointer: int, size: int) -> Tensor:
        """[size], the memory at a pointer of this process."""
        array = _CudaArray(pointer, size)
        return torch.as_tensor(array, device=torch.device("cuda", self._number))

    @contextmanager
    def _context(self) -> Iterator[None]:
        """The context in which torch works: the device's primary one, also in a thread that torch
        has not been used in."""
        context = ctypes.c_void_p()
        number = ctypes.c_int(self._number)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
        try:
            self._call("cuCtxPushCurrent_v2", context)
            try:
                yield
            finally:
                self._call("cuCtxPopCurrent_v2", ctypes.byref(context))
        finally:
            self._call("cuDevicePrimaryCtxRelease_v2", number)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            reason = (text.value or b"unknown").decode()
            raise CudaError(f"{name}: {reason} (CUDA driver error {code})")


class _CudaArray:
    """Memory of a GPU in the form that torch takes without a copy."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "version": 3, "shape": (size,), "typestr": "|u1", "data": (pointer, False)
        }  # fmt: skip


def load_driver() -> Any:
    """The CUDA driver of this process, which torch uses too."""
    return ctypes.CDLL(DRIVER)


def has_driver(device: torch.device) -> bool:
    """Whether a device's memory can be shared. ROCm names its devices ``cuda`` too."""
    return device.type == "cuda" and torch.version.cuda is not None
