"""A GPU and ranks that are not there: the trainer's own code on tensors without values.

The tensors lie on the CPU, so that this works with any build of torch. What the code asks of a GPU
is answered as a GPU would: then it takes the same kernels, dtypes and blocks. Collectives of fake
ranks complete at once. ``tests/fake_cuda.py`` does the same with CUDA tensors; a test
compares the two.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed.fake_pg import FakeStore

BLOCK = 2**26
"""Logits of a block of the LM head on a GPU (``Kernel.block_logits``)."""

_NUMPY = Tensor.numpy


def _numpy(tensor: Tensor, **options: Any) -> Any:
    if not isinstance(tensor, FakeTensor):
        return _NUMPY(tensor, **options)
    with unset_fake_temporarily():
        return torch.ones(tensor.shape, dtype=tensor.dtype).numpy()


def _first(policy: Any, packings: Any, device: torch.device, half: bool) -> None:
    """Rows go through the model in the fastest way. The trainer's own check reads values."""
    policy.use(packings[0])


def _balanced(
    places: Tensor, num_ranks: int, num_here: int, group: Any
) -> tuple[Tensor, list[int], list[int]]:
    """As the trainer's ``exchange_counts``, if every expert is chosen equally often."""
    first, rest = divmod(len(places), num_ranks)
    sizes = [first + (number < rest) for number in range(num_ranks)]
    return torch.zeros(num_ranks * num_here, dtype=torch.int64), sizes, sizes


def _kernel_answers(gpu: bool, compiled: bool) -> dict[str, Any]:
    """Answers to what ``prime-rl-kernels``, if it is installed, asks of a GPU."""
    if find_spec("prime_rl_kernels") is None:
        return {}
    return _triton_kernels(compiled) if gpu else {}


def _triton_kernels(compiled: bool) -> dict[str, Any]:
    """Answers with which it takes its Triton kernels."""
    answers: dict[str, Any] = {"prime_rl_kernels.gpu_check.is_usable": lambda device: True}
    if compiled:  # the compiler has its own
        answers["prime_rl_kernels.gpu_layers.replace_layers"] = lambda model: None
    return answers


@contextlib.contextmanager
def fake_tensors(gpu: bool, half: bool, compiled: bool = False) -> Iterator[None]:
    """Tensors made inside have no values. ``gpu``: kernels are those of a GPU; ``half``: in
    bfloat16; ``compiled``: a run would compile the decoder blocks."""
    answers: dict[str, Any] = {
        "torch.Tensor.numpy": _numpy,
        "torch.Tensor.tolist": lambda tensor: _numpy(tensor.cpu()).tolist(),
        "prime_rl.trainer.state.find_packing": _first,
        "prime_rl.trainer.token_exchange.exchange_counts": _balanced,
        "torch.nn.Module.to": lambda module, *a, **k: module,
        "torch.nn.Module.float": lambda module: module,
        **_kernel_answers(gpu, compiled),
    }
    if gpu:
        answers |= {
            "torch.Tensor.is_cuda": property(lambda tensor: True),
            "torch.cuda.get_device_capability": lambda *a: (9, 0),
        }

    with contextlib.ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        for name, answer in answers.items():
            stack.enter_context(mock.patch(name, answer))
        if gpu and not half:  # no flash kernel takes float32 on a GPU
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        yield


@contextlib.contextmanager
def fake_ranks(size: int) -> Iterator[None]:
    """Rank 0 of ``size``. All ranks say what rank 0 says. One rank has a group of its own only if
    the trainer makes one."""
    make_mesh = init_device_mesh
    join = dist.init_process_group

    def mesh(*args: Any, **options: Any) -> Any:
        with unset_fake_temporarily():  # ranks have values
            return make_mesh(*args, **options)

    def join_fakes(*_: Any, **__: Any) -> None:
        join("fake", store=FakeStore(), rank=0, world_size=size)

    answers: dict[str, Any] = {
        "torch.distributed.init_process_group": join_fakes,
        "prime_rl.trainer.parallel.init_device_mesh": mesh,
        "prime_rl.trainer.parallel.gather": lambda value, group=None: [value] * size,
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch(name, answer))
        if size > 1:
            join_fakes()
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


@contextlib.contextmanager
def model_from(config: Any) -> Iterator[Path]:
    """A folder, from which transformers loads a model of this architecture, without weights."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    def load(path: Any, dtype: torch.dtype = torch.float32, **_: Any) -> tuple[Any, dict[str, Any]]:
        return AutoModelForCausalLM.from_config(config, dtype=dtype), {"missing_keys": []}

    with tempfile.TemporaryDirectory() as name:
        with unset_fake_temporarily():
            save_file({"fake": torch.zeros(1)}, os.path.join(name, "model.safetensors"))
            config.save_pretrained(name)
        with mock.patch.object(AutoModelForCausalLM, "from_pretrained", load):
            yield Path(name)
