"""A CUDA device and ranks that are not there: real trainer code on tensors without values.

``fake_cuda`` answers for the device, and ``fake_ranks`` for the other ranks: their collectives
complete at once. What is recorded: operations that wait for the device, kernels, float32 matrix
products, collectives. Nothing is computed, so no value that comes back means anything.

A CPU build of torch (2.13, x86-64 Linux) needs help to run its backward pass on CUDA tensors: a
device guard (``fake_cuda.cpp``), and two of its functions replaced for the life of the process.
Use a process of its own (``fake_cuda_cases.py``).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_dot_product_attention_math"}
HAS_PRIMARY_CONTEXT = 4
"""Index among the virtual functions of ``at::AcceleratorHooksInterface``."""
RETURN_0, RETURN_CUDA = b"\x31\xc0\xc3", b"\xb8\x01\x01\0\0\xc3"
"""Machine code: ``return 0``; ``return {DeviceType::CUDA, has_value}``."""


def lacks() -> str:
    """What this machine lacks to pretend; empty: nothing."""
    if platform.machine() != "x86_64" or sys.platform != "linux":
        return "x86-64 Linux"
    if torch.version.cuda is not None or not torch.__version__.startswith("2.13."):
        return "a CPU build of torch 2.13"
    return ""


def pretend(folder: Path) -> None:
    """Make this process's torch compute on fake CUDA tensors. ``folder``: for the built guard."""
    lib = Path(torch.__file__).parent / "lib"
    include = lib.parent / "include"
    built, source = folder / "guard.so", Path(__file__).with_suffix(".cpp")
    paths = [f"-I{include}", f"-I{include}/torch/csrc/api/include", f"-L{lib}", "-lc10"]
    command = ["g++", "-shared", "-fPIC", "-std=c++20", "-o", str(built), str(source), *paths]
    subprocess.run(command, check=True)
    ctypes.CDLL(str(built), ctypes.RTLD_GLOBAL)
    torch_cpu = ctypes.CDLL(str(lib / "libtorch_cpu.so"))
    accelerator = torch_cpu["_ZN2at11accelerator14getAcceleratorEb"]
    _replace(ctypes.cast(accelerator, ctypes.c_void_p).value or 0, RETURN_CUDA)
    hooks = torch_cpu["_ZN2at6detail12getCUDAHooksEv"]
    hooks.restype = ctypes.c_void_p
    pointers = ctypes.POINTER(ctypes.c_void_p)
    functions = ctypes.cast(ctypes.cast(hooks(), pointers)[0], pointers)
    _replace(functions[HAS_PRIMARY_CONTEXT] or 0, RETURN_0)


def _replace(start: int, code: bytes) -> None:
    libc, page = ctypes.CDLL(None, use_errno=True), start & -mmap.PAGESIZE
    writable, runnable = 7, 5
    assert libc.mprotect(ctypes.c_void_p(page), 2 * mmap.PAGESIZE, writable) == 0
    ctypes.memmove(start, code, len(code))
    assert libc.mprotect(ctypes.c_void_p(page), 2 * mmap.PAGESIZE, runnable) == 0


class Recorder(TorchDispatchMode):
    """Counts what reaches the device; answers a wait for it with real values, so that the host goes
    on."""

    def __init__(self) -> None:
        super().__init__()
        self.clear()

    def clear(self) -> None:
        """Forget everything, before a step."""
        self.waits: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()
        self.float32_products: Counter[str] = Counter()
        self.collectives: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        first = args[0] if args and isinstance(args[0], FakeTensor) else None
        on_device = first is not None and first.device.type == "cuda"
        self.kernels[name] += 1
        if func.namespace == "c10d":
            self.collectives[f"{name} {_dtype(args)}"] += 1
        if name in PRODUCTS:
            self._observe_product(name, args)
        if on_device and (empty := _depends_on_values(func, args)) is not None:
            self.waits[f"{name} {_where()}"] += 1
            return empty
        if func is aten._local_scalar_dense.default and first is not None:
            self.waits[f"item {_where()}"] += on_device
            kind = first.dtype
            return True if kind == torch.bool else 1.0 if kind.is_floating_point else 1
        to = kwargs.get("device")
        copied = func is aten._to_copy.default and to is not None
        if on_device and copied and torch.device(to).type == "cpu":
            self.waits[f"to host {_where()}"] += 1
            return torch.ones(first.shape, dtype=kwargs.get("dtype") or first.dtype)
        return func(*args, **kwargs)

    def _observe_product(self, name: str, args: Any) -> None:
        factors = [each for each in args if isinstance(each, Tensor)]
        # The rotary angles are an outer product, in float32 by intent.
        summed = factors[1 if "add" in name else 0].shape[-1] > 1
        if summed and any(each.dtype == torch.float32 for each in factors):
            shapes = " x ".join(str(list(each.shape)) for each in factors)
            self.float32_products[f"{name} {shapes} {_where()}"] += 1


