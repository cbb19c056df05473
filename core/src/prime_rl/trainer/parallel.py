"""Many trainer ranks: who a process is, what ranks tell one another, and the policy in shards.

    mesh [replicas, shards]    rank = replica * shards + shard

A rank holds one shard of every weight, gradient and optimizer moment. Before a block runs, forward
or backward, the ranks of a replica gather its weights; after its backward each keeps its shard of
the gradient's sum over all ranks (FSDP2; Zhao et al. 2023, arXiv:2304.11277; replicas: their
hybrid sharding). Deviations:

1. Gradients are summed, not averaged: our loss is a sum over global counts already.
2. Weights are gathered in float32: ``trainer.dtype`` rounds where one rank would, so that the
   curve does not depend on the number of ranks.

One rank has no process group, no mesh and no wrapper. Everything here then does nothing.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from prime_rl.errors import ConfigError, WeightsError
from prime_rl.trainer.place import STORE, Place

TIMEOUT = timedelta(hours=2)
"""How long ranks wait for one that writes to a disk that is full. A rank that dies does not need
it: whoever started the ranks ends the others."""


@contextmanager
def joined(place: Place, device: torch.device) -> Iterator[None]:
    """Together with the other ranks: tensors of a GPU go by NCCL, those of the host by gloo.

    After an error nothing is taken down: that would wait for ranks that wait for us. Who fails ends
    its process (``__main__.leave``).
    """
    if place.size == 1:
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = _local_store(place) if STORE in os.environ else None
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=place.rank if store else -1,
        world_size=place.size if store else -1,
        timeout=TIMEOUT,
    )
    yield
    dist.destroy_process_group()


def _local_store(place: Place) -> Any:
    """A file, and loopback for what follows: ranks of one machine listen on nothing else."""
    if sys.platform == "linux":
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")
    store = dist.FileStore(os.environ[STORE], place.size)  # type: ignore[attr-defined]
    store.set_timeout(TIMEOUT)  # else 300 s: who reads a large model from a slow disk comes later
    return store


def several_ranks() -> bool:
    """Whether anybody else trains this model."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """0 is the one that speaks for all: it publishes, measures and logs."""
    return dist.get_rank() if several_ranks() else 0


def num_ranks() -> int:
    return dist.get_world_size() if several_ranks() else 1


Group = dist.ProcessGroup | None
"""Who talks. None: all ranks, from the main thread; a thread needs a group of its own."""


def host_group() -> Group:
    """A group for another thread; every rank calls this at the same point."""
    return cast(Group, dist.new_group(backend="gloo", timeout=TIMEOUT)) if several_ranks() else None


def gather(value: Any, group: Group = None) -> list[Any]:
    """What every rank has, on all of them, in order of rank. Travels as JSON."""
    if not several_ranks():
        return [value]
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(num_ranks())]
    dist.all_gather(sizes, torch.tensor([len(data)]), group=group)
    lengths = [int(size) for size in sizes]
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(data)] = data
    columns = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(columns, padded, group=group)
    pairs = zip(columns, lengths, strict=True)
    return [json.loads(column[:length].numpy().tobytes()) for column, length in pairs]


def barrier(group: Group = None) -> None:
    """Until every rank is here. Over the host: no GPU waits."""
    if several_ranks():
        dist.all_reduce(torch.zeros(1), group=group)


def on_main(action: Callable[[], object], group: Group = None) -> None:
    """Rank 0 acts and the others wait; all raise if it fails: ``WeightsError`` for what a disk may
    refuse, so that all try again or none does."""
    on_all(action if rank() == 0 else lambda: None, group)


def on_all(action: Callable[[], object], group: Group = None) -> None:
    """Every rank acts, without talking to others; all raise if one fails, as ``on_main`` says."""
    error = None
    try:
        action()
    except Exception as raised:  # the others wait for us, in a thread perhaps
        error = raised
    _agree(error, group)


def stream_to_main(
    tensors: Mapping[str, Tensor],
    use: Callable[[Iterator[Tensor]], object],
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Rank 0 uses the whole tensors, one at a time; all raise if that fails.

    They come on ``device`` (None: the host). ``dtype``: what floats are rounded to before they
    travel (None: nothing is). Gathering one takes every rank. So when ``use`` fails the rest is
    gathered for nothing. Where gathering itself fails (no memory) ranks are out of step: that error
    ends the rank.
    """
    broken: list[Exception] = []

    def gathered() -> Iterator[Tensor]:
        for tensor in tensors.values():
            try:
                whole = _whole(tensor, device or torch.device("cpu"), dtype)
            except Exception as raised:
                broken.append(raised)
                raise
            yield whole

    stream, error = gathered(), None
    if rank() == 0:
        try:
            use(stream)
        except (OSError, WeightsError) as raised:
            if broken:  # whatever has been made of it: trying again would hang
                raise broken[0] from None
            error = raised
    if several_ranks():
        for _ in stream:
            pass
    _agree(error)


def _whole(tensor: Tensor, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    tensor = tensor.detach()
    if dtype is not None and tensor.is_floating_point():
        tensor = tensor.to(dtype)
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.to(device).contiguous() if rank() == 0 else tensor


@dataclass(frozen=True)
class Part:
    """A run of a tensor's elements, in row-major order."""

    values: Tensor
    """[elements]"""
    start: int
    """How many come before them."""


def own_part(tensor: Tensor) -> Part | None:
    """What this rank contributes to the whole: every element is in one rank's part. Of a tensor
    that all hold, rank 0's; replicas of a shard divide it among themselves.

    None, on every rank, for a tensor whose shards are no runs of elements: it has to be gathered.
    """
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        values = tensor.reshape(-1)
        return Part(values if rank() == 0 else values[:0], 0)
    placements, mesh = tensor.placements, tensor.device_mesh
    shards = [p for p in placements if type(p) is not Replicate]
    by_rows = not shards or (len(shards) == 1 and type(shards[0]) is Shard and shards[0].dim == 0)
    if not by_rows or mesh.size() != num_ranks():
        return None
    rows, values = max((1, *tensor.shape[:1])), tensor.to_local().reshape(-1)
    start, replica, replicas = 0, 0, 1
    place = mesh.get_coordinate() or ()
    for placement, size, index in zip(placements, mesh.shape, place, strict=True):
        if type(placement) is Replicate:
            replica, replicas = replica * size + index, replicas * size
        else:  # as torch.chunk cuts: the last parts may have fewer rows, or none
            start = min(index * -(-rows // size), rows) * (tensor.numel() // rows)
    first, last = (len(values) * n // replicas for n in (replica, replica + 1))
    return Part(values[first:last], start + first)


def _agree(error: Exception | None, group: Group = None) -> None:
    """Raise on every rank if one has an error: its own, or that of the first other one that has.
    What trying again does not mend counts before what a disk refuses."""
    refused = isinstance(error, (OSError, WeightsError))
    all_said = gather(None if error is None else [refused, str(error)], group)
    said = [(number, *each) for number, each in enumerate(all_said) if each is not None]
    lasting = [each for each in said if not each[1]]
    if error is not None and not (refused and lasting):
        raise error
    for number, may_be_mended, text in lasting or said:
        raise (WeightsError if may_be_mended else RuntimeError)(f"rank {number}: {text}")


def full(tensor: Tensor) -> Tensor:
    """A sharded number as a number; every rank calls this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard(root: nn.Module, blocks: set[str], device: torch.device, replicas: int) -> None:
    """Leave each rank its part of ``root``: one unit each module of a class named in ``blocks``,
    one for the rest.

    Raises ``ConfigError`` if the ranks do not divide into ``replicas``, or nothing is a block.
    """
    if num_ranks() % replicas:
        raise ConfigError(f"trainer.dp_replicate is {replicas}, the ranks are {num_ranks()}")
    units = [module for module in root.modules() if type(module).__name__ in blocks]
    if not units:
        raise ConfigError(
            f"model: no module is one of its blocks ({', '.join(sorted(blocks)) or 'none named'}), "
            "so there is nothing to shard by. Train it with trainer.num_ranks = 1."
        )
    shape, names = (num_ranks() // replicas,), ("shard",)
    if replicas > 1:
        mesh = init_device_mesh(
            device.type, (replicas, *shape), mesh_dim_names=("replicate", *names)
        )
        for group in mesh.get_all_groups():  # else ten minutes, with NCCL
            _set_pg_timeout(TIMEOUT, group)
    else:
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    for module in (*units, root):
        sharded = fully_shard(
            module, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32)
        )
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sum


def begin_backward(root: nn.Module, last: bool) -> None:
    """Before a micro batch's backward pass: replicas add up their gradients after the ``last``."""
    if isinstance(root, FSDPModule):
        root.set_requires_all_reduce(last)
        root.set_is_last_backward(last)


def reshard(root: nn.Module) -> None:
    """After a forward pass that no backward pass follows: drop what it has gathered."""
    if isinstance(root, FSDPModule):
        root.reshard()