def _depends_on_values(func: Any, args: Any) -> Tensor | None:
    """For an operation whose result's size lies in the tensor, an empty result; else None."""
    first = args[0]
    masks = args[1] if func is aten.index.Tensor else ()
    if any(each is not None and each.dtype == torch.bool for each in masks):
        return first.new_empty((0, *first.shape[masks[0].dim() :]))
    if func is aten.nonzero.default:
        return first.new_empty((0, first.dim()), dtype=torch.int64)
    return first.new_empty(0) if func is aten.masked_select.default else None


def _dtype(args: Any) -> str:
    """Of the first tensor, which may lie in lists."""
    for each in args:
        while isinstance(each, list) and each:
            each = each[0]
        if isinstance(each, Tensor):
            return str(each.dtype).removeprefix("torch.")
    return ""


def _where() -> str:
    """The line of ours that caused an operation."""
    for frame in reversed(traceback.extract_stack()):
        if "/prime_rl" in frame.filename:
            return f"{os.path.basename(frame.filename)}:{frame.lineno}"
    return "elsewhere"


_NUMPY = Tensor.numpy


def _numpy(tensor: Tensor, **options: Any) -> Any:
    assert tensor.device.type == "cpu", f"numpy() of a tensor on {tensor.device}"
    if not isinstance(tensor, FakeTensor):
        return _NUMPY(tensor, **options)
    with unset_fake_temporarily():
        return torch.ones(tensor.shape, dtype=tensor.dtype).numpy()


_TO = nn.Module.to


def _move(module: nn.Module, device: Any = None, dtype: Any = None) -> nn.Module:
    """``module.to(device)``: torch cannot swap a fake parameter in place. It can swap shards."""
    if device is None:
        return module
    if any(isinstance(each, DTensor) for each in module.parameters()):
        return _TO(module, device)
    device = torch.device(device)
    moved: dict[int, nn.Parameter] = {}
    for each in module.modules():
        for name, old in each._parameters.items():
            if old is not None and not isinstance(old, DTensor) and old.device.type != device.type:
                if id(old) not in moved:
                    moved[id(old)] = nn.Parameter(old.detach().to(device), old.requires_grad)
                each._parameters[name] = moved[id(old)]
        for name, buffer in each._buffers.items():
            each._buffers[name] = None if buffer is None else buffer.to(device)
    return module


@contextlib.contextmanager
def fake_cuda(capability: tuple[int, int] = (9, 0), gpus: int = 8) -> Iterator[Recorder]:
    """An H100. Tensors made inside have no values; the device never holds them."""
    answers: dict[str, Any] = {
        "torch.cuda.is_available": lambda: True,
        "torch.cuda.device_count": lambda: gpus,
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.is_bf16_supported": lambda *a, **k: True,
        "torch.cuda.get_device_capability": lambda *a: capability,
        "torch.cuda.get_device_properties": lambda *a: SimpleNamespace(total_memory=80 * 2**30),
        "torch.cuda.get_device_name": lambda *a: "NVIDIA H100 80GB HBM3",
        "torch.cuda.max_memory_allocated": lambda *a: 0,
        "torch.cuda.get_rng_state": lambda *a: torch.zeros(16, dtype=torch.uint8),
        "torch.cuda.synchronize": lambda *a: None,
        "torch.cuda.empty_cache": lambda *a: None,
        "torch.cuda.amp.common.amp_definitely_not_available": lambda: False,
        "torch.Tensor.numpy": _numpy,
        "torch.Tensor.pin_memory": lambda tensor, *a: tensor,
        "torch.nn.Module.to": _move,
        "torch.nn.Module.float": lambda module: module,  # all are made in float32
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        for name, answer in answers.items():  # after the mode: with a GPU it would ask for memory
            stack.enter_context(mock.patch(name, answer))
        stack.enter_context(mock.patch.object(FakeTensorMode, "avoid_device_init", True))
        yield stack.enter_context(Recorder())


class _Stream:
    """A CUDA stream, or an event on one, where everything is done at once."""

    priority = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cuda", 0)

    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or _Stream()

    def query(self) -> bool:
        return True


@contextlib.contextmanager
def fake_ranks(size: int) -> Iterator[None]:
    """Rank 0 of ``size``, within ``fake_cuda``. All ranks say what rank 0 says."""
    from prime_rl.trainer import parallel

    current, make_mesh = _Stream(), parallel.init_device_mesh

    def mesh(*args: Any, **options: Any) -> Any:
        with unset_fake_temporarily():  # ranks have values
            return make_mesh(*args, **options)

    answers: dict[str, Any] = {
        "torch.cuda.Stream": _Stream,
        "torch.cuda.Event": _Stream,
        "torch.cuda.current_stream": lambda *a: current,
        "torch.cuda.default_stream": lambda *a: current,
        "torch.cuda.stream": lambda stream: contextlib.nullcontext(),
        "torch.cuda.device": lambda *a: contextlib.nullcontext(),
        "torch.cuda.set_device": lambda *a: None,
        "torch.cuda.is_initialized": lambda: True,
        "torch.Tensor.record_stream": lambda tensor, stream: None,
        "prime_rl.trainer.parallel.init_device_mesh": mesh,
        "prime_rl.trainer.parallel.gather": lambda value, group=None: [value] * size,
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch(name, answer))
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
        try:
            yield
        finally:
            dist.destroy_process_group()
